"""Two engines' samples of the same work, taken in pairs side by side, and what may be said of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
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
