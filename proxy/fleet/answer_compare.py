"""Greedy continuations of one prompt, from a worker's cache and recomputed: are they the same but for arithmetic?

Two continuations follow the same tokens up to the first that differs. Up to there, and at that token itself, both give
logprobs for the same text: what these differ in is arithmetic, or a wrong state.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_64_hexdigest

from proxy.chat.chat import COMPLETIONS
from proxy.chat.usage import usage_of
from proxy.http.client import Upstream
from proxy.http.json_body import HINT, XARGS, loads

TOKENS, TOP = 16, 5  # of a continuation, and logprobs of each

# Logits come in the model's precision: differences between bfloat16 logits are multiples of one of these.
GRAINS = tuple(2.0**power for power in range(-2, -9, -1))

GRAIN_ERROR = 2e-5  # of a difference between two float32 logprobs

# No arithmetic puts two answers this far apart (logprob): four steps of bfloat16 logits beyond 32.
BEYOND_NOISE = 1.0

# What still counts as noise: so many times the largest difference between two recomputed continuations, so many steps
# of the model's logits. Differences up to `LEAST` are any arithmetic's.
NOISES, STEPS, LEAST = 3.0, 4.0, 1e-3
RECENT = 32  # prompts whose noise counts

# Prompts that were recomputed three times before an answer can be called different, where no two answers of an engine
# are bit-equal: it may round at random, and three of one prompt may happen to lie close together.
NOISY_PROMPTS = 2

FEWEST_PARTED = 6  # prompts, before other tokens in most steps of most of them are no noise any more

CheckResult = Literal["same", "noise", "differs"]


class Unanswered(Exception):
    """The worker refused, or its answer cannot be compared. The message holds no prompt text."""


class ContinuedToken(NamedTuple):
    token: str
    top: Mapping[str, float]  # the most likely tokens and their logprobs


class Continuation(NamedTuple):
    steps: tuple[ContinuedToken, ...]
    cached: int  # tokens of the prompt that came from the cache, by the engine

    @property
    def hash(self) -> str:
        return xxh3_64_hexdigest(" ".join(step.token for step in self.steps).encode())

    @property
    def grain(self) -> float:
        """The step of its logits, 0 if that is finer than `GRAINS`."""
        return statistics.median_low([_grain(step) for step in self.steps])


class Distance(NamedTuple):
    """How far two continuations are apart."""

    error: float  # largest difference of a logprob
    position: int | None  # of the first token that differs


class Judgement(NamedTuple):
    result: CheckResult
    off: Distance  # between the two below
    noise: float  # largest difference between two recomputed continuations
    cached: Continuation  # the one from the cache that is furthest off
    recomputed: Continuation  # the recomputed one nearest to it


class Noise:
    """How far recomputed answers of one engine are apart, as far as it was looked at."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=RECENT)
        self._parted: deque[bool] = deque(maxlen=RECENT)  # prompts whose answers from the cache had other tokens

    def add(self, answers: Sequence[Continuation]) -> None:
        """Some of one prompt, two at least."""
        pairs = itertools.combinations(answers, 2)
        self._seen.append(max(distance(one.steps, other.steps).error for one, other in pairs))

    @property
    def largest(self) -> float:
        """Difference of a logprob between two of one prompt; 0 if none was seen."""
        return max(self._seen, default=0.0)

    @property
    def is_known(self) -> bool:
        """Whether it is a bound: all answers of an engine are bit-equal, or several prompts were looked at."""
        return not self.largest or len(self._seen) >= NOISY_PROMPTS

    def excuses(self, cached: Sequence[Continuation], recomputed: Sequence[Continuation]) -> bool:
        """Whether these may be off by noise: not if answers from the cache part from the others on most prompts."""
        parts = _part(cached, recomputed)
        self._parted.append(parts)
        return not parts or len(self._parted) < FEWEST_PARTED or sum(self._parted) <= len(self._parted) / 2

    async def learn(
        self, prompt: Sequence[int], recomputed: Callable[[Sequence[int]], Awaitable[Continuation]]
    ) -> None:
        """Have beginnings of this prompt `recomputed`, three times each, until the noise is known."""
        for part in range(2, NOISY_PROMPTS + 2):
            if self.is_known:
                return
            shorter = prompt[: max(1, len(prompt) * (part - 1) // part)]
            answers = [await recomputed(shorter) for _ in range(3)]
            if not any(answer.cached for answer in answers):
                self.add(answers)


def _part(cached: Sequence[Continuation], recomputed: Sequence[Continuation]) -> bool:
    """Whether answers from the cache have other tokens in most steps, where recomputed ones have not."""

    def parts(one: Continuation, other: Continuation) -> bool:
        at = distance(one.steps, other.steps).position
        return at is not None and at < len(one.steps) / 2

    return all(itertools.starmap(parts, itertools.product(cached, recomputed))) and not any(
        itertools.starmap(parts, itertools.combinations(recomputed, 2))
    )


def completion_request(model: Any, prompt: Sequence[int], salt: str | None, hint: Sequence[int] = ()) -> bytes:
    """The request whose answer is a continuation of `prompt`; `hint` holds positions in it, tokens."""
    body: dict[str, Any] = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": TOKENS}
    body |= {"ignore_eos": True, "logprobs": TOP, "return_tokens_as_token_ids": True}
    if salt is not None:
        body["cache_salt"] = salt
    if hint:
        body[XARGS] = {HINT: list(hint)}
    return json.dumps(body).encode()


async def continuation(upstream: Upstream, url: str, request: bytes, timeout: float) -> Continuation:
    """The answer of the worker at `url` to a `completion_request`; `timeout` in seconds.

    Raises `Unanswered`, `Unreachable` or `Broken`.
    """
    status, raw = await upstream.fetch("POST", url + COMPLETIONS, request, timeout)
    if status != 200:
        raise Unanswered(f"status {status}")
    try:
        answer = loads(raw)
        usage, logprobs = usage_of(answer), answer["choices"][0]["logprobs"]
        steps = tuple(map(ContinuedToken, logprobs["tokens"], logprobs["top_logprobs"]))
    except (ValueError, KeyError, TypeError, IndexError):
        raise Unanswered("no logprobs") from None
    if usage is None or usage.cached is None or not steps or not all(step.top for step in steps):
        raise Unanswered("no cached tokens, or no logprobs")
    return Continuation(steps, usage.cached)


def judge(cached: Sequence[Continuation], recomputed: Sequence[Continuation], noise: float) -> Judgement:
    """A verdict on the worst of the `cached` continuations, each held against the nearest of the `recomputed`.

    `noise` is the largest difference seen between two recomputed ones.
    """
    pairs = [
        min(((distance(one.steps, other.steps), one, other) for other in recomputed), key=lambda pair: pair[0].error)
        for one in cached
    ]
    off, worst, nearest = max(pairs, key=lambda pair: pair[0].error)
    bound = min(BEYOND_NOISE, max(LEAST, NOISES * noise, STEPS * max(each.grain for each in recomputed)))
    result: CheckResult = "same" if off.error <= LEAST else "noise" if off.error <= bound else "differs"
    return Judgement(result, off, noise, worst, nearest)


def distance(one: Sequence[ContinuedToken], other: Sequence[ContinuedToken]) -> Distance:
    """How far two answers are apart, up to and including the first token that differs."""
    error = 0.0
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        error = max(error, _largest_difference(left, right), _largest_difference(right, left))
        if left.token != right.token:
            return Distance(error, position)
    return Distance(error, None)


def _largest_difference(one: ContinuedToken, other: ContinuedToken) -> float:
    """Of the logprobs of `one`; a token that `other` does not name is at most as likely there as the last it ranks.

    An engine names the chosen token even when that is not among the most likely ones, so it is no rank.
    """
    ranked = [value for token, value in other.top.items() if token != other.token]
    least = min(ranked or other.top.values())
    return max(
        abs(value - other.top[token]) if token in other.top else max(0.0, value - least)
        for token, value in one.top.items()
    )


def _grain(step: ContinuedToken) -> float:
    best = max(step.top.values())
    apart = [best - value for value in step.top.values()]
    off = {grain: max(abs(value - round(value / grain) * grain) for value in apart) for grain in GRAINS}
    return next((grain for grain in GRAINS if off[grain] < GRAIN_ERROR), 0.0)
