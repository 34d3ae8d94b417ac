"""The queue before the workers: no slot is lost, and nobody who waits is forgotten."""

from __future__ import annotations

import asyncio

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
