"""The lanes of `seamark gpu-check`: one model in one configuration each, the most valuable first.

Several engines answer a lane in turn: with the patches, the reference without any cache, and beside them vLLM alone. A
lane with the other model runner, which vLLM has but does not choose, is held to the reference of the lane before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine_patches.gpu_check.draft_verdicts import DRAFTS_CHECK, judge_acceptance, judge_alone, not_ours
from engine_patches.gpu_check.job import Job, Result
from engine_patches.gpu_check.processes import Outcome
from engine_patches.gpu_check.questions import EXACT, PARALLEL, RESEND, SHARED_LENGTHS, Question, length_section
from engine_patches.gpu_check.verdicts import (
    BLOCK_COPY,
    EXACTNESS,
    LEFT_OUT,
    NOT_RUN,
    OK,
    SPEED,
    STRICT,
    WRONG,
    Check,
    Rule,
    judge_answers,
    judge_block_copy,
    judge_environment,
    judge_passes,
    judge_speed,
    rule_from,
)
from engine_patches.settings import DRAFTS, FULL, OFF, REFERENCE

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

MAX_LENGTH = 4096  # tokens of a prompt and its answer

BUDGET = 2048  # tokens that an engine with a cache computes in a step

ODD_BUDGET = 250  # tokens, no multiple of any chunk

OWN_ODD_BUDGET = 1000  # the same for long prompts, which would take too many steps of 250

MTP = '{"method": "mtp", "num_speculative_tokens": %d}'

NUMBERS_OF_DRAFTS = (3, 1, 5)  # the usual one first

# Enough to see whether an engine answers at all: one prompt twice, so that it may resume.
BRIEF = {EXACT: [[Question("brief", range(100, 900), [], None)]] * 2}

NEMOTRON, QWEN = "nemotron_h", "qwen3_next"

# Small enough to find room beside a server that is running on the same GPU.
ARGUMENTS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "max_model_len": MAX_LENGTH,
    "max_num_seqs": 16,
    # Room for all that is asked at once: without a cache nothing keeps a step's end on a chunk's end, so that the
    # reference must not cut a prompt. The same for all engines, so that they share what is compiled.
    "max_num_batched_tokens": PARALLEL * MAX_LENGTH,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.03,
    "mamba_ssm_cache_dtype": "float32",
}


class Lane(NamedTuple):
    """One model in one configuration, and the engines that answer it besides the patched one and the reference."""

    family: str  # of the tiny model; for a user's own, its name
    dtype: str | None = None  # None: as the flags say
    eager: bool = False
    strict: bool = False  # float32 kernels that compute every token alike, however a prompt is cut
    other_runner: bool = False  # the model runner that vLLM does not choose by itself
    timed: bool = False  # speed beside vLLM alone; such lanes have the machine to themselves
    block_copy: bool = False  # ask vLLM alone whether its copy of a partial block loses something here
    few: bool = False  # fewer cases
    attention: str | None = None  # backend
    gdn_prefill: str | None = None  # backend
    on_cpu: bool = False
    own_model: bool = False
    drafts: str | None = None  # JSON of vLLM's --speculative-config
    flags: Sequence[str] = ()  # of vLLM

    @property
    def name(self) -> str:
        """The lane's name in the report."""
        mode = "eager" if self.eager else "compiled"
        name = " ".join(filter(None, [self.family, self.dtype, None if self.own_model or self.on_cpu else mode]))
        if self.other_runner:
            name += ", other model runner"
        if self.attention:
            name += f", attention {self.attention}"
        if self.drafts is not None:
            drafts = json.loads(self.drafts)
            name += f", drafts ({drafts.get('method', '?')}, {drafts.get('num_speculative_tokens', '?')})"
        if self.gdn_prefill:
            name += f", GDN prefill {self.gdn_prefill}"
        return name

    @property
    def base(self) -> Lane:
        """The lane whose questions and reference answers this one uses."""
        return self._replace(other_runner=False)

    def job(self, model: Path | str, prefix_caching: bool, drafting: bool = True, **more: Any) -> Job:
        """What an engine of this lane does, as far as all of them do the same."""
        own: dict[str, Any] = {"model": str(model), "enable_prefix_caching": prefix_caching, **more}
        if self.drafts is not None and drafting:
            own["speculative_config"] = json.loads(self.drafts)
        if self.own_model:
            return Job(own, self.flags, own_model=True, quick=self.few)
        if self.attention:
            own["attention_backend"] = self.attention
        if self.gdn_prefill:
            own["gdn_prefill_backend"] = self.gdn_prefill
        arguments = {**ARGUMENTS, "dtype": self.dtype, "enforce_eager": self.eager, **own}
        return Job(arguments, self.flags, quick=self.few, budget=BUDGET if prefix_caching else None)


def lanes_of(device: str, quick: bool, attention: str | None = None) -> list[Lane]:
    """The lanes with tiny models on `cpu` or `cuda`, the most valuable first."""
    if device == "cpu":
        mamba = Lane(
            NEMOTRON, "float32", eager=True, strict=True, timed=True, block_copy=not quick, few=quick, on_cpu=True
        )
        delta = Lane(QWEN, "bfloat16", eager=True, few=True, on_cpu=True)
        drafts = mamba._replace(timed=False, block_copy=False, few=True, drafts=MTP % NUMBERS_OF_DRAFTS[0])
        return [mamba] if quick else [mamba, delta, drafts]
    # As users run them: half precision, compiled, with CUDA graphs, model runner and kernels by vLLM's own choice.
    mamba = Lane(NEMOTRON, "bfloat16", timed=True, few=quick)
    delta = Lane(QWEN, "bfloat16", timed=True, few=quick, attention=attention)
    if quick:
        return [mamba, delta]
    others = [] if attention else [Lane(QWEN, "bfloat16", attention=each) for each in ("FLASHINFER", "TRITON_ATTN")]
    return [
        mamba,
        delta,
        mamba._replace(other_runner=True, timed=False),
        delta._replace(other_runner=True, timed=False),
        mamba._replace(eager=True, timed=False, block_copy=True),
        delta._replace(eager=True, timed=False, block_copy=True),
        Lane(NEMOTRON, "float32", eager=True),
        *others,
        delta._replace(timed=False, gdn_prefill="triton"),
        *(
            lane._replace(few=True, timed=usual, eager=not usual, drafts=MTP % number)
            for number in NUMBERS_OF_DRAFTS
            for usual in (number == NUMBERS_OF_DRAFTS[0],)
            for lane in (mamba, delta)
        ),
    ]


class Starts(Protocol):
    """What starts an engine and waits for its end."""

    def run(self, name: str, job: Job, mode: str, changes: Mapping[str, str] = ..., /) -> Outcome: ...


class Truth(NamedTuple):
    """What other engines of the same model are held to."""

    patched: Result
    reference: Result
    rule: Rule


class Runner:
    """Runs lanes; usable from several threads, once the lanes that others are held to have run."""

    def __init__(self, engines: Starts) -> None:
        self._engines = engines
        self._truths: dict[tuple[Any, ...], Truth] = {}

    def run(self, lane: Lane, model: Path | str) -> Iterator[Check]:
        """All checks of one lane, each as soon as it is known."""
        if lane.other_runner:
            yield from self._other_runner(lane, model)
            return
        if lane.drafts is not None:
            yield from self._drafts(lane, model)
            return
        caching = lane.job(model, True)
        patched = self._engines.run(f"{lane.name} patched", caching._replace(passes=True, timed=lane.timed), FULL)
        mine = patched.result
        uncached = lane.job(model, False)
        if mine is None:
            yield self._never_came_up(lane, patched, uncached._replace(sections={}))
            return
        yield judge_environment(lane.name, mine.facts, lane.own_model)
        unfit = _unfit(lane, mine.facts)
        if unfit is not None:
            yield unfit
            return
        if not _answered(lane, mine) or (patched.fault and not patched.from_outside):
            yield _unfinished(EXACTNESS + lane.name, patched, WRONG)
            return
        yield from self._against_reference(lane, mine, uncached)
        truth = self._truths.get(_key(lane))
        passes = {"Seamark": mine} | ({"without a cache": truth.reference} if truth else {})
        if lane.timed:
            alone, name = self._alone(lane, model)
            if alone.result is not None:
                passes[name] = alone.result
            yield _speed(lane, mine, alone, name)
        if mine.passes:
            yield judge_passes(lane.name, passes)
        if lane.block_copy and truth is not None:
            yield self._block_copy(lane, model, truth)
        if lane.own_model:
            yield from _left_out(lane, mine)
        if patched.fault:
            yield _unfinished(f"all of it, {lane.name}", patched, NOT_RUN)

    def _never_came_up(self, lane: Lane, patched: Outcome, uncached: Job) -> Check:
        name = EXACTNESS + lane.name
        if patched.from_outside:
            return _unfinished(name, patched, NOT_RUN)
        alive = self._engines.run(f"{lane.name} reference", uncached, REFERENCE)
        if alive.result is not None:
            return Check(name, WRONG, f"the engine starts without the patches, but not with them: {patched.fault}")
        if alive.from_outside:
            says = f"the engine does not start: {patched.fault}; without the patches it was not seen: {alive.fault}"
            return Check(name, NOT_RUN, says)
        return Check(name, NOT_RUN, f"vLLM does not run this model here, with or without patches: {patched.fault}")

    def _against_reference(self, lane: Lane, mine: Result, uncached: Job) -> list[Check]:
        asked = {name: waves for name, waves in mine.sections.items() if name in mine.answers}
        odd = OWN_ODD_BUDGET if lane.own_model else ODD_BUDGET
        inside_chunks = mine.facts["alignment"] % mine.facts["chunk"] != 0
        strict = lane.strict or (lane.on_cpu and mine.facts["dtype"] == "torch.float32")
        again_budget = odd if inside_chunks else None
        job = uncached._replace(sections=asked, passes=True, again=not strict, again_budget=again_budget)
        reference = self._engines.run(f"{lane.name} reference", job, REFERENCE)
        truth = reference.result
        if truth is None or reference.fault:
            return [_unfinished(EXACTNESS + lane.name, reference, NOT_RUN, "the reference engine")]
        rule = STRICT if strict else rule_from(truth)
        self._truths[_key(lane)] = Truth(mine, truth, rule)
        return judge_answers(lane.name, mine, truth, rule, own_model=lane.own_model)

    def _other_runner(self, lane: Lane, model: Path | str) -> Iterator[Check]:
        name = EXACTNESS + lane.name
        truth = self._truths.get(_key(lane.base))
        if truth is None:
            yield Check(name, NOT_RUN, f"there are no answers to compare with: {lane.base.name} did not finish")
            return
        runner = "V1" if truth.patched.facts["runner"] == "V2" else "V2"
        job = lane.job(model, True)._replace(sections=truth.patched.sections, passes=True)
        outcome = self._engines.run(f"{lane.name} patched", job, FULL, {RUNNER_VARIABLE: str(int(runner == "V2"))})
        result = outcome.result
        if result is None:
            yield _unfinished(name, outcome, NOT_RUN, f"model runner {runner}")
            return
        yield judge_environment(lane.name, result.facts)
        if result.facts["runner"] != runner:
            yield Check(name, NOT_RUN, f"vLLM ran model runner {result.facts['runner']} instead")
        elif outcome.fault:
            yield _unfinished(name, outcome, WRONG)
        else:
            yield from judge_answers(lane.name, result, truth.reference, truth.rule)
            yield judge_passes(lane.name, {"Seamark": result})

    def _drafts(self, lane: Lane, model: Path | str) -> Iterator[Check]:
        """First vLLM alone with drafts beside vLLM alone without; then Seamark beside vLLM alone with drafts.

        An engine with the patches makes the questions. Tiny models draft at random, so an oracle, which knows the
        answers without drafts, speaks for their heads in all engines after that.
        """
        name = EXACTNESS + lane.name
        caching = lane.job(model, True)._replace(passes=True, timed=lane.timed)
        patched = self._engines.run(f"{lane.name} patched", caching, FULL, {DRAFTS: "1"})
        mine = patched.result
        if mine is None:
            yield self._no_drafts_here(lane, model, patched)
            return
        yield judge_environment(lane.name, mine.facts, lane.own_model)
        unfit = _unfit_for_drafts(lane, mine.facts)
        if unfit is not None:
            yield unfit
            return
        if patched.fault or not _answered(lane, mine):
            yield self._no_drafts_here(lane, model, patched)
            return
        asked = {section: waves for section, waves in mine.sections.items() if section in mine.answers}
        strict = lane.strict or (lane.on_cpu and mine.facts["dtype"] == "torch.float32")
        uncached = lane.job(model, False, drafting=False)._replace(sections=asked, again=not strict)
        without = self._engines.run(f"{lane.name} reference", uncached, REFERENCE)
        truth = without.result
        if truth is None or without.fault:
            yield _unfinished(name, without, NOT_RUN, "the engine without drafts")
            return
        rule = STRICT if strict else rule_from(truth)
        right = None if lane.own_model else _right(truth)
        asking = mine
        alone: dict[bool, Result] = {}
        vllm_is_right = True
        for cache, which in ((False, "cache off"), (True, "cache on")):
            job = lane.job(model, cache)._replace(
                sections=asked, passes=cache, timed=cache and lane.timed, oracle=right
            )
            outcome = self._engines.run(f"{lane.name} alone, {which}", job, _vllm_alone(lane))
            if outcome.result is None or outcome.fault:
                yield _unfinished(f"{DRAFTS_CHECK}{which}, {lane.name}", outcome, NOT_RUN, "vLLM alone with drafts")
                return
            alone[cache] = outcome.result
            check = judge_alone(lane.name, which, outcome.result, truth, rule)
            vllm_is_right &= check.verdict == OK
            yield check
        if right is not None:
            job = caching._replace(sections=asked, oracle=right)
            patched = self._engines.run(f"{lane.name} patched, oracle", job, FULL, {DRAFTS: "1"})
            if patched.result is None or patched.fault:
                yield _unfinished(name, patched, WRONG)
                return
            mine = patched.result
        judged = {lane.name: mine} | ({} if lane.own_model else {f"{lane.name}, the head's own drafts": asking})
        for named, result in judged.items():
            for check in judge_answers(named, result, alone[False], rule, own_model=lane.own_model):
                yield check if vllm_is_right else not_ours(check)
        yield judge_acceptance(lane.name, mine, alone[False], alone[True], lane.own_model)
        yield judge_passes(lane.name, {"Seamark": mine, "vLLM alone": alone[True]})
        if lane.timed:
            yield _speed(lane, mine, Outcome(alone[True]), "vLLM alone")
        if lane.own_model:
            yield from _left_out(lane, mine)

    def _no_drafts_here(self, lane: Lane, model: Path | str, patched: Outcome) -> Check:
        """The engine with the patches did not finish: does vLLM alone draft and cache here at all?"""
        name = EXACTNESS + lane.name
        if patched.from_outside:
            return _unfinished(name, patched, NOT_RUN)
        job = lane.job(model, True)._replace(sections=BRIEF)
        alone = self._engines.run(f"{lane.name} alone, brief", job, _vllm_alone(lane))
        if alone.result is None or alone.fault:
            says = f"vLLM alone does not run this model with drafts and its prefix cache here: {alone.fault}"
            return Check(name, NOT_RUN, says)
        return _unfinished(name, patched, WRONG)

    def _alone(self, lane: Lane, model: Path | str) -> tuple[Outcome, str]:
        """vLLM alone with its own defaults; on a CPU it dies of a prompt longer than a block unless that is cured."""
        job = lane.job(model, True)._replace(sections={}, passes=True, timed=True)
        mode, name = (REFERENCE, "vLLM alone, its crash cured") if lane.on_cpu else (OFF, "vLLM alone")
        return self._engines.run(f"{lane.name} alone", job, mode), name

    def _block_copy(self, lane: Lane, model: Path | str, truth: Truth) -> Check:
        sections = {RESEND: truth.patched.sections[RESEND]}
        job = lane.job(model, True, prefix_match_unit=16)._replace(sections=sections)
        untouched = self._engines.run(f"{lane.name} block copy", job, OFF)
        if untouched.result is None or untouched.fault:
            return _unfinished(BLOCK_COPY + lane.name, untouched, NOT_RUN, "vLLM alone")
        return judge_block_copy(lane.name, untouched.result, truth.patched, truth.reference, truth.rule)


def _key(lane: Lane) -> tuple[Any, ...]:
    """Lanes of one key have the same questions and the same reference."""
    return lane.family, lane.dtype, lane.eager, lane.attention, lane.gdn_prefill


def _answered(lane: Lane, result: Result) -> bool:
    first = length_section(SHARED_LENGTHS[0]) if lane.own_model else EXACT
    return first in result.answers and (lane.own_model or result.answers.keys() == result.sections.keys())


def _unfit(lane: Lane, facts: Mapping[str, Any]) -> Check | None:
    """Why this engine is not what the lane is for, if it is not."""
    name = EXACTNESS + lane.name
    ran = [*facts["backends"], *facts["gdn_prefill"]]
    missed = [wanted for wanted in (lane.attention, lane.gdn_prefill) if wanted and wanted not in ran]
    if missed:
        return Check(name, NOT_RUN, f"vLLM ran {', '.join(ran)} instead of {', '.join(missed)}")
    if not (lane.on_cpu or lane.own_model or lane.eager) and facts["graphs"] == "NONE":
        return Check(name, NOT_RUN, "vLLM ran without CUDA graphs, which this lane is for")
    if not facts["recurrent"]:
        return Check(name, NOT_RUN, "the model has no recurrent layers: vLLM caches its prefixes by itself")
    if facts["drafts"]:
        return Check(
            name, NOT_RUN, "this is speculative decoding: check the model without it, and with --speculative-config"
        )
    return None


def _vllm_alone(lane: Lane) -> str:
    """The plugin's mode for vLLM alone; on a CPU it dies of a prompt longer than a block unless that is cured."""
    return REFERENCE if lane.on_cpu else OFF


def _right(truth: Result) -> dict[tuple[int, ...], Sequence[int]]:
    """What follows each prompt, by an engine without drafts."""
    return {
        tuple(question.tokens): answer.tokens
        for name, waves in truth.sections.items()
        for question, answer in zip((q for wave in waves for q in wave), truth.answers[name], strict=True)
    }


def _unfit_for_drafts(lane: Lane, facts: Mapping[str, Any]) -> Check | None:
    """Why this engine shows nothing about hints beside drafts, if it does not."""
    name = EXACTNESS + lane.name
    if not facts["recurrent"]:
        return Check(name, NOT_RUN, "the model has no recurrent layers: vLLM caches its prefixes by itself")
    if not facts["drafts"]:
        return Check(name, NOT_RUN, "vLLM drafts no tokens with this configuration")
    if facts["hints_refused"]:
        return Check(name, NOT_RUN, f"hints are refused beside these drafts: {facts['hints_refused']}")
    return None


def _speed(lane: Lane, mine: Result, alone: Outcome, name: str) -> Check:
    theirs = alone.result
    if theirs is None or not theirs.first_tokens:
        return _unfinished(SPEED + lane.name, alone, NOT_RUN, "vLLM alone")
    if not mine.first_tokens:
        return Check(SPEED + lane.name, NOT_RUN, "no time was left to measure it (more with --minutes)")
    return judge_speed(lane.name, mine, theirs, name)


def _left_out(lane: Lane, mine: Result) -> list[Check]:
    """Which shared lengths were not checked, and why; too long for the model is no fault."""
    wanted = SHARED_LENGTHS
    answered = [shared for shared in wanted if length_section(shared) in mine.answers]
    timed = {each.shared for each in mine.first_tokens}
    checks = []
    for shared in wanted:
        if shared in answered and (shared in timed or not lane.timed):
            continue
        name = f"{shared:,} shared tokens, {lane.name}"
        if shared + 64 > mine.facts["longest"] - 32:
            checks.append(Check(name, LEFT_OUT, f"the model's length is {mine.facts['longest']:,} tokens"))
        elif lane.few and length_section(shared) not in mine.sections:
            checks.append(Check(name, LEFT_OUT, "by --quick"))
        else:
            missing = "not timed" if shared in answered else "neither compared nor timed"
            checks.append(Check(name, NOT_RUN, f"{missing}: no time was left (more with --minutes)"))
    return checks


def _unfinished(name: str, outcome: Outcome, verdict: str, who: str = "the engine with the patches") -> Check:
    return Check(
        name,
        NOT_RUN if outcome.from_outside else verdict,
        f"{who} did not finish: {outcome.fault or 'it kept no states to ask for'}",
    )
