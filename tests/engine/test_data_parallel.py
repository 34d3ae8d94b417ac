"""vLLM's data parallel ranks behind one gateway: with a port for each, every rank is a worker."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import MIN_TOKENS, Messages, ask, open_client, status_of, tokens_of
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import ENGINE_ENVIRONMENT, ENGINE_FLAGS, MATCH_UNITS, Server, Servers
from proxy.boundaries.token_ids import common_prefix
from proxy.commands.render_server import free_port
from tests.harness.gateways import knows_templates, metric
from tests.harness.waiting import wait_for

RANKS, SYSTEMS = 2, 4

SYSTEM_PROMPTS = [prose(120 + 60 * number, 900 + number) for number in range(SYSTEMS)]


def chat(system: int, question: str) -> Messages:
    return [{"role": "system", "content": SYSTEM_PROMPTS[system]}, {"role": "user", "content": question}]


def ports_in_a_row(count: int) -> int:
    """The first of so many free ports."""

    def is_taken(port: int) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return next(first for first in iter(free_port, None) if not any(map(is_taken, range(first, first + count))))


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, list[Server]]]:
    with Servers(tmp_path_factory.mktemp("ranks")) as servers:
        port = ports_in_a_row(RANKS + 1)
        flags = ["--data-parallel-size", str(RANKS), "--data-parallel-size-local", str(RANKS)]
        flags += ["--data-parallel-multi-port-external-lb", "--data-parallel-supervisor-port", str(port + RANKS)]
        environment = {name: value for name, value in ENGINE_ENVIRONMENT.items() if "MULTIPROCESSING" not in name}
        arguments = ["-m", "engine_patches", "worker", str(model), "--port", str(port), *ENGINE_FLAGS, *flags]
        first = servers._start("ranks", port, arguments, environment)
        others = [Server("rank", f"http://127.0.0.1:{port + number}", first.log, first.process) for number in (1,)]
        for server in (first, *others):
            server.wait_until_ready()
        yield servers, [first, *others]


@pytest.mark.thorough
async def test_each_rank_is_a_worker_whose_states_only_it_has(ranks, family):
    servers, workers = ranks
    gateway = servers.gateway(*workers)
    gateway.wait_until_ready("/ready", seconds=60)
    wait_for(lambda: metric(gateway, "seamark_worker_up") == RANKS and knows_templates(gateway), seconds=120)
    unit = MATCH_UNITS[family]
    async with open_client() as client:
        seconds = [chat(number, "Which wind?") for number in range(SYSTEMS)]
        firsts = [chat(number, "A tide?") for number in range(SYSTEMS)]
        await asyncio.gather(*(ask(client, gateway.url, messages, MIN_TOKENS) for messages in firsts))
        answers = [await ask(client, gateway.url, messages, MIN_TOKENS) for messages in seconds]
        listed = (await status_of(client, gateway.url))["workers"]
        assert len({worker["boot"] for worker in listed}) == RANKS
        holders = set()
        for first, second, answer in zip(firsts, seconds, answers, strict=True):
            one, other = [await tokens_of(client, workers[0].url, messages) for messages in (first, second)]
            assert answer.cached_tokens == common_prefix(one, other) // unit * unit > 0
            # The rank that has not had it computes all of it: its answer is the uncached one.
            direct = [await ask(client, worker.url, second, MIN_TOKENS) for worker in workers]
            (uncached,) = [each for each in direct if not each.cached_tokens]
            holders.add(1 - direct.index(uncached))
            assert exact.compare(answer, uncached).exact
        assert holders == set(range(RANKS))
