"""Two real workers behind one gateway: data parallel ranks, and one that is killed in the middle of everything."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys

import httpx
import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import MIN_TOKENS, Messages, ask, open_client, prose, tokens_of
from proxy.bench.harness.servers import ENGINE_ENVIRONMENT, ENGINE_FLAGS, MODEL_NAME, Server, free_port, generated_model
from proxy.boundaries.divergence import common_prefix
from tests.harness.gateways import CHAT, knows_templates, metric
from tests.harness.waiting import until, wait_for

SYSTEMS = [prose(150 + 40 * number, 700 + number) for number in range(6)]

STREAMS = 100

REPLAY_SECONDS = 120.0  # at most: it ends when all is replayed, which takes seconds on a quiet machine

UNIT = 16

FLAGS = ("--max-num-seqs", "32")

pytestmark = pytest.mark.thorough


def chat(system: int, question: str) -> Messages:
    return [{"role": "system", "content": SYSTEMS[system]}, {"role": "user", "content": question}]


def kill(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


async def oracle_hits(client: httpx.AsyncClient, worker: Server) -> list[int]:
    """For each system prompt, what of it the second request can hit at best: tokens."""
    hits = []
    for number in range(len(SYSTEMS)):
        one, other = [await tokens_of(client, worker.url, chat(number, text)) for text in ("A tide?", "Which wind?")]
        hits.append(common_prefix(one, other) // UNIT * UNIT)
    return hits


async def efficiency(client: httpx.AsyncClient, gateway: Server, oracle: list[int], name: str) -> float:
    """Delivered over possible, one request for each system prompt."""
    delivered = 0
    for number in range(len(SYSTEMS)):
        body = {"model": MODEL_NAME, "messages": chat(number, f"{name} {number}?"), "max_tokens": 2}
        answer = await client.post(gateway.url + CHAT, json=body)
        assert answer.status_code == 200, answer.text
        delivered += min(int(answer.headers["x-seamark-cached"]), oracle[number])
    return delivered / sum(oracle)


async def stream(client: httpx.AsyncClient, gateway: Server, number: int, begun: list[int]) -> tuple[str, str]:
    """The worker's name, and how a long stream ended: `whole`, `told` of an error, or `cut`."""
    body = {"model": MODEL_NAME, "messages": chat(number % len(SYSTEMS), f"{number}?"), "stream": True}
    body |= {"max_tokens": 200, "ignore_eos": True}
    async with client.stream("POST", gateway.url + CHAT, json=body) as answer:
        name = answer.headers.get("x-seamark-worker", "")
        if answer.status_code != 200:
            told = json.loads(await answer.aread())
            return name, "told" if told["error"]["code"] in ("worker_failed", "no_worker") else "cut"
        text = b""
        async for chunk in answer.aiter_raw():
            if not text:
                begun.append(number)
            text += chunk
    last = text.split(b"\n\n")[-2].removeprefix(b"data: ")
    if last == b"[DONE]":
        return name, "whole"
    return name, "told" if json.loads(last).get("error", {}).get("code") == "worker_failed" else "cut"


async def test_a_worker_that_dies_under_a_hundred_streams_and_comes_back(fleet):
    model = generated_model(print)
    first, second = fleet.engine("first", model, flags=FLAGS), fleet.engine("second", model, flags=FLAGS)
    first.wait_until_ready()
    second.wait_until_ready()
    flags = ("--health-interval", "0.3", "--replay-seconds", f"{REPLAY_SECONDS:g}")
    gateway = fleet.gateway(first, second, flags=flags)
    gateway.wait_until_ready("/ready", seconds=30)
    async with open_client() as client:

        async def all_are(state: str, wanted: bool) -> bool:
            workers = (await client.get(gateway.url + "/seamark/status")).json()["workers"]
            return all(each["up"] and each[state] is wanted for each in workers)

        await until(lambda: all_are("up", True), pause=0.05)
        oracle = await oracle_hits(client, first)
        for name in ("cold", "warm", "warmer"):
            before = await efficiency(client, gateway, oracle, name)
        assert before > 0.95

        begun: list[int] = []
        streams = [asyncio.create_task(stream(client, gateway, number, begun)) for number in range(STREAMS)]
        await until(lambda: len(begun) > STREAMS // 4, 300)
        kill(first)
        ends = await asyncio.gather(*streams)
        dead = first.url.removeprefix("http://")
        assert {how for _, how in ends} <= {"whole", "told"}
        assert any(how == "told" for name, how in ends if name == dead)
        assert all(how == "whole" for name, how in ends if name and name != dead)
        assert await efficiency(client, gateway, oracle, "meanwhile") > 0

        restarted = fleet.engine("restarted", model, flags=FLAGS, port=int(first.url.rsplit(":", 1)[1]))
        restarted.wait_until_ready()
        await until(lambda: all_are("warming", False), REPLAY_SECONDS + 10, pause=0.05)
        kill(second)  # from now on only what was replayed can be hit
        back = await efficiency(client, gateway, oracle, "back")
        print(f"\nhit efficiency {before:.3f} before, {back:.3f} after")
        assert back >= 0.95 * before


def ports_in_a_row(count: int) -> int:
    """The first of so many free ports."""

    def is_taken(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return next(first for first in iter(free_port, None) if not any(map(is_taken, range(first, first + count))))


async def test_each_data_parallel_rank_is_a_worker_whose_states_only_it_has(fleet):
    """With a port for each."""
    port = ports_in_a_row(3)
    flags = ["--data-parallel-size", "2", "--data-parallel-size-local", "2"]
    flags += ["--data-parallel-multi-port-external-lb", "--data-parallel-supervisor-port", str(port + 2)]
    environment = {name: value for name, value in ENGINE_ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
    command = [sys.executable, "-m", "engine_patches", "worker", str(generated_model(print)), "--port", str(port)]
    first = fleet.start("ranks", port, [*command, *ENGINE_FLAGS, *flags], environment)
    workers = [first, Server("rank", f"http://127.0.0.1:{port + 1}", first.log, first.process)]
    for server in workers:
        server.wait_until_ready()
    gateway = fleet.gateway(*workers)
    gateway.wait_until_ready("/ready", seconds=60)
    wait_for(lambda: metric(gateway, "seamark_worker_up") == 2 and knows_templates(gateway))
    async with open_client() as client:
        oracle = await oracle_hits(client, first)
        firsts = [chat(number, "A tide?") for number in range(len(SYSTEMS))]
        await asyncio.gather(*(ask(client, gateway.url, messages, MIN_TOKENS) for messages in firsts))
        answers = [await ask(client, gateway.url, chat(n, "Which wind?"), MIN_TOKENS) for n in range(len(SYSTEMS))]
        told = (await client.get(gateway.url + "/seamark/status")).json()["workers"]
        assert len({worker["boot"] for worker in told}) == 2
        holders = set()
        for number, answer in enumerate(answers):
            assert answer.cached_tokens == oracle[number] > 0
            # The rank that has not had it computes all of it: its answer is the uncached one.
            direct = [await ask(client, worker.url, chat(number, "Which wind?"), MIN_TOKENS) for worker in workers]
            (uncached,) = [each for each in direct if not each.cached_tokens]
            holders.add(1 - direct.index(uncached))
            assert exact.compare(answer, uncached).exact
        assert holders == {0, 1}
