"""What goes through the way of an answer: `x-seamark-overhead-ms`, and a head that waits for its body."""

from __future__ import annotations

import contextlib

from proxy.http import asgi
from proxy.pipeline import request as request_of
from proxy.pipeline.request import OWN_TIME, Reply, Timings
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import InMemoryGateway, in_memory_gateway
from tests.harness.recording_worker import RecordingWorker

NAME = OWN_TIME.decode()

START = "http.response.start"


async def test_waiting_is_not_the_gateways_own_time(monkeypatch):
    now = [10.0]
    monkeypatch.setattr(request_of.time, "perf_counter", lambda: now[0])
    timings, sent = Timings(arrived=10.0), []

    async def send(message):
        sent.append(message)

    now[0] += 0.002
    with timings.waiting():
        now[0] += 5.0
    with contextlib.suppress(KeyError), timings.waiting():
        now[0] += 1.0
        raise KeyError
    now[0] += 0.0015
    reply = Reply(send, timings)
    head = {"type": START, "status": 200, "headers": [(b"a", b"b")]}
    await reply(head)
    await reply({"type": "http.response.body", "body": b"x"})
    assert sent[0]["headers"] == [(b"a", b"b"), (OWN_TIME, b"3.5")] and head["headers"] == [(b"a", b"b")]


async def test_only_the_head_of_a_whole_answer_waits_for_what_follows():
    held, sent = [], []

    async def send(message):
        sent.append(message)

    await Reply(send, Timings(), lambda: held.append(len(sent)))({"type": START, "status": 200, "headers": []})
    assert not held
    await asgi.send_whole(Reply(send, Timings(), lambda: held.append(len(sent))), 200, [], b"x")
    assert held == [1] and len(sent) == 3


async def own_time(gateway: InMemoryGateway, body, **headers: str) -> float:
    return float((await gateway.post(body, **headers)).headers[NAME])


async def test_every_answer_tells_it_whole_or_a_stream_stored_or_an_error():
    async with in_memory_gateway(RecordingWorker(), response_cache=2**20) as gateway:
        assert await own_time(gateway, chat("hi")) >= 0
        assert await own_time(gateway, chat("hi", stream=True)) >= 0
        same = {**chat("hi"), "temperature": 0}
        for _ in range(2):
            assert await own_time(gateway, same, x_seamark_cache="allow") >= 0
        assert await own_time(gateway, b"[") >= 0
        refused = await gateway.post(b"[")
        assert refused.status_code == 400


async def test_a_worker_that_is_a_gateway_too_does_not_tell_its_own():
    class Gateway(RecordingWorker):
        async def __call__(self, scope, receive, send) -> None:
            async def with_its_own(message):
                if message["type"] == "http.response.start":
                    message = {**message, "headers": [*message["headers"], (OWN_TIME, b"777.0")]}
                await send(message)

            await super().__call__(scope, receive, with_its_own)

    async with in_memory_gateway(Gateway()) as gateway:
        answer = await gateway.post(chat("hi"))
        assert answer.status_code == 200 and len(answer.headers.get_list(NAME)) == 1 and answer.headers[NAME] != "777.0"
