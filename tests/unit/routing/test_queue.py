"""The queue before the workers: no slot is lost, and nobody who waits is forgotten."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import Histogram

from proxy.errors import NoWorker, Overloaded
from proxy.routing.queue import AdmissionQueue


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


async def test_a_request_that_leaves_as_a_slot_becomes_free_takes_none():
    slots, given_back = Slots(), []
    queue = queue_of()
    leaving, staying = (asyncio.create_task(queue.acquire(None, "m", slots.take, given_back.append)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    slots.free.append("a slot")
    queue.wake()  # before the one that leaves has run again
    assert await staying == "a slot"
    assert leaving.cancelled() and not given_back and len(queue) == 0


class CountingKey:
    """It counts how often it is looked at."""

    def __init__(self) -> None:
        self.queued = self.looked = 0
        self.entry = SimpleNamespace(max_queued=10, max_inflight=10)

    @property
    def has_room(self) -> bool:
        self.looked += 1
        return True


async def test_of_those_who_need_a_slot_where_all_are_taken_only_the_first_is_looked_at():
    slots, key = Slots(), CountingKey()
    queue = queue_of()
    waiting = [asyncio.create_task(queue.acquire(key, "m", slots.take, slots.free.append)) for _ in range(5)]
    await asyncio.sleep(0)
    key.looked = 0
    queue.wake()
    assert key.looked == 1
    slots.free += ["a slot"] * 5
    queue.wake()
    assert await asyncio.gather(*waiting) == ["a slot"] * 5


async def test_what_makes_a_slot_unnecessary_is_found_where_all_are_taken():
    slots, there = Slots(), []
    queue = queue_of()

    def found() -> str | None:
        return there[0] if there else None

    first = asyncio.create_task(queue.acquire(None, "m", slots.take, slots.free.append))
    second = asyncio.create_task(queue.acquire(None, "m", slots.take, slots.free.append, found))
    await asyncio.sleep(0)
    queue.wake()
    there.append("an answer")
    queue.wake()
    assert await second == "an answer" and not first.done()
    slots.free.append("a slot")
    queue.wake()
    assert await first == "a slot"


async def test_who_has_waited_before_waits_for_what_is_left():
    slots = Slots()
    queue = queue_of()
    with pytest.raises(Overloaded, match="within 5 seconds"):
        await queue.acquire(None, "m", slots.take, slots.free.append, waited=5.0)
    slots.free.append("a slot")
    assert await queue.acquire(None, "m", slots.take, slots.free.append, waited=5.0) == "a slot"


async def test_a_worker_that_goes_while_its_requests_wait_stops_nobody():
    going, staying = Slots(), Slots()
    queue = queue_of()
    first = asyncio.create_task(queue.acquire(None, "of the one that goes", going.take, going.free.append))
    second = asyncio.create_task(queue.acquire(None, "of the other", staying.take, staying.free.append))
    await asyncio.sleep(0)
    going.gone = True
    staying.free.append("a slot")
    queue.wake()  # raises nothing, and reaches the request behind
    assert await second == "a slot"
    assert not first.done()
    going.gone = False  # it has come back
    going.free.append("its slot")
    queue.wake()
    assert await first == "its slot"
