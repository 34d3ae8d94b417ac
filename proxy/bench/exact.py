"""Exactness: an answer equals the reference engine's. float32: every token, and the top logprobs within a bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from proxy.bench.client import Answer, Step

LOGPROB_BOUND = 1e-4
MIN_TOKENS = 32


class Difference(NamedTuple):
    """The first place where two answers part, or the largest logprob error where none does."""

    position: int | None  # of the first differing token
    largest_error: float  # of a logprob, up to there

    @property
    def exact(self) -> bool:
        """Whether the answers count as equal."""
        return self.position is None and self.largest_error <= LOGPROB_BOUND


def compare(answer: Answer, reference: Answer) -> Difference:
    """How `answer` differs from the reference engine's. Compares as many tokens as `answer` has."""
    error = 0.0
    for position, (step, wanted) in enumerate(zip(answer.steps, reference.steps, strict=False)):
        error = max(error, _error(step, wanted))
        if step.token != wanted.token:
            return Difference(position, error)
    if len(answer.steps) > len(reference.steps):
        return Difference(len(reference.steps), error)
    return Difference(None, error)


def _error(step: Step, wanted: Step) -> float:
    # The fifth and sixth best can change places within the bound, so only tokens both lists name are compared.
    common = step.top.keys() & wanted.top.keys()
    if len(common) < len(wanted.top) - 1:
        return math.inf
    return max(abs(step.top[token] - wanted.top[token]) for token in common)


def worst(differences: Sequence[Difference]) -> Difference:
    """The one that speaks most against exactness."""
    return max(differences, key=lambda difference: (difference.position is not None, difference.largest_error))
