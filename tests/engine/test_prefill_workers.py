"""Prefill and decode apart behind one gateway, every API, on two real engines. `make test-nixl` runs it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from proxy.bench.harness.servers import MODEL_NAME, NEMOTRON_H, Server, Servers, generated_model
from proxy.commands.render_server import free_port
from proxy.pipeline.prefill import Prefills
from tests.harness.gateways import OwnGateway, knows_templates, own_gateway
from tests.harness.transfer_engine import Chat, nixl, two_round_chats
from tests.harness.waiting import wait_for

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(900)]

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")

TOKENS = 16

LEASE = 60  # seconds: longer than an answer takes


@dataclass
class Stand:
    prefill: Server
    decode: Server
    gateway: OwnGateway
    start: Callable[[str, int | None], Server]  # an engine of that role, at that port


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    model = generated_model(print, NEMOTRON_H)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), nixl())))
    with Servers(tmp_path_factory.mktemp("pools")) as servers:

        def engine(role: str, at: int | None = None) -> Server:
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            more = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kv_lease_duration": LEASE}}
            port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
            flags = ("--dtype", "float32", "--kv-transfer-config", json.dumps(transfer | more))
            return servers.engine(role, model, flags=flags, environment=port | {"PYTHONPATH": path}, port=at)

        prefill, decode = engine("kv_producer"), engine("kv_consumer")
        prefill.wait_until_ready()
        decode.wait_until_ready()
        # What is worth a second call depends on how fast this machine is just now: here everything is.
        patch = pytest.MonkeyPatch()
        patch.setattr(Prefills, "_is_worth_it", lambda *_: True)
        with own_gateway(decode, prefill_worker=(prefill.url,)) as gateway:
            wait_for(lambda: knows_templates(gateway), seconds=120)
            wait_for(lambda: gateway.gateway.prefill_pool.up, seconds=60)
            yield Stand(prefill, decode, gateway, engine)
        patch.undo()


def body_of(path: str, chat: Chat, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "stream": stream}
    if path == "/v1/completions":
        text = "\n".join(f"{message['role']}: {message['content']}" for message in chat)
        return body | {"prompt": text, "max_tokens": TOKENS}
    if path == "/v1/messages":
        return body | {"system": chat[0]["content"], "messages": chat[1:], "max_tokens": TOKENS}
    if path == "/v1/responses":
        return body | {"instructions": chat[0]["content"], "input": chat[1:], "max_output_tokens": TOKENS}
    return body | {"messages": chat, "max_tokens": TOKENS}


def text_in(path: str, answer: dict[str, Any]) -> str:
    """What the model said."""
    if path == "/v1/messages":
        return "".join(part["text"] for part in answer["content"])
    if path == "/v1/responses":
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    (choice,) = answer["choices"]
    return choice["text"] if path == "/v1/completions" else choice["message"]["content"]


def text_in_stream(path: str, stream: str) -> str:
    said = ""
    for line in stream.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if event.get("type") in ("content_block_delta", "response.output_text.delta"):
            said += event["delta"]["text"] if isinstance(event["delta"], dict) else event["delta"]
        for choice in event.get("choices") or ():
            said += choice["text"] if path == "/v1/completions" else choice["delta"].get("content") or ""
    return said


async def ask(client: httpx.AsyncClient, url: str, path: str, body: dict[str, Any]) -> str:
    """What is said. No answer tells a client where anything lies."""
    answer = await client.post(url + path, json=body)
    assert answer.status_code == 200, answer.text
    assert "remote_" not in answer.text
    return text_in_stream(path, answer.text) if body["stream"] else text_in(path, answer.json())


async def ask_all(url: str, asked: list[tuple[str, dict[str, Any]]]) -> list[str]:
    gate = asyncio.Semaphore(6)

    async def one(path: str, body: dict[str, Any]) -> str:
        async with gate:
            return await ask(client, url, path, body)

    async with httpx.AsyncClient(timeout=300) as client:
        return list(await asyncio.gather(*(one(path, body) for path, body in asked)))


def anew(body: dict[str, Any], number: int) -> dict[str, Any]:
    """The same, found in no cache."""
    return body | {"cache_salt": f"anew-{number}"}


def value(server: Server | OwnGateway, sample: str) -> float:
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(sample))


def sent(gateway: OwnGateway) -> float:
    return value(gateway, 'seamark_prefills_total{result="sent"}')


def nothing_is_lent(prefill: Server) -> bool:
    return value(prefill, "vllm:kv_cache_usage_perc") == 0


def test_every_api_is_answered_as_without_prefill_workers(stand: Stand):
    chats = two_round_chats(250, seed=77)
    asked = [
        (PATHS[number % 4], body_of(PATHS[number % 4], chat, stream=number // 4 % 2 == 1))
        for turn in chats
        for number, chat in enumerate(turn)
    ]
    right = asyncio.run(ask_all(stand.decode.url, [(path, anew(body, n)) for n, (path, body) in enumerate(asked)]))
    answers = asyncio.run(ask_all(stand.gateway.url, asked))
    differing = [number for number, (one, two) in enumerate(zip(answers, right, strict=True)) if one != two]
    print(f"{sent(stand.gateway):.0f} of {len(asked)} prompts were computed by the prefill worker")
    assert not differing
    assert sent(stand.gateway) == len(asked) and value(stand.gateway, 'seamark_prefills_total{result="failed"}') == 0
    assert value(stand.decode, "vllm:external_prefix_cache_hits_total") > 10_000
    wait_for(lambda: nothing_is_lent(stand.prefill), seconds=3 * LEASE)
    # No lease ended but of what could not be read: on a busy machine NIXL's first handshake may take too long.
    unread = value(stand.decode, "vllm:nixl_num_failed_transfers_total")
    assert value(stand.prefill, "vllm:nixl_num_kv_expired_reqs_total") <= unread <= 12


def test_requests_of_one_salt_load_what_was_computed_under_it(stand: Stand):
    chat, _ = two_round_chats(5, seed=5)
    path = PATHS[0]
    body = body_of(path, chat[4], stream=False)
    before, loaded = sent(stand.gateway), value(stand.decode, "vllm:external_prefix_cache_hits_total")
    (answer,) = asyncio.run(ask_all(stand.gateway.url, [(path, body | {"cache_salt": "mine"})]))
    (right,) = asyncio.run(ask_all(stand.decode.url, [(path, anew(body, 900))]))
    assert answer == right and sent(stand.gateway) == before + 1
    assert value(stand.decode, "vllm:external_prefix_cache_hits_total") > loaded + 500


def test_a_client_that_leaves_at_any_moment_leaves_nothing_lent(stand: Stand):
    chats, _ = two_round_chats(20, seed=6)

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            for number, chat in enumerate(chats):
                body = body_of(PATHS[0], chat, stream=number % 2 == 1) | {"max_tokens": 200}
                task = asyncio.create_task(client.post(stand.gateway.url + PATHS[0], json=body))
                await asyncio.sleep(0.02 * number)
                task.cancel()

    asyncio.run(leave())
    wait_for(lambda: value(stand.gateway, "seamark_inflight") == 0, seconds=60)
    wait_for(lambda: nothing_is_lent(stand.prefill) and nothing_is_lent(stand.decode), seconds=3 * LEASE)


def test_a_worker_that_dies_while_it_answers_leaves_nothing_lent_and_comes_back(stand: Stand):
    chats, _ = two_round_chats(8, seed=8)

    async def stream(chat: Chat, begun: asyncio.Semaphore) -> str:
        body = body_of(PATHS[0], chat, stream=True) | {"max_tokens": 2000, "ignore_eos": True}
        received = ""
        async with (
            httpx.AsyncClient(timeout=300) as client,
            client.stream("POST", stand.gateway.url + PATHS[0], json=body) as answer,
        ):
            async for piece in answer.aiter_text():
                if '"content"' in piece and '"content"' not in received:
                    begun.release()
                received += piece
        return received

    async def die() -> list[str]:
        begun = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(stream(chat, begun)) for chat in chats]
        for _ in range(3):  # some stream, others are at the prefill worker or wait
            await begun.acquire()
        stand.decode.process.kill()
        return list(await asyncio.gather(*tasks))

    ends = [received.strip().splitlines()[-1] for received in asyncio.run(die())]
    assert all('"error"' in end for end in ends), ends
    stand.decode.process.wait()
    wait_for(lambda: nothing_is_lent(stand.prefill), seconds=3 * LEASE)
    refused = httpx.post(stand.gateway.url + PATHS[0], json=body_of(PATHS[0], chats[0], stream=False), timeout=300)
    assert refused.status_code in (502, 503) and refused.json()["error"]["message"]

    stand.decode = stand.start("kv_consumer", int(stand.decode.url.rsplit(":", 1)[1]))
    stand.decode.wait_until_ready()
    wait_for(lambda: httpx.get(stand.gateway.url + "/ready").status_code == 200, seconds=120)
    asked = [(path, body_of(path, chats[4], stream=False)) for path in PATHS]
    before = sent(stand.gateway)
    answers = asyncio.run(ask_all(stand.gateway.url, asked))
    right = asyncio.run(
        ask_all(stand.decode.url, [(path, anew(body, 970 + n)) for n, (path, body) in enumerate(asked)])
    )
    assert answers == right and sent(stand.gateway) > before


def test_without_its_prefill_worker_a_worker_computes_alone(stand: Stand):
    stand.prefill.process.kill()
    stand.prefill.process.wait()
    chats, _ = two_round_chats(5, seed=7)
    asked = [(path, body_of(path, chats[4], stream=True)) for path in PATHS]
    before = sent(stand.gateway)
    answers = asyncio.run(ask_all(stand.gateway.url, asked))
    right = asyncio.run(
        ask_all(stand.decode.url, [(path, anew(body, 950 + n)) for n, (path, body) in enumerate(asked)])
    )
    assert answers == right and sent(stand.gateway) == before
