"""What prompts cost a worker, learnt from outside: seconds to the first token over the tokens that had to be computed.

Later tokens cost more, as attention reads all tokens before them: token p costs a (1 + growth p). For each growth of a
short list, a line is fitted as Theil and Sen do: its slope is the median of the slopes between pairs of requests (the
wider apart, the more they count), so a request that had to wait for others moves nothing. The growth with the smallest
errors wins. Requests that were alone at their worker are preferred once there are enough of them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

# Requests remembered of each kind: some two thousand pairs, a few milliseconds to fit.
WINDOW = 64

# Requests, and pairs of them at least `APART` tokens apart, before a line is believed.
ENOUGH = 6

APART = 64

# New requests after which a known line is fitted again.
RENEWAL = 8

# How much each earlier token adds to the cost of a token: from nothing to a double cost after 512.
GROWTHS = (0.0, *(2.0**-power for power in range(18, 8, -1)))


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Some prompt tokens: their number, and the sum of their positions."""

    tokens: float
    positions: float

    @classmethod
    def between(cls, start: int, end: int) -> TokenWork:
        return cls(end - start, (end**2 - start**2) / 2)

    def __add__(self, other: TokenWork) -> TokenWork:
        return TokenWork(self.tokens + other.tokens, self.positions + other.positions)

    def at(self, growth: float) -> float:
        """In tokens at the very beginning."""
        return self.tokens + growth * self.positions


NOTHING = TokenWork(0, 0)


class CostModel(NamedTuple):
    """Seconds to a first token: `floor_seconds` + `token_seconds` x (tokens computed + `growth` x their positions)."""

    floor_seconds: float
    token_seconds: float
    growth: float
    requests: int  # it was learnt from
    alone: bool  # these requests had the worker to themselves

    def seconds(self, work: TokenWork) -> float:
        """What `work` takes, without the floor."""
        return self.token_seconds * work.at(self.growth)


class CostLearner:
    def __init__(self) -> None:
        self._requests = {alone: deque[tuple[TokenWork, float]](maxlen=WINDOW) for alone in (True, False)}
        self._new = 0
        self._model: CostModel | None = None

    def observe(self, prompt: int, cached: int, seconds: float, alone: bool) -> None:
        """A request's first token came after `seconds`; `cached` of the tokens of its prompt came from the cache."""
        if prompt > cached and seconds > 0:
            self._requests[alone].append((TokenWork.between(cached, prompt), seconds))
            self._new += 1

    @property
    def model(self) -> CostModel | None:
        """What is learnt so far; None while it is too little."""
        if self._new >= RENEWAL or (self._new and self._model is None):
            self._new = 0
            alone, others = self._requests.values()
            self._model = _fitted(alone, True) or _fitted([*alone, *others], False) or self._model
        return self._model


def _fitted(requests: Sequence[tuple[TokenWork, float]], alone: bool) -> CostModel | None:
    if len(requests) < ENOUGH:
        return None
    best = min(GROWTHS, key=lambda growth: _error(_points(requests, growth)))
    points = _points(requests, best)
    slope = _slope(combinations(points, 2), ENOUGH)
    if slope is None:
        return None
    floor = statistics.median(seconds - slope * tokens for tokens, seconds in points)
    return CostModel(max(0.0, floor), slope, best, len(requests), alone)


def _points(requests: Iterable[tuple[TokenWork, float]], growth: float) -> list[tuple[float, float]]:
    """The requests' work as one number, in its order, and their seconds."""
    return sorted((work.at(growth), seconds) for work, seconds in requests)


def _error(points: Sequence[tuple[float, float]]) -> float:
    """How far a request typically is from a line through `points`, seconds; each is paired with the one half-way on."""
    half = len(points) // 2
    slope = _slope(zip(points, points[half:], strict=False), ENOUGH // 2)
    if slope is None:
        return float("inf")
    rests = [seconds - slope * tokens for tokens, seconds in points]
    middle = statistics.median(rests)
    return statistics.median(abs(rest - middle) for rest in rests)


def _slope(pairs: Iterable[tuple[tuple[float, float], tuple[float, float]]], least: int) -> float | None:
    """Median of slopes, weighted by the points' distance; None if it falls, or fewer than `least` are far enough."""
    slopes = sorted(
        ((late - soon) / (many - few), many - few) for (few, soon), (many, late) in pairs if many - few >= APART
    )
    if len(slopes) < least:
        return None
    half = sum(weight for _, weight in slopes) / 2
    for slope, weight in slopes:
        half -= weight
        if half <= 0:
            return slope if slope > 0 else None
    return None
