"""What one engine of `seamark gpu-check` is asked to do, in the order of its value, and what it hands back.

`python -m engine_patches.gpu_check.job JOB RESULT` (pickles). Each engine has a process of its own, because patches are
applied once per process and `SEAMARK_ENGINE` decides which. Its result is written again after each part.
"""

from __future__ import annotations

import contextlib
import pickle
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.gpu_check.engine import CheckedAnswer, LaneEngine, facts_of
from engine_patches.gpu_check.lanes import Lane
from engine_patches.gpu_check.questions import (
    DEFECTS,
    RESEND,
    SHARED_LENGTHS,
    TINY_IDS,
    Prompts,
    Question,
    Sections,
    own_sections,
    sections,
)

BUDGET = 2048  # tokens that a step computes where prompts are not to be in one piece
ODD_BUDGET, OWN_ODD_BUDGET = 250, 1000  # no multiples of any chunk; the second for long prompts
ORDINARY_TOKENS = 1000  # ids that may be special tokens
COLD, WARM, FAN_OUT = "cold", "warm", "four at once"
COLD_LENGTHS, STATES = (500, 2000, 8000), (0, 1, 3, 8)  # tokens of cold prompts, and states that each of them leaves
OWN_TOKENS, DECODED = 32, 32  # tokens that a timed prompt does not share, and those whose decoding is timed
FAN = 4  # requests at once
REPEATS, LONG = 3, 2048  # the median of so many counts; cases that share more tokens are timed once


class LaneJob(NamedTuple):
    lane: Lane
    model: str
    # As vLLM alone has made them; None: this is vLLM alone, and answers without its cache, twice.
    sections: Sections | None = None
    seconds: float = float("inf")  # from the start; a part that has not begun by then is left out


class FirstTokens(NamedTuple):
    """One case of requests, until the last of them has its first token."""

    case: str
    tokens: int  # of the prompt, or those that are shared
    hints: int  # states asked for
    seconds: float  # median
    cached: int  # prompt tokens from the cache, of all requests of the case together
    passes: int
    states: int  # written


@dataclass
class LaneResult:
    """The result of a job, as far as it has come; written again whenever something was added."""

    facts: dict[str, Any] = field(default_factory=dict)
    sections: Sections = field(default_factory=dict)
    answers: dict[str, list[CheckedAnswer]] = field(default_factory=dict)  # by section, in the order of its questions
    # The same of vLLM alone in other batches and cuts, or, where it drafts, with its cache.
    answers_again: dict[str, list[CheckedAnswer]] = field(default_factory=dict)
    from_cache: list[CheckedAnswer] = field(default_factory=list)  # to resent prompts, of vLLM alone with its cache
    passes: list[FirstTokens] = field(default_factory=list)
    first_tokens: list[FirstTokens] = field(default_factory=list)
    # Seconds that decoding a token takes; of a pass, and of each of its tokens, as learnt: 0 while that is unknown.
    pace: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # parts for which there was no time


def run(job: LaneJob, save: Callable[[LaneResult], None]) -> None:
    """Do the job; `save` is called after each part of it."""
    began = time.monotonic()
    lane = job.lane
    engine = LaneEngine(lane.arguments(job.model), lane.flags)
    if not lane.own_model:
        engine.scheduler.max_num_scheduled_tokens = BUDGET
    result = LaneResult(facts=facts_of(engine))
    save(result)
    if not result.facts["recurrent"] or not (job.sections is None or result.facts["patches_live"]):
        return
    lengths = [shared for shared in SHARED_LENGTHS if shared + 2 * OWN_TOKENS <= engine.longest]
    ids = TINY_IDS
    if lane.own_model:  # the first ids of many vocabularies are special tokens, the last ones too
        vocabulary = engine.config.model_config.get_vocab_size()
        ids = range(min(ORDINARY_TOKENS, vocabulary // 4), vocabulary // 2)
    if job.sections is not None:
        result.sections = job.sections
    elif lane.own_model:  # states of a model that drafts are spoiled in its lane without drafts
        result.sections = own_sections(engine.lengths, lengths, ids, defects=not result.facts["drafts"])
    else:
        result.sections = sections(engine.lengths, few=not lane.timed)
    for number, (name, part) in enumerate(_parts(engine, job, result, lengths, ids)):
        if number and time.monotonic() - began > job.seconds:
            result.left_out.append(name)
        else:
            part()
        save(result)


def _parts(
    engine: LaneEngine, job: LaneJob, result: LaneResult, lengths: Sequence[int], ids: range
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The parts of the job by their names, the most valuable first."""

    def timing(measure: Callable[..., list[FirstTokens]], length: int, *more: Any) -> Callable[[], None]:
        return lambda: result.first_tokens.extend(measure(engine, length, ids, *more))

    first, *others = result.sections
    for name in (first, *(name for name in others if name in DEFECTS)):
        yield name, partial(_ask, engine, job, result, name)
    yield "forward passes", lambda: result.passes.extend(count_passes(engine, ids))
    if job.lane.timed:
        for length in (length for length in COLD_LENGTHS if length <= engine.longest):
            yield f"{length:,} cold tokens", timing(time_cold, length)
        for shared in lengths:
            yield f"behind {shared:,} tokens", timing(time_shared, shared, job.lane.own_model)
        yield "pace", lambda: setattr(result, "pace", measure_pace(engine, ids))
    for name in (name for name in others if name not in DEFECTS):
        yield name, partial(_ask, engine, job, result, name)


def _ask(engine: LaneEngine, job: LaneJob, result: LaneResult, name: str) -> None:
    waves, facts = result.sections[name], result.facts
    if job.sections is not None:
        result.answers[name] = engine.ask(*waves[: -1 if name in DEFECTS else None])
        if name in DEFECTS:
            with engine.planted(name):
                result.answers[name] += engine.ask(waves[-1])
        return
    with engine.without_cache():
        result.answers[name] = engine.ask(*waves)
    if name not in DEFECTS and facts["drafts"]:
        result.answers_again[name] = engine.ask(*waves)
    elif name not in DEFECTS and not facts["exact"]:
        odd = OWN_ODD_BUDGET if job.lane.own_model else ODD_BUDGET
        with engine.without_cache(odd if facts["alignment"] % facts["chunk"] else 0):
            result.answers_again[name] = engine.ask([question for wave in waves for question in wave])
    if name == RESEND and job.lane.block_copy:
        result.from_cache = engine.ask(*waves)


def count_passes(engine: LaneEngine, ids: range) -> list[FirstTokens]:
    """Prompts asked one at a time, cold and warm, shorter and longer than a block."""
    prompts, block, counted = Prompts(1, ids), engine.lengths["block"], []
    for shared in (block // 2, 2 * block):
        prefix, own = prompts.tokens(shared), block // 4
        for case in (COLD, WARM) if shared + own <= engine.longest else ():
            hints = [shared // 2, shared, shared + own - 1]
            counted.append(_timed(engine, case, shared + own, [[*prefix, *prompts.tokens(own)]], hints))
    return counted


def time_cold(engine: LaneEngine, length: int, ids: range) -> list[FirstTokens]:
    """Cold prompts with no, one and more states in turn, so that a machine that slows down slows all."""
    prompts = Prompts(length, ids)
    wanted = STATES if engine.checkpoints is not None else STATES[:1]
    hints = [[length * part // (count + 1) for part in range(1, count + 1)] for count in wanted]
    with engine.writing_hinted_states():
        rounds = [
            [_timed(engine, COLD, length, [prompts.tokens(length)], each) for each in hints] for _ in range(1 + REPEATS)
        ]
    return [_median(of_count) for of_count in zip(*rounds, strict=True)]


def time_shared(engine: LaneEngine, shared: int, ids: range, as_usual: bool) -> list[FirstTokens]:
    """Prompts behind a prefix that is known, and several at once behind one that is not.

    `as_usual`: as the plugin decides by the pace. No prefix of a tiny model is worth a state.
    """
    prompts, found = Prompts(shared + 1, ids), []
    known = prompts.tokens(shared)
    with engine.serving_as_usual() if as_usual else contextlib.nullcontext():
        _timed(engine, COLD, shared, [[*known, *prompts.tokens(OWN_TOKENS)]], [shared])
        for case, count in ((WARM, 1), (FAN_OUT, FAN)):
            rounds = []
            for _ in range(1 + (REPEATS if shared <= LONG else 1)):
                prefix = known if case == WARM else prompts.tokens(shared)
                asked = [[*prefix, *prompts.tokens(OWN_TOKENS)] for _ in range(count)]
                rounds.append(_timed(engine, case, shared, asked, [shared]))
            found.append(_median(rounds))
    return found


def _timed(
    engine: LaneEngine, case: str, tokens: int, prompts: Sequence[list[int]], hints: list[int], new_tokens: int = 1
) -> FirstTokens:
    passes, states, began = engine.passes, engine.states, time.perf_counter()
    answers = engine.ask([Question(case, prompt, hints, None) for prompt in prompts], new_tokens=new_tokens)
    seconds, cached = time.perf_counter() - began, sum(answer.cached for answer in answers)
    return FirstTokens(case, tokens, len(hints), seconds, cached, engine.passes - passes, engine.states - states)


def _median(rounds: Sequence[FirstTokens]) -> FirstTokens:
    # Kernels are compiled and tuned at their first use.
    return rounds[-1]._replace(seconds=statistics.median(each.seconds for each in rounds[1:]))


def measure_pace(engine: LaneEngine, ids: range) -> dict[str, float]:
    """What decoding a token takes, and what the plugin learnt of this engine's steps."""
    prompts, took, learnt = Prompts(4, ids), [], engine.learnt
    for _ in range(1 + REPEATS):
        one, more = (_timed(engine, "", 16, [prompts.tokens(16)], [], count).seconds for count in (1, DECODED + 1))
        took.append((more - one) / DECODED)
    return {"decode": statistics.median(took[1:]), "floor": learnt.floor_seconds, "token": learnt.token_seconds}


def main(argv: list[str]) -> int:
    asked = pickle.loads(Path(argv[0]).read_bytes())
    target = Path(argv[1])

    def save(result: LaneResult) -> None:
        unfinished = target.with_suffix(".new")
        unfinished.write_bytes(pickle.dumps(result))
        unfinished.replace(target)

    run(asked, save)
    return 0


if __name__ == "__main__":
    # Under its own name, so that what is pickled here can be read elsewhere.
    from engine_patches.gpu_check import job

    sys.exit(job.main(sys.argv[1:]))
