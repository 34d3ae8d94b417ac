"""Admission: limits per worker and per key, and a bounded queue, first come first served.

A slot is found and taken without an await in between, so no two requests see the same free slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

from proxy.errors import GatewayError, KeyBusy, Overloaded
from proxy.http.auth import ApiKey
from proxy.metrics import Distribution

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _Waiter:
    key: ApiKey | None
    wants: Hashable
    take: Callable[[], object | None]
    future: asyncio.Future[Any]


class AdmissionQueue:
    def __init__(self, most: int, timeout: float, seconds: Distribution) -> None:
        """At most `most` requests wait, each `timeout` seconds; `seconds` observes how long they did."""
        self._most, self._timeout, self._seconds = most, timeout, seconds
        self.waiting: dict[_Waiter, None] = {}  # in order of arrival

    async def acquire(
        self,
        key: ApiKey | None,
        wants: Hashable,
        take: Callable[[], S | None],
        give_back: Callable[[S], None],
        waited: float = 0.0,
    ) -> S:
        """The slot that `take` finds, now or later.

        `take` returns None if no slot is free, and raises if there never will be one; requests with equal `wants` use
        the same slots. It is called only if the key may have another request under way. `give_back` gets what was found
        for a request whose client had just left. `waited`: seconds that the request has been in the queue before.
        Raises `KeyBusy` or `Overloaded`.
        """
        if self._is_next(key, wants) and (slot := take()) is not None:
            return slot
        self._refuse_if_full(key)
        waiter = _Waiter(key, wants, take, asyncio.get_running_loop().create_future())
        self.waiting[waiter] = None
        if key is not None:
            key.queued += 1
        started = time.perf_counter()
        found: S | None = None
        try:
            async with asyncio.timeout(max(0.0, self._timeout - waited)):
                result: S = await waiter.future
                found = result
            return result
        except TimeoutError:
            raise self._refusal(key, f"No slot became free within {self._timeout:g} seconds") from None
        finally:
            self._forget(waiter)
            self._seconds.observe(time.perf_counter() - started)
            if found is None and waiter.future.done() and not waiter.future.cancelled():
                give_back(waiter.future.result())

    def wake(self) -> None:
        """A slot may have become free."""
        full: set[Hashable] = set()
        for waiter in list(self.waiting):
            if waiter.wants in full or waiter.future.done() or not _may_go(waiter.key):
                continue
            found = None
            with contextlib.suppress(GatewayError):  # none for now: only a request that arrives is refused
                found = waiter.take()
            if found is None:
                full.add(waiter.wants)
            else:
                self._forget(waiter)
                waiter.future.set_result(found)

    def _forget(self, waiter: _Waiter) -> None:
        if waiter in self.waiting:
            del self.waiting[waiter]
            if waiter.key is not None:
                waiter.key.queued -= 1

    def _is_next(self, key: ApiKey | None, wants: Hashable) -> bool:
        """Whether no request for the same slots could go first: one that waits for its key's own limit could not."""
        queue = self.waiting
        return _may_go(key) and not (queue and any(each.wants == wants and _may_go(each.key) for each in queue))

    def _refuse_if_full(self, key: ApiKey | None) -> None:
        if key is not None and key.queued >= key.entry.max_queued:
            raise KeyBusy(f"{key.queued} requests of this API key are waiting already (max_queued in the keys file).")
        if len(self.waiting) >= self._most:
            raise self._refusal(key, f"{len(self.waiting)} requests are waiting already")

    @staticmethod
    def _refusal(key: ApiKey | None, why: str) -> GatewayError:
        if key is not None and not key.has_room:
            return KeyBusy(f"{why}, and it may have {key.entry.max_inflight} under way.")
        return Overloaded(f"{why}: all workers are busy.")


def _may_go(key: ApiKey | None) -> bool:
    return key is None or key.has_room
