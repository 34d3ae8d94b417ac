"""Whether an answer from the cache is further from one computed anew than those are from each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from proxy.greedy import Distance, Greedy, distance

# Of the largest difference between two answers computed anew; of a step of the model's logits; and of any arithmetic.
NOISES, STEPS, LEAST = 3.0, 4.0, 1e-3
Result = Literal["same", "noise", "differs"]


class Verdict(NamedTuple):
    """On one prompt; differences of logprobs."""

    result: Result
    off: Distance  # the cached answer that is furthest from those computed anew
    noise: float  # largest between two answers computed anew
    bound: float
    cached: Greedy
    anew: Greedy


def judge(cached: Sequence[Greedy], anew: Sequence[Greedy], noise: float) -> Verdict:
    """The worst of the `cached` answers, each against the nearest of those computed `anew`.

    `noise` is the largest difference seen between two computed anew.
    """
    nearest = [min(((distance(answer, other), other) for other in anew), key=_error) for answer in cached]
    (off, other), answer = max(zip(nearest, cached, strict=True), key=lambda pair: pair[0][0].error)
    bound = max(LEAST, NOISES * noise, STEPS * max(each.grain for each in anew))
    result: Result = "same" if off.error <= LEAST else "noise" if off.error <= bound else "differs"
    return Verdict(result, off, noise, bound, answer, other)


def _error(compared: tuple[Distance, Greedy]) -> float:
    return compared[0].error
