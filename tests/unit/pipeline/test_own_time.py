"""What goes through the way of an answer: `x-seamark-overhead-ms`, and a head that waits for its body."""

from __future__ import annotations

from proxy.pipeline.request import OWN_TIME
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import InMemoryGateway, in_memory_gateway
from tests.harness.recording_worker import RecordingWorker

NAME = OWN_TIME.decode()


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
