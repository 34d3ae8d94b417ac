"""What one engine of `seamark gpu-check` is asked to do, and what it hands back.

`python -m engine_patches.gpu_check.job JOB RESULT` (pickles). Each engine has a process of its own, because patches are
applied once per process and `SEAMARK_ENGINE` decides which.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.gpu_check.draft_oracle import Oracle, Proposed, Right
from engine_patches.gpu_check.engine import CheckedAnswer, LaneEngine, planted
from engine_patches.gpu_check.facts import facts_of
from engine_patches.gpu_check.questions import (
    DEFECTS,
    ROW_DEFECTS,
    SHARED_LENGTHS,
    TINY_IDS,
    QuestionWave,
    TokenRange,
    own_sections,
    sections,
)
from engine_patches.gpu_check.speed import (
    OWN_TOKENS,
    FirstTokens,
    LanePasses,
    MeasuredPace,
    count_passes,
    measure_pace,
    time_first_tokens,
    time_state,
)

ORACLE_IS_RIGHT = 0.7  # how often: with three drafts, each number of right ones from none to all occurs

REPEATS = 3  # of what is timed; the median counts

FEW_LENGTHS = 2  # the shared lengths that are timed when there are to be fewer cases

ORDINARY_TOKENS = 1000  # the first ids of many vocabularies are special tokens, the last ones too


class LaneJob(NamedTuple):
    """What one engine has to do."""

    arguments: Mapping[str, Any]  # of `vllm.LLM`
    flags: Sequence[str] = ()  # as for `vllm serve`; those of its server have no effect
    own_model: bool = False  # the user's, not a tiny one: its own token ids and shared lengths
    sections: Mapping[str, Sequence[QuestionWave]] | None = (
        None  # the questions; None: made for the engine's own geometry
    )
    quick: bool = False  # makes fewer of them
    budget: int | None = None  # tokens of a step; None: as many as vLLM was given room for
    again: bool = False  # answer everything a second time, in other batches
    again_budget: int | None = None  # the second time, tokens of a step: prompts are cut inside the kernels' chunks
    passes: bool = False  # count them
    timed: bool = False
    oracle: Right | None = None  # makes drafts right while questions are answered; empty: leaves them, and notes them
    cold: Proposed | None = None  # what the head proposes without a cache: elsewhere its drafts stay wrong


@dataclass
class LaneResult:
    """The result of a job, as far as it has come; written again whenever something was added."""

    facts: dict[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Sequence[QuestionWave]] = field(default_factory=dict)
    answers: dict[str, list[CheckedAnswer]] = field(default_factory=dict)  # by section, in the order of its questions
    answers_again: dict[str, list[CheckedAnswer]] = field(default_factory=dict)
    passes: list[LanePasses] = field(default_factory=list)
    first_tokens: list[FirstTokens] = field(default_factory=list)
    pace: MeasuredPace | None = None
    verified: dict[tuple[int, int], int] = field(default_factory=dict)  # rows by their drafts and the right ones
    # The head's own drafts, where an oracle spoke: by section and `draft_oracle.place_of`.
    proposed: dict[str, dict[int, list[int]]] = field(default_factory=dict)


def run(job: LaneJob, save: Callable[[LaneResult], None]) -> None:
    """Do the job; `save` is called after each part of it."""
    engine = LaneEngine(job.arguments, job.flags)
    if job.budget is not None:
        engine.scheduler.max_num_scheduled_tokens = job.budget
    result = LaneResult(facts=facts_of(engine))
    save(result)
    ids = _ordinary_ids(engine.config.model_config.get_vocab_size()) if job.own_model else TINY_IDS
    wanted = SHARED_LENGTHS[: FEW_LENGTHS if job.quick else None]
    lengths = [shared for shared in wanted if shared + 2 * OWN_TOKENS <= engine.longest]
    if job.sections is not None:
        result.sections = job.sections
    elif result.facts["patches_live"] and result.facts["recurrent"]:
        geometry = engine.geometry
        result.sections = own_sections(geometry, lengths, ids) if job.own_model else sections(geometry, job.quick)
    oracle = None if job.oracle is None else Oracle(job.oracle, ORACLE_IS_RIGHT, job.cold)
    with oracle.speaks(engine.runner, engine.scheduler.requests) if oracle else contextlib.nullcontext():
        for name, waves in result.sections.items():
            result.answers[name] = _ask_section(engine, name, waves)
            if name not in (*DEFECTS, *ROW_DEFECTS):
                for row, times in (row for answer in result.answers[name] for row in answer.verified.items()):
                    result.verified[row] = result.verified.get(row, 0) + times
            if oracle:
                result.proposed[name], oracle.proposed = oracle.proposed, {}
            save(result)
    if job.passes:
        result.passes = count_passes(engine, ids)
        save(result)
    if job.again:
        again_budget, usual = job.again_budget, engine.budget
        if again_budget is not None:
            engine.scheduler.max_num_scheduled_tokens = again_budget
        for name, waves in result.sections.items():
            result.answers_again[name] = engine.ask([question for wave in waves for question in wave])
            save(result)
        engine.scheduler.max_num_scheduled_tokens = usual
    if job.timed:
        state = time_state(engine, REPEATS, ids)
        if job.own_model:
            engine.serve_as_usual()
        for measured in time_first_tokens(engine, lengths, REPEATS, ids):
            result.first_tokens += measured
            save(result)
        result.pace = measure_pace(engine, REPEATS, ids, state)
    save(result)


def _ordinary_ids(vocabulary: int) -> TokenRange:
    return TokenRange(min(ORDINARY_TOKENS, vocabulary // 4), vocabulary // 2)


def _ask_section(engine: LaneEngine, name: str, waves: Sequence[QuestionWave]) -> list[CheckedAnswer]:
    answers: list[CheckedAnswer] = []
    for wave in waves:
        # Only an engine with checkpoints can resume from a wrong one; the reference answers as always.
        spoiled = name in (*DEFECTS, *ROW_DEFECTS) and wave is waves[-1] and engine.checkpoints is not None
        with planted(engine.scheduler, name) if spoiled else contextlib.nullcontext():
            answers += engine.ask(wave)
    return answers


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
