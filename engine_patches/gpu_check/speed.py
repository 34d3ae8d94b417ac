"""Measured inside an engine of `seamark gpu-check`: forward passes, seconds to the first token, and the pace.

The same prompts go to the engine with the patches and to vLLM alone, so that both stand side by side in one report.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine_patches.gpu_check.engine import LaneEngine
from engine_patches.gpu_check.questions import Prompts, Question, QuestionWave, TokenRange

COLD, WARM, FAN_OUT = "cold", "warm", "fan-out"

FAN = 4  # requests of a fan-out

OWN_TOKENS = 32  # that a timed prompt does not share

DECODED = 32  # tokens whose decoding is timed

LONG = 2048  # tokens: cases that share more are timed once

TIMED_STATES = 8  # states whose writing is timed together


class LanePasses(NamedTuple):
    """Forward passes that one prompt took until its first token."""

    case: str
    prompt: int  # tokens
    cached: int  # tokens
    passes: int
    needed: int  # passes that its uncached tokens fill


class FirstTokens(NamedTuple):
    """One case of requests that share a prefix, until the last of them has its first token."""

    case: str
    shared: int  # tokens
    seconds: float  # median
    cached: int  # prompt tokens from the cache, of all requests of the case together
    passes: int


class MeasuredPace(NamedTuple):
    """Seconds of an engine's passes."""

    decode: float  # of each token of one answer
    floor: float  # of a pass over hardly any tokens, as the plugin learnt it; 0 if it did not
    token: float  # that each token adds to a pass, as learnt; 0 if unknown
    state: float  # that each further state written inside a pass adds, all recurrent layers


def count_passes(engine: LaneEngine, ids: TokenRange) -> list[LanePasses]:
    """Passes to the first token of prompts asked one at a time, cold and warm, shorter and longer than a block."""
    prompts, block = Prompts(1, ids), engine.block
    counted = []
    for name, shared in (("shorter than a block", block // 2), ("longer than a block", 2 * block)):
        prefix = prompts.tokens(shared)
        for case in (COLD, WARM):
            whole = [*prefix, *prompts.tokens(block // 4)]
            if len(whole) > engine.longest:
                continue
            before = engine.passes
            (answer,) = engine.ask([Question(case, whole, [shared // 2, shared, len(whole) - 1], None)], new_tokens=1)
            needed = math.ceil((len(whole) - answer.cached) / engine.budget)
            took = engine.passes - before
            counted.append(LanePasses(f"{case}, {name}", len(whole), answer.cached, took, needed))
    return counted


def time_first_tokens(
    engine: LaneEngine, lengths: Sequence[int], repeats: int, ids: TokenRange
) -> Iterator[list[FirstTokens]]:
    """Cold, warm and fan-out for each shared length, one length after the other."""
    prompts = Prompts(2, ids)
    for shared in lengths:
        known = prompts.tokens(shared)
        engine.ask(_wave(prompts, known, 1), new_tokens=1)
        times = repeats if shared <= LONG else 1
        yield [_first_tokens(engine, prompts, case, known, times) for case in (COLD, WARM, FAN_OUT)]


def _wave(prompts: Prompts, prefix: list[int], count: int) -> QuestionWave:
    return [Question("timed", [*prefix, *prompts.tokens(OWN_TOKENS)], [len(prefix)], None) for _ in range(count)]


def _first_tokens(engine: LaneEngine, prompts: Prompts, case: str, known: list[int], repeats: int) -> FirstTokens:
    seconds, cached, passes = [], 0, 0
    for _ in range(repeats + 1):
        prefix = known if case == WARM else prompts.tokens(len(known))
        wave = _wave(prompts, prefix, FAN if case == FAN_OUT else 1)
        before, began = engine.passes, time.perf_counter()
        answers = engine.ask(wave, new_tokens=1)
        seconds.append(time.perf_counter() - began)
        cached, passes = sum(answer.cached for answer in answers), engine.passes - before
    # Kernels are compiled and tuned at their first use.
    return FirstTokens(case, len(known), statistics.median(seconds[1:]), cached, passes)


def time_state(engine: LaneEngine, repeats: int, ids: TokenRange) -> float:
    """Seconds that each further state written inside a pass adds, all recurrent layers."""
    prompts = Prompts(3, ids)
    long = min(engine.budget, engine.longest, LONG) - 64
    few = [long - 16]
    many = [long * part // (TIMED_STATES + 1) for part in range(1, TIMED_STATES + 1)] + few

    def more() -> float:
        # Back to back, so that a machine that slows down slows both.
        return _seconds(engine, prompts.tokens(long), many) - _seconds(engine, prompts.tokens(long), few)

    return _median(more, repeats) / TIMED_STATES


def measure_pace(engine: LaneEngine, repeats: int, ids: TokenRange, state: float) -> MeasuredPace:
    """What decoding a token takes, and what the plugin learnt of this engine's steps; `state` as by `time_state`."""
    prompts = Prompts(4, ids)

    def decoding() -> float:
        one = _seconds(engine, prompts.tokens(16), [])
        return _seconds(engine, prompts.tokens(16), [], DECODED + 1) - one

    decode = _median(decoding, repeats) / DECODED
    return MeasuredPace(decode, engine.step_time.floor_seconds, engine.step_time.token_seconds, state)


def _seconds(engine: LaneEngine, tokens: list[int], hints: Sequence[int], new_tokens: int = 1) -> float:
    began = time.perf_counter()
    engine.ask([Question("timed", tokens, hints, None)], new_tokens)
    return time.perf_counter() - began


def _median(one: Callable[[], float], repeats: int) -> float:
    one()
    return statistics.median(one() for _ in range(repeats))
