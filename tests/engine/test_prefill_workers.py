"""Prefill and decode apart behind one gateway, on two real engines and NIXL. `make test-nixl` runs it.

What is loaded, and what is not: the audit on NIXL's own schedulers (`test_transfer.py`). Other APIs:
`tests/unit/pipeline/test_prefill.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.bench.harness.servers import MODEL_NAME, NEMOTRON_H, Server, Servers, free_port, generated_model
from proxy.pipeline.prefill import Prefills
from tests.harness.gateways import CHAT, OwnGateway, knows_templates, metric, own_gateway
from tests.harness.two_round_chats import Chat, two_round_chats
from tests.harness.versions import nixl
from tests.harness.waiting import wait_for

pytestmark = [pytest.mark.on_request, pytest.mark.timeout(900)]

LEASE = 60  # seconds: longer than an answer takes

Body = dict[str, Any]


class Stand(NamedTuple):
    prefill: Server
    decode: Server
    gateway: OwnGateway


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    model = generated_model(print, NEMOTRON_H)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(nixl()))))
    with Servers(tmp_path_factory.mktemp("pools")) as servers, pytest.MonkeyPatch.context() as patch:

        def engine(role: str) -> Server:
            transfer = {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"}
            more = {"kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kv_lease_duration": LEASE}}
            port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
            flags = ("--dtype", "float32", "--kv-transfer-config", json.dumps(transfer | more))
            return servers.engine(role, model, flags=flags, environment=port | {"PYTHONPATH": path})

        prefill, decode = engine("kv_producer"), engine("kv_consumer")
        prefill.wait_until_ready()
        decode.wait_until_ready()
        # What is worth a second call depends on how fast this machine is just now: here everything is.
        patch.setattr(Prefills, "_is_worth_it", lambda *_: True)
        with own_gateway(decode, prefill_worker=(prefill.url,)) as gateway:
            wait_for(lambda: knows_templates(gateway), seconds=120)
            wait_for(lambda: gateway.gateway.prefill_pool.up, seconds=60)
            yield Stand(prefill, decode, gateway)


def bodies_of(chats: Iterable[Chat]) -> list[Body]:
    """Every second one a stream."""
    common = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 16}
    return [common | {"messages": chat, "stream": number % 2 == 1} for number, chat in enumerate(chats)]


def said(url: str, bodies: list[Body]) -> list[str]:
    """What the model answers, some at once. No answer tells a client where anything lies."""
    gate = asyncio.Semaphore(6)

    async def one(client: httpx.AsyncClient, body: Body) -> str:
        async with gate:
            answer = await client.post(url + CHAT, json=body)
        assert answer.status_code == 200 and "remote_" not in answer.text, answer.text
        told = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")] or [answer.text]
        choices = [choice for each in map(json.loads, told) for choice in each["choices"]]
        return "".join((each.get("delta") or each.get("message") or {}).get("content") or "" for each in choices)

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(timeout=300) as client:
            return list(await asyncio.gather(*(one(client, body) for body in bodies)))

    return asyncio.run(all_of_them())


def nothing_is_lent(stand: Stand) -> bool:
    return metric(stand.prefill, "vllm:kv_cache_usage_perc") == 0


def test_answers_are_those_of_one_engine_and_their_prompts_are_computed_by_the_other(stand: Stand):
    bodies = [body for chats in two_round_chats(60, seed=77) for body in bodies_of(chats)]
    alone = [body | {"cache_salt": f"{number}"} for number, body in enumerate(bodies)]  # found in no cache
    right = said(stand.decode.url, alone)
    answers = said(stand.gateway.url, bodies)
    assert [number for number, (one, two) in enumerate(zip(answers, right, strict=True)) if one != two] == []
    counted = [metric(stand.gateway, f'seamark_prefills_total{{result="{each}"}}') for each in ("sent", "failed")]
    assert counted == [len(bodies), 0]
    assert metric(stand.decode, "vllm:external_prefix_cache_hits_total") > 5_000
    wait_for(lambda: nothing_is_lent(stand), seconds=3 * LEASE)


def test_a_client_that_leaves_at_any_moment_leaves_nothing_lent(stand: Stand):
    chats, _ = two_round_chats(20, seed=6)

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            for number, body in enumerate(bodies_of(chats)):
                task = asyncio.create_task(client.post(stand.gateway.url + CHAT, json=body | {"max_tokens": 200}))
                await asyncio.sleep(0.02 * number)  # at another moment each
                task.cancel()

    asyncio.run(leave())
    wait_for(lambda: metric(stand.gateway, "seamark_inflight") == 0, seconds=60)
    wait_for(lambda: nothing_is_lent(stand), seconds=3 * LEASE)


def test_a_worker_that_dies_while_it_answers_leaves_nothing_lent(stand: Stand):
    chats, _ = two_round_chats(8, seed=8)
    begun = asyncio.Semaphore(0)

    async def stream(client: httpx.AsyncClient, body: Body) -> str:
        received = ""
        asked = body | {"stream": True, "max_tokens": 2000, "ignore_eos": True}
        async with client.stream("POST", stand.gateway.url + CHAT, json=asked) as answer:
            async for piece in answer.aiter_text():
                if '"content"' in piece and '"content"' not in received:
                    begun.release()
                received += piece
        return received.strip().splitlines()[-1]

    async def die() -> list[str]:
        async with httpx.AsyncClient(timeout=300) as client:
            tasks = [asyncio.create_task(stream(client, body)) for body in bodies_of(chats)]
            for _ in range(3):  # some stream, others are at the prefill worker or wait
                await begun.acquire()
            stand.decode.process.kill()
            return list(await asyncio.gather(*tasks))

    assert all('"error"' in end for end in asyncio.run(die()))
    wait_for(lambda: nothing_is_lent(stand), seconds=3 * LEASE)
