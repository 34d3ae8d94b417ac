"""What the gateway does beside requests gives way to their bytes.

One event loop passes all bytes on, so whatever runs on it in one go holds them up: requests that end in one step of an
engine, and are followed by new ones, then reach the engine apart, and each costs it a step of its own. Work beside
them is therefore done in short steps between which the loop turns to the bytes, and begins in a lull. The idea is
that of `requestIdleCallback` in browsers, its timeout included.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

logger = logging.getLogger("seamark.idle_work")

T = TypeVar("T")

# Work in steps, each of some tens of microseconds, whatever clients or engines have sent; returns its result.
Steps = Generator[None, None, T]

# Seconds without a request that comes or ends until there is a lull. A client whose stream has ended sends its next
# request within that.
LULL_SECONDS = 0.004

# Steps are done for so long before the loop turns to all others: a turn costs as much as some of them.
SLICE_SECONDS = 0.0001

# Work that was added waits no longer for a lull.
PATIENCE_SECONDS = 0.5

# Work that others build on, such as what workers say of their health, waits no longer.
SHORT_PATIENCE_SECONDS = 0.05

# Jobs that wait; with more, or older ones, the gateway is behind, and what can be left out is left out.
MAX_WAITING = 256


_tasks: set[asyncio.Task[Any]] = set()


def beside(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task for which nobody waits. It is held here until it ends: one that nobody holds may be lost."""
    task = asyncio.create_task(work)
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return task


class IdleWork:
    """One per gateway. It needs a running event loop."""

    def __init__(self, now: Callable[[], float] = time.monotonic, slice_seconds: float = SLICE_SECONDS) -> None:
        """`now`: seconds."""
        self._now = now
        self._slice_seconds = slice_seconds
        self._lull_at = 0.0
        self._jobs: deque[tuple[Steps[Any], float]] = deque()  # for which nobody waits, and since when they are there
        self._next: asyncio.Handle | None = None  # the next step, if one is to come
        self._hurry = 0  # so many wait for what has been added

    @property
    def is_behind(self) -> bool:
        """Whether more has come up than the pauses between requests have room for."""
        jobs = self._jobs
        return len(jobs) > MAX_WAITING or (bool(jobs) and self._now() - jobs[0][1] > PATIENCE_SECONDS)

    def put_off(self) -> None:
        """Begin nothing for a moment: a request has come, or an answer has ended, and the client may send the next."""
        self._lull_at = self._now() + LULL_SECONDS

    def add(self, steps: Steps[Any]) -> None:
        """Do this in a lull. A failure is logged by its kind."""
        self._jobs.append((steps, self._now()))
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(LULL_SECONDS, self._step)

    async def finish(self, steps: Steps[T]) -> T:
        """Do this now; its result. The loop turns to all others between two slices."""
        while True:
            try:
                self._slice(steps)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # as `Steps` has it
            await asyncio.sleep(0)

    async def lull(self, patience: float = PATIENCE_SECONDS) -> None:
        """Return in a lull, or after `patience` seconds. To be awaited before each piece of work in a task."""
        deadline = self._now() + patience
        await asyncio.sleep(0)
        wait = self._lull_at - self._now()
        while wait > 0:
            await asyncio.sleep(wait)
            wait = min(self._lull_at, deadline) - self._now()

    async def caught_up(self) -> None:
        """Return once what was added before is done: somebody asks for what it finds."""
        if not self._jobs:
            return
        done = asyncio.get_running_loop().create_future()

        def mark() -> Steps[None]:
            if not done.done():
                done.set_result(None)
            yield

        self._hurry += 1
        self.add(mark())
        try:
            if self._next is not None:
                self._next.cancel()
            self._next = asyncio.get_running_loop().call_soon(self._step)
            await done
        finally:
            self._hurry -= 1

    def _slice(self, steps: Steps[Any]) -> None:
        """Some steps, one at least. Raises `StopIteration` behind the last one."""
        until = time.perf_counter() + self._slice_seconds
        next(steps)
        while time.perf_counter() < until:
            next(steps)

    def _step(self) -> None:
        loop = asyncio.get_running_loop()
        wait = self._lull_at - self._now()
        if wait > 0 and not self._hurry and not self.is_behind:
            self._next = loop.call_later(wait, self._step)
            return
        try:
            self._slice(self._jobs[0][0])
        except StopIteration:
            self._jobs.popleft()
        except Exception as error:  # the kind alone: the message might hold prompt text
            logger.error("work beside requests: %s", type(error).__name__)
            self._jobs.popleft()
        self._next = loop.call_soon(self._step) if self._jobs else None


class CpuBudget:
    """A share of one core for work that can be left out. Its own seconds count, and not those of what comes between."""

    def __init__(self, share: float, most: float, cpu: Callable[[], float] = time.thread_time) -> None:
        """`most`: seconds that are there at first, and that it saves up. `cpu`: seconds of this thread."""
        self._share, self._most, self._cpu = share, most, cpu
        self._left, self._counted = most, time.monotonic()

    @property
    def is_spent(self) -> bool:
        now = time.monotonic()
        self._left, self._counted = min(self._most, self._left + self._share * (now - self._counted)), now
        return self._left <= 0

    def spend(self, steps: Steps[T]) -> Steps[T]:
        """The same, some at a time; what that takes is charged, be it more than there is."""
        while True:
            began, until = self._cpu(), time.perf_counter() + SLICE_SECONDS
            try:
                next(steps)
                while time.perf_counter() < until:
                    next(steps)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]  # as `Steps` has it
            finally:
                self._left -= self._cpu() - began
            yield


def within(seconds: float, steps: Steps[T]) -> Steps[T]:
    """The same. Raises `TimeoutError` if it is not done `seconds` after its first step."""
    until = time.monotonic() + seconds
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # as `Steps` has it
        if time.monotonic() > until:
            raise TimeoutError
        yield
