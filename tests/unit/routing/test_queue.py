"""The queue before the workers: no slot is lost, and nobody who waits is forgotten."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import Histogram

from proxy.errors import KeyBusy, NoWorker, Overloaded
from proxy.http.auth import ApiKey, KeyEntry
from proxy.routing.queue import AdmissionQueue
from tests.harness.virtual_time import on_virtual_time


def queue_of(most: int = 8) -> AdmissionQueue:
    return AdmissionQueue(most, 5.0, Histogram("seconds", "", registry=None))


class Slots:
    """Free slots at one worker, which can go."""

    def __init__(self) -> None:
        self.free: list[str] = []
        self.gone = False

    def take(self) -> str | None:
        if self.gone:
            raise NoWorker("No worker is ready for this model.")
        return self.free.pop() if self.free else None


async def test_a_slot_found_for_a_request_that_has_just_left_is_given_back():
    slots, given_back = Slots(), []
    queue = queue_of(2)
    waiting = [asyncio.create_task(queue.acquire(None, "m", slots.take, given_back.append)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await queue.acquire(None, "m", slots.take, given_back.append)
    slots.free.append("a slot")
    queue.wake()
    waiting[0].cancel()  # in the very moment
    await asyncio.gather(*waiting[:1], return_exceptions=True)
    assert given_back == ["a slot"]
    assert len(queue) == 1
    slots.free.append("another")
    queue.wake()
    assert await waiting[1] == "another"
    assert len(queue) == 0


async def test_who_has_waited_before_waits_for_what_is_left():
    slots = Slots()
    queue = queue_of()
    with pytest.raises(Overloaded, match="within 5 seconds"):
        await queue.acquire(None, "m", slots.take, slots.free.append, waited=5.0)
    slots.free.append("a slot")
    assert await queue.acquire(None, "m", slots.take, slots.free.append, waited=5.0) == "a slot"


def key_of(inflight: int = 0, queued: int = 64, under_way: int = 0) -> ApiKey:
    entry = KeyEntry(sha256="0" * 64, max_inflight=inflight, max_queued=queued)
    return ApiKey("anns", entry, "salt", under_way=under_way)


async def waits(task: asyncio.Task[str]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return not task.done()


async def test_a_key_at_its_limit_waits_for_itself_and_lets_others_pass():
    slots, queue, key = Slots(), queue_of(), key_of(inflight=1, under_way=1)
    slots.free += ["first", "second"]
    own = asyncio.create_task(queue.acquire(key, "m", slots.take, slots.free.append))
    assert await waits(own) and key.queued == 1
    assert await queue.acquire(None, "m", slots.take, slots.free.append) == "second"
    queue.wake()
    assert await waits(own)
    key.under_way = 0
    queue.wake()
    assert await own == "first" and (key.queued, len(queue)) == (0, 0)


async def test_a_key_has_so_many_requests_waiting_and_the_queue_so_many_in_all():
    slots, queue, key = Slots(), queue_of(3), key_of(queued=2)
    waiting = [asyncio.create_task(queue.acquire(key, "m", slots.take, slots.free.append)) for _ in range(2)]
    for each in waiting:
        assert await waits(each)
    with pytest.raises(KeyBusy, match="2 requests of this API key are waiting already"):
        await queue.acquire(key, "m", slots.take, slots.free.append)
    waiting.append(asyncio.create_task(queue.acquire(None, "m", slots.take, slots.free.append)))
    assert await waits(waiting[-1]) and len(queue) == 3
    with pytest.raises(Overloaded, match="3 requests are waiting already: all workers are busy"):
        await queue.acquire(key_of(), "m", slots.take, slots.free.append)
    with pytest.raises(KeyBusy, match="3 requests are waiting already, and it may have 1 under way"):
        await queue.acquire(key_of(inflight=1, under_way=1), "m", slots.take, slots.free.append)
    slots.free += ["c", "b", "a"]
    queue.wake()
    assert await asyncio.gather(*waiting) == ["a", "b", "c"] and (key.queued, len(queue)) == (0, 0)


@on_virtual_time
async def test_a_request_waits_for_so_long_in_all_and_is_refused_by_what_it_waited_for() -> None:
    slots, loop = Slots(), asyncio.get_running_loop()
    for key, waited, error, words in (
        (None, 0.0, Overloaded, "No slot became free within 5 seconds: all workers are busy"),
        (key_of(), 2.0, Overloaded, "all workers are busy"),
        (key_of(inflight=2, under_way=2), 0.0, KeyBusy, "within 5 seconds, and it may have 2 under way"),
        (key_of(), 9.0, Overloaded, "within 5 seconds"),
    ):
        queue, began = queue_of(), loop.time()
        with pytest.raises(error, match=words):
            await queue.acquire(key, "m", slots.take, slots.free.append, waited=waited)
        assert loop.time() - began == max(0.0, 5 - waited)
        assert len(queue) == 0 and (key is None or key.queued == 0)
