"""Two engines' samples of the same work, taken in pairs side by side, and what may be said of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Pair(NamedTuple):
    """The same work on both sides, one right after the other; seconds."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        """Above 1: ours takes longer."""
        return self.ours / self.theirs


class Spread(NamedTuple):
    """Quartiles of some numbers."""

    lower: float
    median: float
    upper: float


def spread(values: Sequence[float]) -> Spread:
    """Quartiles of at least one number, the extremes among them."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*statistics.quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class Comparison:
    """Pairs of one kind, judged by their median ratio."""

    name: str
    pairs: tuple[Pair, ...]
    limit: float  # the median ratio may reach it

    @property
    def ratio(self) -> Spread:
        """Ours over theirs. Not the ratio of two medians: the sides of a pair share what the machine did then."""
        return spread([pair.ratio for pair in self.pairs])

    @property
    def calm(self) -> float:
        """Ours over theirs at the lower quartile of each: other work on the machine only ever adds time."""
        ours, theirs = (spread(side).lower for side in zip(*self.pairs, strict=True))
        return ours / theirs

    @property
    def extra(self) -> Spread:
        """Seconds that ours takes more."""
        return spread([pair.ours - pair.theirs for pair in self.pairs])

    @property
    def held(self) -> bool:
        """Whether it is as good as it has to be."""
        return self.ratio.median <= self.limit


def pooled(name: str, comparisons: Sequence[Comparison]) -> Comparison:
    """All pairs of several comparisons with one limit."""
    return Comparison(name, sum((comparison.pairs for comparison in comparisons), ()), comparisons[0].limit)


def in_words(ratio: Spread) -> str:
    """Median and quartiles in words."""
    return f"{ratio.median:.3f} ({ratio.lower:.3f}..{ratio.upper:.3f})"
