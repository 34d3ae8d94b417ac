"""Exactness: whether an answer in float32 equals the reference engine's.

Every token must be equal, and the top logprobs within a bound. If the reference's two best tokens are closer than
float32 sums resolve, either may be chosen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from proxy.bench.harness.client import TimedAnswer
from proxy.fleet.answer_compare import distance

LOGPROB_BOUND = 1e-4
TIE = 1e-5  # of the reference's two best logprobs: a gap below it may be taken either way


class Difference(NamedTuple):
    """The first token at which two answers differ, or the largest logprob error if none does."""

    position: int | None  # of the first differing token
    largest_error: float  # of a logprob, up to there
    gap: float = math.inf  # logprob between the reference's two best tokens at `position`

    @property
    def exact(self) -> bool:
        return self.largest_error <= LOGPROB_BOUND if self.position is None else self.gap < TIE


def compare(answer: TimedAnswer, reference: TimedAnswer) -> Difference:
    """How `answer` differs from the reference engine's. Compares as many tokens as `answer` has."""
    error, position = distance(answer.steps, reference.steps)
    compared = list(zip(answer.steps, reference.steps, strict=False))[: None if position is None else position + 1]
    # The fifth and the sixth best can change places within the bound; of more tokens that would be a coincidence.
    if any(len(step.top.keys() & wanted.top.keys()) < len(wanted.top) - 1 for step, wanted in compared):
        error = math.inf
    if position is not None:
        best, second, *_ = sorted(reference.steps[position].top.values(), reverse=True)
        return Difference(position, error, best - second)
    return Difference(len(reference.steps) if len(answer.steps) > len(reference.steps) else None, error)
