"""What prompts cost a worker, learnt from outside: seconds to the first token over the tokens that had to be computed.

Theil and Sen's line: its slope is the median of the slopes between pairs of requests (the wider apart, the more they
count), so a request that had to wait for others moves nothing. Those alone at their worker are used once they suffice.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

# Requests remembered of each sort: some two thousand pairs, a few milliseconds to fit.
WINDOW = 64
# Requests, and pairs of them at least so many tokens apart, before a line is believed.
ENOUGH = 6
APART = 64
# New requests after which a line that is known is drawn anew.
RENEWAL = 8


class Line(NamedTuple):
    """Seconds to the first token = `floor_seconds` + `token_seconds` x tokens computed."""

    floor_seconds: float
    token_seconds: float
    requests: int  # it was learnt from
    alone: bool  # these had the worker to themselves


class PrefillPace:
    """Of one worker."""

    def __init__(self) -> None:
        self._alone: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._among_others: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self._news = 0
        self._line: Line | None = None

    def took(self, computed: int, seconds: float, alone: bool) -> None:
        """A request's first token came after `seconds`, with `computed` prompt tokens not from the cache."""
        if computed > 0 and seconds > 0:
            (self._alone if alone else self._among_others).append((computed, seconds))
            self._news += 1

    @property
    def line(self) -> Line | None:
        """What is learnt so far; None while too little is."""
        if self._news >= RENEWAL or (self._news and self._line is None):
            self._news = 0
            self._line = _line(self._alone, True) or _line([*self._alone, *self._among_others], False) or self._line
        return self._line


def _line(requests: Sequence[tuple[int, float]], alone: bool) -> Line | None:
    if len(requests) < ENOUGH:
        return None
    slopes: list[tuple[float, int]] = []  # and the tokens they were seen over
    for (few, soon), (many, late) in combinations(sorted(requests), 2):
        if (apart := many - few) >= APART:
            slopes.append(((late - soon) / apart, apart))
    if len(slopes) < ENOUGH:
        return None
    slope = _weighted_median(slopes)
    if slope <= 0:
        return None
    floor = statistics.median(seconds - slope * tokens for tokens, seconds in requests)
    return Line(max(0.0, floor), slope, len(requests), alone)


def _weighted_median(values: list[tuple[float, int]]) -> float:
    values.sort()
    half = sum(weight for _, weight in values) / 2
    for value, weight in values:
        half -= weight
        if half <= 0:
            return value
    return values[-1][0]
