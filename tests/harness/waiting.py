"""A test waits for a condition, never for time to pass."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], seconds: float = 120.0, pause: float = 0.005) -> None:
    """Look for it each `pause` seconds, by a function or a coroutine function. Raises `TimeoutError`."""
    async with asyncio.timeout(seconds):
        while not (await found if inspect.isawaitable(found := condition()) else found):
            await asyncio.sleep(pause)


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
