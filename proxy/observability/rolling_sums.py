"""What requests shared and got during the last hour, and since the start: sums by slots of five seconds, in a ring.

Its size never changes. A slot is emptied when it is needed again, so a gateway without requests does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

SLOT_SECONDS = 5

SLOTS_OF_MINUTE = 60 // SLOT_SECONDS

MINUTES = 60

SLOTS = MINUTES * SLOTS_OF_MINUTE


class Totals(NamedTuple):
    """Sums over some time; tokens, except for `requests`."""

    requests: int
    prompt: int
    shareable: int
    came: int  # of what was shareable
    delivered: int  # what the engine had cached, even beyond what was known to be shareable

    @property
    def efficiency(self) -> float | None:
        """The part of the shareable tokens that came, 0 to 1; None if none were shareable."""
        return self.came / self.shareable if self.shareable else None


class RollingSums:
    """One per gateway; counts requests whose worker reports cached tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._slots = [[-1, 0, 0, 0, 0, 0] for _ in range(SLOTS)]  # when, and sums in their order
        self._older = Totals(0, 0, 0, 0, 0)  # from slots that were needed again

    def add(self, prompt: int, shareable: int, delivered: int) -> None:
        """One request has been answered; tokens, `shareable` in whole match units."""
        when = self._now()
        slot = self._slots[when % SLOTS]
        if slot[0] != when:
            self._older = _sum([[-1, *self._older], slot])
            slot[:] = (when, 0, 0, 0, 0, 0)
        slot[1] += 1
        slot[2] += prompt
        slot[3] += shareable
        # What one request got in excess must not hide what another one missed.
        slot[4] += delivered if delivered < shareable else shareable
        slot[5] += delivered

    def last_minute(self) -> Totals:
        """The last 55 to 60 seconds."""
        now = self._now()
        return _sum(slot for slot in self._slots if now - SLOTS_OF_MINUTE < slot[0] <= now)

    def last_hour(self) -> Totals:
        """The last hour, to five seconds."""
        now = self._now()
        return _sum(slot for slot in self._slots if now - SLOTS < slot[0] <= now)

    def by_minute(self) -> list[Totals]:
        """The last hour's minutes, the running one at the end."""
        now = self._now()
        minutes: list[list[list[int]]] = [[] for _ in range(MINUTES)]
        for slot in self._slots:
            age = now // SLOTS_OF_MINUTE - slot[0] // SLOTS_OF_MINUTE
            if slot[0] >= 0 and age < MINUTES:
                minutes[-1 - age].append(slot)
        return [_sum(slots) for slots in minutes]

    def since_start(self) -> Totals:
        """Everything."""
        return _sum([[-1, *self._older], *self._slots])

    def _now(self) -> int:
        return int(self._clock()) // SLOT_SECONDS


def _sum(slots: Iterable[list[int]]) -> Totals:
    sums = [0, 0, 0, 0, 0]
    for slot in slots:
        for place in range(len(sums)):
            sums[place] += slot[place + 1]
    return Totals(*sums)
