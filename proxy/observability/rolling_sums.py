"""What requests shared and got, as sums in rings: the last hour by five seconds, the last day by ten minutes.

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

SLOTS_OF_PART = 10 * SLOTS_OF_MINUTE  # a part of the day: ten minutes

PARTS = 144


class Totals(NamedTuple):
    """Sums over some time; tokens, except for `requests`."""

    requests: int
    prompt: int
    shareable: int
    came: int  # of what was shareable
    delivered: int  # what the engine had cached, even beyond what was known to be shareable
    changed: int = 0  # beyond what was shareable: behind text in which a prompt differs from one that is like it

    @property
    def efficiency(self) -> float | None:
        """The part of the shareable tokens that came, 0 to 1; None if none were shareable."""
        return self.came / self.shareable if self.shareable else None


NONE = (0,) * len(Totals._fields)


class RollingSums:
    """One per gateway; counts requests whose worker reports cached tokens."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._slots = [[-1, *NONE] for _ in range(SLOTS)]  # when, and sums in their order
        self._parts = [[-1, *NONE] for _ in range(PARTS)]  # of a day
        self._older = Totals(*NONE)  # from slots that were needed again

    def add(self, prompt: int, shareable: int, delivered: int, changed: int = 0) -> None:
        """One request has been answered; tokens, `shareable` in whole match units."""
        when = self._now()
        slot = self._slots[when % SLOTS]
        if slot[0] != when:
            self._older = _sum([[-1, *self._older], slot])
            slot[:] = (when, *NONE)
        part = self._parts[when // SLOTS_OF_PART % PARTS]
        if part[0] != when // SLOTS_OF_PART:
            part[:] = (when // SLOTS_OF_PART, *NONE)
        for sums in (slot, part):
            sums[1] += 1
            sums[2] += prompt
            sums[3] += shareable
            # What one request got in excess must not hide what another one missed.
            sums[4] += delivered if delivered < shareable else shareable
            sums[5] += delivered
            sums[6] += changed

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

    def by_ten_minutes(self) -> list[Totals]:
        """The last day's parts of ten minutes, the running one at the end."""
        now = self._now() // SLOTS_OF_PART
        slots = (self._parts[part % PARTS] for part in range(now - PARTS + 1, now + 1))
        wanted = range(now - PARTS + 1, now + 1)
        return [_sum([slot] if slot[0] == part else []) for part, slot in zip(wanted, slots, strict=True)]

    def since_start(self) -> Totals:
        """Everything."""
        return _sum([[-1, *self._older], *self._slots])

    def _now(self) -> int:
        return int(self._clock()) // SLOT_SECONDS


def _sum(slots: Iterable[list[int]]) -> Totals:
    sums = [*NONE]
    for slot in slots:
        for place in range(len(sums)):
            sums[place] += slot[place + 1]
    return Totals(*sums)
