"""What requests shared and got during the last hour, and since the start: sums by slots of five seconds, in a ring.

Its size never changes. A slot is emptied when its place is needed again, so a gateway without requests does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

SLOT_SECONDS = 5
SLOTS_OF_MINUTE = 60 // SLOT_SECONDS
MINUTES = 60
SLOTS = MINUTES * SLOTS_OF_MINUTE


class Sums(NamedTuple):
    """Of some time; tokens, but for `requests`."""

    requests: int
    prompt: int
    shareable: int
    came: int  # of what was shareable
    delivered: int  # what the engine had cached, more than was known to be shareable included

    @property
    def efficiency(self) -> float | None:
        """Part of what could be shared that came, 0 to 1; None where nothing could be."""
        return self.came / self.shareable if self.shareable else None


class Recently:
    """One per gateway; counts requests whose worker reports cached tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._slots = [[-1, 0, 0, 0, 0, 0] for _ in range(SLOTS)]  # when, and sums in their order
        self._since_start = [0, 0, 0, 0, 0]

    def add(self, prompt: int, shareable: int, delivered: int) -> None:
        """One request has been answered; tokens, `shareable` in whole match units."""
        when = self._now()
        slot = self._slots[when % SLOTS]
        if slot[0] != when:
            slot[:] = (when, 0, 0, 0, 0, 0)
        # What one request got beyond must not hide what another one missed.
        counted = (1, prompt, shareable, min(shareable, delivered), delivered)
        for place, count in enumerate(counted):
            slot[place + 1] += count
            self._since_start[place] += count

    def last_minute(self) -> Sums:
        """The last 55 to 60 seconds."""
        now = self._now()
        return _sum(slot for slot in self._slots if now - SLOTS_OF_MINUTE < slot[0] <= now)

    def last_hour(self) -> Sums:
        """The last hour, to five seconds."""
        now = self._now()
        return _sum(slot for slot in self._slots if now - SLOTS < slot[0] <= now)

    def by_minute(self) -> list[Sums]:
        """The last hour's minutes, the running one at the end."""
        now = self._now()
        minutes: list[list[list[int]]] = [[] for _ in range(MINUTES)]
        for slot in self._slots:
            age = now // SLOTS_OF_MINUTE - slot[0] // SLOTS_OF_MINUTE
            if slot[0] >= 0 and age < MINUTES:
                minutes[-1 - age].append(slot)
        return [_sum(slots) for slots in minutes]

    def since_start(self) -> Sums:
        """Everything."""
        return Sums(*self._since_start)

    def _now(self) -> int:
        return int(self._clock()) // SLOT_SECONDS


def _sum(slots: Iterable[list[int]]) -> Sums:
    sums = [0, 0, 0, 0, 0]
    for slot in slots:
        for place in range(len(sums)):
            sums[place] += slot[place + 1]
    return Sums(*sums)
