"""A test waits for a condition, never for time to pass, and says which one it waited for in vain."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], seconds: float = 120.0, pause: float = 0.005) -> None:
    """Look for it each `pause` seconds, by a function or a coroutine function. Raises `TimeoutError`."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            while not (await found if inspect.isawaitable(found := condition()) else found):
                await asyncio.sleep(pause)
    except TimeoutError:
        if not deadline.expired():
            raise  # the condition's own
        raise TimeoutError(_in_vain(condition, seconds)) from None


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """The same without an event loop. Raises `TimeoutError`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(_in_vain(condition, seconds))
        time.sleep(0.02)


def _in_vain(condition: Callable[[], Any], seconds: float) -> str:
    """What was awaited, as its source has it, with the values of the names it takes from around it."""
    try:
        source = " ".join(inspect.getsource(condition).split())
    except (OSError, TypeError):
        source = repr(condition)
    around = inspect.getclosurevars(condition).nonlocals if inspect.isfunction(condition) else {}
    values = "".join(f"\n  {name} = {value!r:.500}" for name, value in around.items())
    return f"waited {seconds:g} s in vain for: {source}{values}"
