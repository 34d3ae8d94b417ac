"""Does a draft head guess as well behind a hit as without one? Rules with a bound on how often they are wrong.

A user drafts for speed: hits that make the head guess worse cost more than they save. In a trial the same prompts are
answered with a hit and without one, so each prompt is held against itself. Clients' requests cannot be paired: there
hits are held against all others, and only what chance cannot explain counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

SHARE = 0.95  # of cold acceptance that hits have to reach

# Standard errors that the mean has to lie above `SHARE`, or below it, before a trial has asked its most prompts; then
# the mean alone decides. Below: at a head that is just good enough, one look in some hundred trials is wrong.
CLEARLY_FINE, CLEARLY_WORSE = 2.0, 4.0

FEWEST_PAIRS = 4

# For clients' requests: steps of each kind before the first look; the next one comes at twice as many. So there are
# 30 looks in a trillion steps, each of which is wrong with a probability of 3.4e-6: once in 9,000 boots at most.
FEWEST_STEPS, LIVE_CLEARLY_WORSE = 2000, 4.5
FEWEST_REQUESTS = 30  # of each kind: the steps of one request are alike


class AcceptedDrafts(NamedTuple):
    """Drafts of one answer or several."""

    steps: int = 0  # that verified drafts
    tokens: int = 0  # drafts that were right

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @classmethod
    def of(cls, some: Iterable[AcceptedDrafts]) -> AcceptedDrafts:
        """All of them together."""
        return cls(*(sum(each) for each in zip((0, 0), *some, strict=True)))


class AcceptedPair(NamedTuple):
    """One prompt, recomputed and from the cache."""

    cold: AcceptedDrafts
    hit: AcceptedDrafts


class PairedFinding(NamedTuple):
    """What pairs say of a head behind hits."""

    result: Literal["fine", "worse", "undecided"]
    cold: float  # accepted tokens of a step
    hit: float


def judge_pairs(pairs: Sequence[AcceptedPair], *, is_last: bool) -> PairedFinding:
    """`is_last`: there will be no more. Prompts in which nothing was drafted say nothing, and cost nothing."""
    told = [pair for pair in pairs if pair.cold.steps and pair.hit.steps]
    cold, hit = AcceptedDrafts.of(pair.cold for pair in told), AcceptedDrafts.of(pair.hit for pair in told)
    if len(told) < FEWEST_PAIRS:  # n-gram drafts may find nothing to guess
        return PairedFinding("fine" if is_last else "undecided", cold.per_step, hit.per_step)
    apart = [pair.hit.per_step - SHARE * pair.cold.per_step for pair in told]
    mean = sum(apart) / len(apart)
    error = math.sqrt(sum((each - mean) ** 2 for each in apart) / (len(apart) - 1) / len(apart))
    result: Literal["fine", "worse", "undecided"] = "undecided"
    if mean >= 0 and (mean >= CLEARLY_FINE * error or is_last):
        result = "fine"
    elif mean < 0 and (mean <= -CLEARLY_WORSE * error or is_last):
        result = "worse"
    return PairedFinding(result, cold.per_step, hit.per_step)


@dataclass
class _Sums:
    """Requests of one kind."""

    requests: int = 0
    steps: float = 0.0
    tokens: float = 0.0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of steps, of steps times tokens, of tokens

    def add(self, one: AcceptedDrafts) -> None:
        steps, tokens = float(one.steps), float(one.tokens)
        self.requests += 1
        self.steps += steps
        self.tokens += tokens
        ss, st, tt = self.squares
        self.squares = (ss + steps * steps, st + steps * tokens, tt + tokens * tokens)

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def variance(self) -> float:
        """Of `per_step`, with whole requests as what is drawn: the steps of one are alike."""
        ss, st, tt = self.squares
        rest = tt - 2 * self.per_step * st + self.per_step**2 * ss
        return max(0.0, rest) / self.steps**2 * self.requests / max(1, self.requests - 1)


@dataclass
class LiveAcceptance:
    """Drafts of clients' requests at one boot of a worker."""

    next_look: float = FEWEST_STEPS  # steps of each kind
    cold: _Sums = field(default_factory=_Sums)
    hit: _Sums = field(default_factory=_Sums)

    def add(self, one: AcceptedDrafts, *, is_hit: bool) -> bool:
        """Count one request; whether hits are now known to be guessed worse."""
        if not one.steps:
            return False
        (self.hit if is_hit else self.cold).add(one)
        if min(self.cold.steps, self.hit.steps) < self.next_look:
            return False
        if min(self.cold.requests, self.hit.requests) < FEWEST_REQUESTS:
            return False
        self.next_look = 2 * min(self.cold.steps, self.hit.steps)
        apart = self.hit.per_step - SHARE * self.cold.per_step
        error = math.sqrt(self.hit.variance + SHARE**2 * self.cold.variance)
        return apart < -LIVE_CLEARLY_WORSE * error and apart < 0
