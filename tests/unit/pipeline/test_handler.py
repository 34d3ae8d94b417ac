"""Large bodies share the event loop with everything else."""

from __future__ import annotations

import asyncio
import itertools
import json
from unittest.mock import Mock

import pytest

from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.pipeline.handler import LARGE_BYTES, TURNS, RequestHandler
from proxy.settings import Settings
from tests.harness.gateways import chat


@pytest.fixture
def handler() -> RequestHandler:
    parts = ("pool", "reader", "dispatcher", "answer", "accounting", "idle", "preflights", "adapters")
    return RequestHandler(Settings(), Metrics(), keys=None, **{name: Mock() for name in parts})


async def test_large_bodies_take_turns_with_everything_else(handler):
    turns, others = [], 0
    done = asyncio.Event()

    async def tick() -> None:
        nonlocal others
        while not done.is_set():
            others += 1
            await asyncio.sleep(0)

    async def large() -> None:
        await handler._turn(LARGE_BYTES + 1)
        turns.append(others)  # what follows is one long piece of work

    ticking = asyncio.create_task(tick())
    await asyncio.gather(*(large() for _ in range(20)))
    done.set()
    await ticking
    assert all(after - before >= TURNS for before, after in itertools.pairwise(turns))


async def test_small_bodies_wait_for_no_turn(in_memory, worker):
    gateway = await in_memory(worker)
    await gateway.gateway.handler._turns.acquire()
    async with asyncio.timeout(30):
        assert (await gateway.post(chat("Tide?"))).status_code == 200


async def test_a_client_that_has_left_before_its_answers_head_counts_as_gone_whoever_else_got_the_answer(handler):
    counted = []
    handler._accounting.count = counted.append

    async def answer(request, send, watch) -> None:
        request.delivered = True  # to another client of the response cache
        raise asgi.ClientGone

    handler._answer = answer

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    extensions = {asgi.ON_DISCONNECT: lambda callback: None}
    scope = {"method": "GET", "path": "/v1/x", "query_string": b"", "headers": [], "extensions": extensions}
    await handler(scope, receive, receive)
    assert [request.status for request in counted] == [499]


async def test_without_memory_a_client_is_asked_to_come_again(handler, caplog):
    handler._answer.side_effect = MemoryError
    sent = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    extensions = {asgi.ON_DISCONNECT: lambda callback: None}
    scope = {"method": "GET", "path": "/v1/x", "query_string": b"", "headers": [], "extensions": extensions}
    await handler(scope, receive, send)
    assert sent[0]["status"] == 503 and b"retry-after" in dict(sent[0]["headers"])
    assert json.loads(sent[1]["body"])["error"]["code"] == "overloaded"
    assert "Traceback" not in caplog.text and handler._bodies.held == 0
