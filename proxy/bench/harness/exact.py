"""Exactness: whether an answer equals the reference engine's.

In float32 every token must be equal, and the top logprobs within a bound. If the reference's two best tokens are closer
than float32 sums resolve, either may be chosen. In bfloat16 rounding depends on what else is in a batch, cache or no
cache: in a small share of the answers a token may differ if the reference's two best are nearly tied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from proxy.bench.harness.client import TimedAnswer
from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT
from proxy.fleet.answer_compare import distance

LOGPROB_BOUND = 1e-4


class Difference(NamedTuple):
    """The first token at which two answers differ, or the largest logprob error if none does."""

    position: int | None  # of the first differing token
    largest_error: float  # of a logprob, up to there
    gap: float = math.inf  # logprob between the reference's two best tokens at `position`

    @property
    def exact(self) -> bool:
        """Whether float32 answers count as equal."""
        return FLOAT32.accepts(self)


@dataclass(frozen=True)
class Rule:
    """What counts as equal in one precision."""

    bound: float  # of a logprob's error
    tie: float = 0.0  # a gap below it may be taken either way
    share: float = 0.0  # of the answers that may do so

    def accepts(self, difference: Difference) -> bool:
        """Whether one answer may pass."""
        if difference.position is None:
            return difference.largest_error <= self.bound
        return difference.gap < self.tie

    def accepts_all(self, differences: Sequence[Difference]) -> bool:
        """Whether these answers may pass together."""
        parted = sum(difference.position is not None for difference in differences)
        return all(map(self.accepts, differences)) and parted <= self.share * len(differences)


FLOAT32 = Rule(bound=LOGPROB_BOUND, tie=1e-5, share=0.01)

BFLOAT16 = Rule(bound=0.25, tie=0.1, share=0.01)

RULES: Mapping[str, Rule] = {NEMOTRON_H: FLOAT32, QWEN3_NEXT: BFLOAT16}  # by family of the generated model, on a CPU


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


def worst(differences: Sequence[Difference]) -> Difference:
    """The difference that is least exact."""
    return max(differences, key=lambda difference: (difference.position is not None, difference.largest_error))
