"""When a worker is idle, and how what uses its idle time ends at once for a client.

Recomputed prompts are of no use to clients and take room from theirs, so between two requests of clients they fill a
small part of the cache at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from proxy.fleet.worker import Worker

T = TypeVar("T")

IDLE_SECONDS = 3.0  # that a worker is without a request before a check

# Part of the cache that recomputed prompts may take between two requests of clients, 0 to 1.
CACHE_SHARE = 1 / 16

# Checks without a client's request between them; after that, an unused worker is left alone.
MOST_IN_A_ROW = 16


@dataclass
class IdleTurns:
    """Of one worker."""

    dispatched: int = -1
    busy_at: float = 0.0  # time.monotonic() when it last had a request
    next_at: float = 0.0  # time.monotonic() before which there is no turn
    in_a_row: int = 0
    recomputed: int = 0  # tokens, since the last request of a client
    left: asyncio.Future[None] | None = None  # during a turn: done when a client comes

    def look(self, worker: Worker) -> None:
        """Note what it does now."""
        now = time.monotonic()
        if worker.dispatched != self.dispatched:
            self.dispatched, self.busy_at, self.in_a_row, self.recomputed = worker.dispatched, now, 0, 0
        if worker.inflight:
            self.busy_at = now

    @property
    def is_idle(self) -> bool:
        """Whether it is without requests, and the last turn was long enough ago."""
        now = time.monotonic()
        return now - self.busy_at >= IDLE_SECONDS and now >= self.next_at

    def has_room(self, worker: Worker) -> bool:
        """Whether more may be recomputed before the next request of a client."""
        return self.in_a_row < MOST_IN_A_ROW and self.recomputed < allowance(worker)

    def client_came(self) -> None:
        """A client's request goes to it: a turn there ends at once."""
        if self.left is not None and not self.left.done():
            self.left.set_result(None)

    async def take(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        """What `work` comes to; None if a client came meanwhile. Raises `TimeoutError` after so many seconds."""
        left = self.left = asyncio.get_running_loop().create_future()
        working = asyncio.create_task(work)
        try:
            done, _ = await asyncio.wait((working, left), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            return working.result() if working.done() else None
        finally:
            working.cancel()  # and with it its requests: the engine is free once its running step is finished
            self.left = None


def allowance(worker: Worker) -> float:
    """Tokens that may be recomputed between two requests of clients."""
    tokens = worker.probed.metrics.cache_tokens
    return tokens * CACHE_SHARE if tokens else float("inf")
