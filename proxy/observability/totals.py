"""What requests shared, got and saved: of the last hour and day, since the start, and by API key.

Its size never changes: a gateway that runs for a year holds no more than one of a day.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import reduce
from operator import add
from typing import Any

from proxy.fleet.worker_metrics import StepTimes
from proxy.metrics import Labels, Metrics

SLOT_SECONDS = 5
SLOTS_OF_MINUTE = 60 // SLOT_SECONDS
MINUTES = 60
SLOTS = MINUTES * SLOTS_OF_MINUTE
SLOTS_OF_PART = 10 * SLOTS_OF_MINUTE  # a part of the day: ten minutes
PARTS = 144


@dataclass
class Totals:
    """Sums over some time; tokens, except for `requests`."""

    requests: int = 0
    prompt: int = 0
    shareable: int = 0
    came: int = 0  # of what was shareable
    delivered: int = 0  # what the engine had cached, even beyond what was known to be shareable
    changed: int = 0  # beyond what was shareable: behind text in which a prompt differs from one that is like it

    @property
    def efficiency(self) -> float | None:
        """The part of the shareable tokens that came, 0 to 1; None if none were shareable."""
        return self.came / self.shareable if self.shareable else None

    def plus(self, other: Totals) -> Totals:
        return Totals(*map(add, astuple(self), astuple(other)))


NONE = Totals()


class RollingSums:
    """Requests whose worker reports cached tokens: the last hour by five seconds, the last day by ten minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds."""
        self._clock = clock
        self._slots: dict[int, Totals] = {}  # by number since the clock began, the oldest first
        self._parts: dict[int, Totals] = {}
        self._slot = -1  # that is running
        self.whole = Totals()  # since the start
        self._running: tuple[Totals, ...] = ()  # all that a request counts in now

    def add(self, prompt: int, shareable: int, delivered: int, changed: int = 0) -> None:
        """One request has been answered; tokens, `shareable` in whole match units."""
        if (slot := int(self._clock()) // SLOT_SECONDS) != self._slot:
            self._slot = slot
            part = _begun(self._parts, slot // SLOTS_OF_PART, PARTS)
            self._running = (self.whole, _begun(self._slots, slot, SLOTS), part)
        for sums in self._running:
            sums.requests += 1
            sums.prompt += prompt
            sums.shareable += shareable
            sums.came += min(delivered, shareable)  # what one got in excess must not hide what another one missed
            sums.delivered += delivered
            sums.changed += changed

    def last(self, slots: int) -> Totals:
        now = self._now()
        return reduce(Totals.plus, (sums for slot, sums in self._slots.items() if now - slots < slot <= now), NONE)

    def by_minute(self) -> list[Totals]:
        minutes: dict[int, Totals] = {}
        for slot, sums in self._slots.items():
            minute = slot // SLOTS_OF_MINUTE
            minutes[minute] = minutes.get(minute, NONE).plus(sums)
        return _newest(minutes, self._now() // SLOTS_OF_MINUTE, MINUTES)

    def by_ten_minutes(self) -> list[Totals]:
        """The last day's parts of ten minutes, the running one at the end."""
        return _newest(self._parts, self._now() // SLOTS_OF_PART, PARTS)

    def _now(self) -> int:
        return int(self._clock()) // SLOT_SECONDS


def _begun(sums: dict[int, Totals], when: int, most: int) -> Totals:
    begun = sums.setdefault(when, Totals())
    if len(sums) > most:
        del sums[next(iter(sums))]
    return begun


def _newest(sums: dict[int, Totals], now: int, most: int) -> list[Totals]:
    return [sums.get(when, NONE) for when in range(now - most + 1, now + 1)]


class TimeSaved:
    """Seconds of prefill that reuse saved, less those that the gateway spent for it.

    Beside that stands what vLLM alone would have found of it at most: at its default it enters a prompt at ends of
    whole cache blocks, and only where a request happened to stop. Where requests stopped is not known here, so it is a
    bound. Tokens that are reused count when somebody asks, once the pace of their worker's engine is known.
    """

    def __init__(self) -> None:
        self.saved = 0.0  # seconds
        self.spent = 0.0  # seconds
        self.vllm_alone = 0.0  # seconds, of those saved: what vLLM alone would have found at most
        self._is_known = False
        # By model and worker, tokens, and of these the ones in whole cache blocks.
        self._waiting = defaultdict[Labels, list[int]](lambda: [0, 0])

    @property
    def net(self) -> float | None:
        """Seconds saved less seconds spent; None while no worker's pace is known."""
        return self.saved - self.spent if self._is_known else None

    @property
    def waiting(self) -> int:
        """Reused tokens whose time is not known yet."""
        return sum(tokens for tokens, _ in self._waiting.values())

    def reused(self, by_worker: Labels, tokens: int, block_size: int = 1) -> None:
        """So many tokens of a prompt for a model came from a worker's cache, whose blocks have `block_size` tokens."""
        waiting = self._waiting[by_worker]
        waiting[0] += tokens
        waiting[1] += tokens // max(block_size, 1) * block_size

    def forget(self, worker: str) -> None:
        """The worker is gone, and its pace was never known."""
        for by_worker in [each for each in self._waiting if each[1] == worker]:
            del self._waiting[by_worker]

    def settle(self, worker: str, step_times: StepTimes) -> dict[Labels, float]:
        """Count the tokens that wait for this worker's pace. Returns their seconds; none while it is unknown."""
        if not step_times.known:
            return {}
        self._is_known = True
        seconds = {}
        for each in [each for each in self._waiting if each[1] == worker]:
            tokens, alone = self._waiting.pop(each)
            seconds[each] = step_times.seconds(tokens)
            self.saved += seconds[each]
            self.vllm_alone += step_times.seconds(alone)
        return seconds


def by_key(metrics: Metrics) -> list[dict[str, Any]]:
    """What each API key has used since the start, by its name in the keys file, also one that is there no more."""
    requests, tokens = metrics.key_requests, metrics.key_tokens
    return [
        {"name": name, "requests": int(requests.get((name,), 0))}
        | {f"{kind}_tokens": int(tokens.get((name, kind), 0)) for kind in ("prompt", "cached", "output")}
        for name in sorted({name for name, *_ in (*requests, *tokens)})
    ]
