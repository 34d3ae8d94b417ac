"""Large bodies share the event loop with everything else."""

from __future__ import annotations

import asyncio
import itertools
from unittest.mock import Mock

import pytest

from proxy.metrics import Metrics
from proxy.pipeline.handler import LARGE_BYTES, TURNS, RequestHandler
from proxy.settings import Settings


@pytest.fixture
def handler() -> RequestHandler:
    parts = ("pool", "reader", "stored", "dispatcher", "relay", "accounting", "preflights")
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


async def test_small_bodies_wait_for_nothing(handler):
    await handler._turns.acquire()
    async with asyncio.timeout(30):
        await handler._turn(LARGE_BYTES)
