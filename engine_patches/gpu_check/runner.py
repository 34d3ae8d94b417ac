"""Runs the lanes of `seamark gpu-check`: which engines answer in turn, and what each of them is held to."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from engine_patches.gpu_check import judge
from engine_patches.gpu_check.job import LaneJob, LaneResult
from engine_patches.gpu_check.judge import LEFT_OUT, NOT_RUN, OK, STRICT, WRONG, Check, JudgeRule
from engine_patches.gpu_check.lanes import Lane
from engine_patches.gpu_check.processes import ProcessEnd
from engine_patches.gpu_check.questions import EXACT, RESEND, SHARED_LENGTHS, Question, length_section
from engine_patches.settings import DRAFTS, FULL, OFF, REFERENCE

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

ODD_BUDGET = 250  # tokens, no multiple of any chunk

OWN_ODD_BUDGET = 1000  # the same for long prompts, which would take too many steps of 250

# Enough to see whether an engine answers at all: one prompt twice, so that it may resume.
BRIEF = {EXACT: [[Question("brief", range(100, 900), [], None)]] * 2}


class Starts(Protocol):
    """What starts an engine and waits for its end."""

    def run(self, name: str, job: LaneJob, mode: str, changes: Mapping[str, str] = ..., /) -> ProcessEnd: ...


class Truth(NamedTuple):
    """What other engines of the same model are held to."""

    patched: LaneResult
    reference: LaneResult
    rule: JudgeRule


class _LaneEnd(Exception):
    """A lane cannot go on."""

    def __init__(self, check: Check) -> None:
        super().__init__(check.says)
        self.check = check


class Runner:
    """Runs lanes one by one, and keeps the answers that later ones are held to."""

    def __init__(self, engines: Starts) -> None:
        self._engines = engines
        self._truths: dict[str, Truth] = {}  # by the lane's name

    def run(self, lane: Lane, model: Path | str) -> Iterator[Check]:
        """All checks of one lane, each as soon as it is known."""
        try:
            yield from self._checks(lane, model)
        except _LaneEnd as end:
            yield end.check

    def _checks(self, lane: Lane, model: Path | str) -> Iterator[Check]:
        if lane.wants_gpu:
            raise _not_run(lane, "its kernels are for a GPU alone")
        job = lane.job(model, True)._replace(passes=True, timed=lane.timed)
        if lane.own_model and lane.drafts is not None:
            job = job._replace(oracle={})  # a head that has learnt speaks for itself
        patched, truth = yield from self._asked(lane, model, job)
        mine, reference = truth.patched, truth.reference
        name = "vLLM alone, its crash cured" if lane.on_cpu else "vLLM alone"
        if lane.drafts is not None:
            mine, drafting = yield from self._drafts(lane, model, job, truth)
            passes, alone = {"Seamark": mine, name: drafting}, ProcessEnd(drafting)
        else:
            yield from judge.answers(lane.name, mine, reference, truth.rule, lane.own_model)
            alone = self._alone(lane, "alone", job._replace(sections={})) if lane.timed else ProcessEnd(None)
            passes = {"Seamark": mine, "without a cache": reference}
            passes |= {} if alone.result is None else {name: alone.result}
        if mine.passes or not (patched.fault or lane.own_model):
            yield judge.passes(lane.name, passes)
        if lane.timed:
            yield _speed(lane, mine, alone, name)
        if lane.block_copy:
            yield self._block_copy(lane, model, truth)
        if lane.own_model:
            yield from _left_out(lane, mine)
        if patched.fault:
            yield _unfinished(f"all of it, {lane.name}", patched, NOT_RUN)

    def _asked(self, lane: Lane, model: Path | str, job: LaneJob) -> Generator[Check, None, tuple[ProcessEnd, Truth]]:
        """The end of the engine with the patches, and what it is held to."""
        changes = {} if lane.drafts is None else {DRAFTS: "1"}
        base, runner = lane._replace(other_runner=False).name, ""
        known = self._truths.get(base) if lane.other_runner else None
        if lane.other_runner:
            if known is None:
                raise _not_run(lane, f"there are no answers to compare with: {base} did not finish")
            runner = "V1" if known.patched.facts["runner"] == "V2" else "V2"
            job = job._replace(sections=known.patched.sections)
            changes |= {RUNNER_VARIABLE: str(int(runner == "V2"))}
        patched = self._engines.run(f"{lane.name} patched", job, FULL, changes)
        mine = patched.result
        if mine is not None:
            yield judge.environment(lane.name, mine.facts, lane.own_model)
            if unfit := _unfit(lane, mine.facts, runner):
                raise _not_run(lane, unfit)
        if mine is None or not _answered(lane, mine) or (patched.fault and not patched.from_outside):
            raise self._fault_of(lane, model, patched, changes)
        if known is not None:
            return patched, known._replace(patched=mine)
        truth = self._truths[lane.name] = self._reference(lane, model, mine)
        return patched, truth

    def _reference(self, lane: Lane, model: Path | str, mine: LaneResult) -> Truth:
        """The engine without a cache and drafts, asked what `mine` answered; twice, where kernels round."""
        strict = lane.on_cpu and mine.facts["dtype"] == "torch.float32"
        inside_chunks = mine.facts["alignment"] % mine.facts["chunk"] != 0
        odd = OWN_ODD_BUDGET if lane.own_model else ODD_BUDGET
        job = lane.job(model, False, drafting=False)._replace(
            sections={name: waves for name, waves in mine.sections.items() if name in mine.answers},
            passes=True,
            again=not strict,
            again_budget=odd if inside_chunks else None,
        )
        outcome = self._engines.run(f"{lane.name} reference", job, REFERENCE)
        reference = _finished(judge.EXACTNESS + lane.name, outcome, NOT_RUN, "the reference engine")
        return Truth(mine, reference, STRICT if strict else judge.rule_from(reference))

    def _alone(self, lane: Lane, name: str, job: LaneJob, changes: Mapping[str, str] = {}) -> ProcessEnd:
        """vLLM alone; on a CPU it dies of a prompt longer than a block unless that is cured."""
        return self._engines.run(f"{lane.name} {name}", job, REFERENCE if lane.on_cpu else OFF, changes)

    def _fault_of(self, lane: Lane, model: Path | str, patched: ProcessEnd, changes: Mapping[str, str]) -> _LaneEnd:
        """The engine with the patches did not finish: does vLLM alone run and cache here at all?"""
        if patched.from_outside:
            return _LaneEnd(_unfinished(judge.EXACTNESS + lane.name, patched, NOT_RUN))
        alone = self._alone(lane, "alone, brief", lane.job(model, True)._replace(sections=BRIEF), changes)
        if alone.result is None or alone.fault:
            seen = "was not seen to run" if alone.from_outside else "does not run"
            says = f"vLLM alone {seen} here like this: {alone.fault}; with the patches: {patched.fault}"
            return _not_run(lane, says)
        who = "vLLM alone runs here, but the engine with the patches"
        return _LaneEnd(_unfinished(judge.EXACTNESS + lane.name, patched, WRONG, who))

    def _drafts(
        self, lane: Lane, model: Path | str, job: LaneJob, truth: Truth
    ) -> Generator[Check, None, tuple[LaneResult, LaneResult]]:
        """First vLLM alone with drafts beside vLLM without; then Seamark beside vLLM alone with drafts: these two.

        Tiny models draft at random, so an oracle, which knows the answers without drafts, speaks for their heads.
        """
        oracle = {} if lane.own_model else _right(truth)
        asked = {name: truth.patched.sections[name] for name in truth.reference.answers}
        runner = {RUNNER_VARIABLE: str(int(truth.patched.facts["runner"] == "V2"))} if lane.other_runner else {}
        job = job._replace(sections=asked, oracle=oracle)
        uncached = lane.job(model, False)._replace(sections=asked, oracle=oracle)
        alone: list[LaneResult] = []
        vllm_is_right = True
        for which in ("cache off", "cache on"):
            name = f"{judge.DRAFTS_ALONE}{which}, {lane.name}"
            outcome = self._alone(lane, f"alone, {which}", job if alone else uncached, runner)
            alone.append(_finished(name, outcome, NOT_RUN, "vLLM alone with drafts"))
            check = judge.drafts_alone(name, alone[-1], truth.reference, truth.rule)
            vllm_is_right &= check.verdict == OK
            yield check
            if truth.rule is STRICT:  # where kernels round, a random head proposes something else now and then
                job = job._replace(
                    cold={place: own for each in alone[0].proposed.values() for place, own in each.items()}
                )
        mine, judged = truth.patched, {}
        if oracle:
            again = self._engines.run(f"{lane.name} patched, oracle", job, FULL, {DRAFTS: "1", **runner})
            mine = _finished(judge.EXACTNESS + lane.name, again, WRONG)
            judged = {f"{lane.name}, the head's own drafts": truth.patched}
        for named, result in ({lane.name: mine} | judged).items():
            for check in judge.answers(named, result, alone[0], truth.rule, lane.own_model):
                yield check if vllm_is_right else judge.not_ours(check)
        yield judge.acceptance(lane.name, mine, alone[0], alone[1], truth.rule, lane.own_model)
        yield from judge.rows_of_heads(lane.name, mine, alone[0], lane.own_model)
        return mine, alone[1]

    def _block_copy(self, lane: Lane, model: Path | str, truth: Truth) -> Check:
        job = lane.job(model, True)
        job = job._replace(
            arguments={**job.arguments, "prefix_match_unit": 16}, sections={RESEND: truth.patched.sections[RESEND]}
        )
        name = judge.BLOCK_COPY + lane.name
        untouched = _finished(name, self._engines.run(f"{lane.name} block copy", job, OFF), NOT_RUN, "vLLM alone")
        return judge.block_copy(name, untouched, truth.patched, truth.reference, truth.rule)


def _answered(lane: Lane, result: LaneResult) -> bool:
    first = length_section(SHARED_LENGTHS[0]) if lane.own_model else EXACT
    return first in result.answers and (lane.own_model or result.answers.keys() == result.sections.keys())


def _unfit(lane: Lane, facts: Mapping[str, Any], runner: str) -> str | None:
    """Why this engine is not what the lane is for, if it is not; `runner`: the model runner it was to have."""
    drafting = lane.drafts is not None
    graphs = not (lane.on_cpu or lane.own_model or lane.eager)
    table = (
        (not facts["recurrent"], "the model has no recurrent layers: vLLM caches its prefixes by itself"),
        (runner not in ("", facts["runner"]), f"vLLM ran model runner {facts['runner']} instead"),
        (graphs and facts["graphs"] == "NONE", "vLLM ran without CUDA graphs, which this lane is for"),
        (
            facts["drafts"] and not drafting,
            "this is speculative decoding: check the model without it, and with --speculative-config",
        ),
        (drafting and not facts["drafts"], "vLLM drafts no tokens with this configuration"),
        (drafting and facts["hints_refused"], f"hints are refused beside these drafts: {facts['hints_refused']}"),
    )
    return next((says for applies, says in table if applies), None)


def _right(truth: Truth) -> dict[tuple[int, ...], Sequence[int]]:
    """What follows each prompt, by an engine without drafts."""
    return {
        tuple(question.tokens): answer.tokens
        for name, answers in truth.reference.answers.items()
        for question, answer in zip((q for wave in truth.patched.sections[name] for q in wave), answers, strict=True)
    }


def _speed(lane: Lane, mine: LaneResult, alone: ProcessEnd, name: str) -> Check:
    if alone.result is None or not alone.result.first_tokens:
        return _unfinished(judge.SPEED + lane.name, alone, NOT_RUN, "vLLM alone")
    if not mine.first_tokens:
        return Check(judge.SPEED + lane.name, NOT_RUN, "no time was left to measure it (more with --minutes)")
    return judge.speed(lane.name, mine, alone.result, name)


def _left_out(lane: Lane, mine: LaneResult) -> Iterator[Check]:
    """Which shared lengths were not checked, and why; too long for the model is no fault."""
    timed = {each.shared for each in mine.first_tokens}
    for shared in SHARED_LENGTHS:
        section = length_section(shared)
        missing = "not timed" if section in mine.answers else "neither compared nor timed"
        if section in mine.answers and (shared in timed or not lane.timed):
            continue
        verdict, says = NOT_RUN, f"{missing}: no time was left (more with --minutes)"
        if shared + 64 > mine.facts["longest"] - 32:
            verdict, says = LEFT_OUT, f"the model's length is {mine.facts['longest']:,} tokens"
        elif lane.few and section not in mine.sections:
            verdict, says = LEFT_OUT, "by --quick"
        yield Check(f"{shared:,} shared tokens, {lane.name}", verdict, says)


def _not_run(lane: Lane, says: str) -> _LaneEnd:
    return _LaneEnd(Check(judge.EXACTNESS + lane.name, NOT_RUN, says))


def _finished(name: str, outcome: ProcessEnd, verdict: str, who: str = "the engine with the patches") -> LaneResult:
    """The result of an engine that the lane cannot do without."""
    if outcome.result is None or outcome.fault:
        raise _LaneEnd(_unfinished(name, outcome, verdict, who))
    return outcome.result


def _unfinished(name: str, outcome: ProcessEnd, verdict: str, who: str = "the engine with the patches") -> Check:
    return Check(
        name,
        NOT_RUN if outcome.from_outside else verdict,
        f"{who} did not finish: {outcome.fault or 'it kept no states to ask for'}",
    )
