"""Greedy answers of an engine to one prompt: are they the same but for arithmetic?

Two answers follow the same tokens up to the first that differs. Up to there, and at that token itself, both have
logprobs of the same text: what these differ in is arithmetic, or a wrong state.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

# Logits come in the model's precision: differences between bfloat16 logits are multiples of one of these.
GRAINS = tuple(2.0**power for power in range(-2, -9, -1))
GRAIN_ERROR = 2e-5  # of a difference between two float32 logprobs


class Ranked(Protocol):
    """An answer, token by token."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def top(self) -> Sequence[Mapping[int, float]]: ...  # for each token, the likeliest ones and their logprobs


class Discrepancy(NamedTuple):
    token: int | None  # index of the first token that differs
    error: float  # largest difference of a logprob, up to and including that token: half a lost tie's gap at least


def compare(answer: Ranked, reference: Ranked) -> Discrepancy:
    """How `answer` differs from the reference, which has the same length."""
    error = 0.0
    steps = zip(answer.tokens, answer.top, reference.tokens, reference.top, strict=True)
    for index, (token, top, wanted, wanted_top) in enumerate(steps):
        # A token that one side does not name is at most as likely as its last.
        last, wanted_last = min(top.values()), min(wanted_top.values())
        pairs = [(top.get(each, last), wanted_top.get(each, wanted_last)) for each in {*top, *wanted_top}]
        error = max(error, *(_apart(*pair) for pair in pairs))
        if token != wanted:
            return Discrepancy(index, error)
    return Discrepancy(None, error)


def _apart(one: float, other: float) -> float:
    apart = 0.0 if one == other else abs(one - other)
    return math.inf if math.isnan(apart) else apart


def spread(answers: Iterable[Ranked]) -> float:
    """The largest difference of a logprob between two of these."""
    return max((compare(*pair).error for pair in combinations(answers, 2)), default=0.0)


def grain(answer: Ranked) -> float:
    """The step of the logits that an answer was chosen by, 0 if that is finer than `GRAINS`."""
    return statistics.median_low([_grain(top.values()) for top in answer.top])


def _grain(logprobs: Iterable[float]) -> float:
    values = [*logprobs]
    if len(values) < 3:
        return 0.0
    apart = [max(values) - value for value in values]
    return next((each for each in GRAINS if all(abs(x - round(x / each) * each) < GRAIN_ERROR for x in apart)), 0.0)
