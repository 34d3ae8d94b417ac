"""Whether hints are used beside the drafts of this engine: at once, never, or once its own answers have shown it.

With `SEAMARK_DRAFTS=auto` an engine whose kind of drafts can be right begins on trial. States are then kept for trial
prompts alone; all others have vLLM's own caching. The process that has the engine asks itself (`engine_patches.trial`),
and opens hints for as long as it runs, or closes them with a reason.

A user drafts for speed: hits that make the head guess worse cost more than they save. In a trial each prompt is
answered with a hit and without one. Clients' requests cannot be paired: there hits are held against all others, and
what chance cannot explain makes the trial be repeated.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from engine_patches import settings, speculation
from engine_patches.footprint import OWN
from engine_patches.scheduler.refusals import SPECULATIVE, Refusal, refused
from engine_patches.settings import logger

NONE, ON, OFF, ON_TRIAL, OPEN, CLOSED = "", "on", "off", "trial", "open", "closed"

SHARE = 0.95  # of cold acceptance that hits have to reach
FEWEST_PAIRS = 4

# Standard errors that the mean has to lie above `SHARE`, or below it, before a trial has asked its most prompts; then
# the mean alone decides. Below: at a head that is just good enough, one look in some hundred trials is wrong.
CLEARLY_FINE, CLEARLY_WORSE = 2.0, 4.0

# For clients' requests: steps of each kind before the first look; the next one comes at twice as many. So there are
# 30 looks in a trillion steps, each of which is wrong with a probability of 3.4e-6: once in 9,000 boots at most.
FEWEST_STEPS, LIVE_CLEARLY_WORSE = 2000, 4.5
FEWEST_REQUESTS = 30  # of each kind: the steps of one request are alike


class AcceptedDrafts(NamedTuple):
    steps: int = 0  # that verified drafts
    tokens: int = 0  # drafts that were right

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    @classmethod
    def of(cls, some: Iterable[AcceptedDrafts]) -> AcceptedDrafts:
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
    cold, hit = (AcceptedDrafts.of(some).per_step for some in zip(*told, strict=True)) if told else (0.0, 0.0)
    if len(told) < FEWEST_PAIRS:  # n-gram drafts may find nothing to guess
        return PairedFinding("fine" if is_last else "undecided", cold, hit)
    apart = [pair.hit.per_step - SHARE * pair.cold.per_step for pair in told]
    mean = sum(apart) / len(apart)
    error = math.sqrt(sum((each - mean) ** 2 for each in apart) / (len(apart) - 1) / len(apart))
    if -CLEARLY_WORSE * error < mean < CLEARLY_FINE * error and not is_last:
        return PairedFinding("undecided", cold, hit)
    return PairedFinding("fine" if mean >= 0 else "worse", cold, hit)


@dataclass
class _Sums:
    requests: int = 0
    steps: int = 0
    tokens: int = 0
    squares: tuple[int, int, int] = (0, 0, 0)  # of steps, of steps times tokens, of tokens

    def add(self, one: AcceptedDrafts) -> None:
        (steps, tokens), (ss, st, tt) = one, self.squares
        self.requests, self.steps, self.tokens = self.requests + 1, self.steps + steps, self.tokens + tokens
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


@dataclass
class DraftGate:
    state: str = NONE  # without drafts
    why: str = ""  # it is closed, in words
    figures: str = ""  # of the trial, in words
    live: LiveAcceptance = field(default_factory=LiveAcceptance)  # of clients' requests
    doubt: str = ""  # what those have shown where hints are open
    doubted: threading.Event = field(default_factory=threading.Event)  # that is to be looked at

    @classmethod
    def of(cls, vllm_config: Any, refusal: Refusal | None) -> DraftGate:
        """As an engine begins whose hints are refused for `refusal`."""
        if not speculation.drafting(vllm_config):
            return cls()
        if refusal is not None:
            return cls(OFF, why=refusal.cause)
        return cls(ON_TRIAL if settings.drafts() == settings.AUTO else ON)

    def admits(self, request: Any) -> bool:
        """Whether states may be kept for a vLLM `Request`, and the hint counts that it came with."""
        return self.state in (NONE, ON, OPEN) or is_trial(request)

    def count(self, drafted: AcceptedDrafts, *, is_hit: bool) -> None:
        """A client's request has its answer, with such drafts."""
        if self.state not in (ON, OPEN) or self.doubt or not self.live.add(drafted, is_hit=is_hit):
            return
        self.doubt = worse(self.live.hit.per_step, self.live.cold.per_step, "in clients' requests")
        self.live = LiveAcceptance()
        if self.state == ON:
            logger.error("seamark: %s; %s=%s keeps hints on", self.doubt, settings.DRAFTS, settings.AT_ONCE)
        self.doubted.set()

    @property
    def refusal(self) -> Refusal | None:
        """Why hints are refused since a trial; None if they are not."""
        return refused(SPECULATIVE, f"drafts: {self.why}") if self.state == CLOSED else None


def worse(hit: float, cold: float, where: str) -> str:
    """Drafts are accepted less often behind hits; tokens of a step."""
    return f"{where}, {hit:.2f} drafts a step are accepted behind hits, {cold:.2f} without"


def is_own(request: Any) -> bool:
    """Whether the engine asked a vLLM `Request` itself."""
    return getattr(request, OWN, None) is not None


def is_trial(request: Any) -> bool:
    """Whether hints beside drafts are tried by a vLLM `Request`."""
    return getattr(request, OWN, None) is True
