"""Greedy continuations of one prompt, and how far two of them are from each other.

Both follow the same tokens up to the first that differs, so up to there, and at that one itself, they say the same of
the same text: what they differ in is arithmetic, or a wrong state.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from xxhash import xxh3_64_hexdigest

from proxy.chat.chat import COMPLETIONS
from proxy.chat.usage import usage_of
from proxy.http.client import Upstream
from proxy.http.json_body import HINT, XARGS

TOKENS = 16

TOP = 5

# Logits come in the model's precision: of bfloat16, the differences between them are multiples of one of these.
GRAINS = tuple(2.0**power for power in range(-2, -9, -1))

GRAIN_ERROR = 2e-5  # of a difference between two float32 logprobs


class Unanswered(Exception):
    """The worker would not, or gave something that cannot be compared. The message holds no prompt text."""


class Step(NamedTuple):
    """One generated token."""

    token: str
    top: Mapping[str, float]  # the most likely ones and their logprobs


class Greedy(NamedTuple):
    """A continuation."""

    steps: tuple[Step, ...]
    cached: int  # tokens of the prompt that the engine says it had

    @property
    def hash(self) -> str:
        """Names its tokens."""
        return xxh3_64_hexdigest(" ".join(step.token for step in self.steps).encode())

    @property
    def grain(self) -> float:
        """What its logits are multiples of, 0 where that is finer than `GRAINS`."""
        return statistics.median_low([_grain(step) for step in self.steps])


class Distance(NamedTuple):
    """Between two continuations."""

    error: float  # largest difference of a logprob
    position: int | None  # of the first token that differs


def question(model: Any, prompt: Sequence[int], salt: str | None, hint: Sequence[int] = ()) -> bytes:
    """What to continue, as a worker is asked; `hint` are positions."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "logprobs": TOP,
        "return_tokens_as_token_ids": True,
    }
    if salt is not None:
        body["cache_salt"] = salt
    if hint:
        body[XARGS] = {HINT: list(hint)}
    return json.dumps(body).encode()


async def continued(upstream: Upstream, url: str, asked: bytes, timeout: float) -> Greedy:
    """What the worker at `url` makes of a `question`; `timeout` in seconds.

    Raises `Unanswered`, `Unreachable` or `Broken`.
    """
    status, raw = await upstream.fetch("POST", url + COMPLETIONS, asked, timeout)
    if status != 200:
        raise Unanswered(f"status {status}")
    try:
        answer = json.loads(raw)
        usage, told = usage_of(answer), answer["choices"][0]["logprobs"]
        steps = tuple(map(Step, told["tokens"], told["top_logprobs"]))
    except (ValueError, KeyError, TypeError, IndexError):
        raise Unanswered("no logprobs") from None
    if usage is None or usage.cached is None or not steps or not all(step.top for step in steps):
        raise Unanswered("no cached tokens, or no logprobs")
    return Greedy(steps, usage.cached)


def distance(one: Greedy, other: Greedy) -> Distance:
    """How far they are apart, up to and including the first token that differs."""
    error = 0.0
    for position, (left, right) in enumerate(zip(one.steps, other.steps, strict=False)):
        error = max(error, _off(left.top, right.top), _off(right.top, left.top))
        if left.token != right.token:
            return Distance(error, position)
    return Distance(error, None)


def _off(one: Mapping[str, float], other: Mapping[str, float]) -> float:
    """Largest difference; a token that `other` does not name is at most as likely there as the last that it does."""
    least = min(other.values())
    return max(abs(value - other[token]) if token in other else max(0.0, value - least) for token, value in one.items())


def _grain(step: Step) -> float:
    best = max(step.top.values())
    apart = [best - value for value in step.top.values()]
    return next((grain for grain in GRAINS if all(_is_multiple(value, grain) for value in apart)), 0.0)


def _is_multiple(value: float, grain: float) -> bool:
    return abs(value - round(value / grain) * grain) < GRAIN_ERROR


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
