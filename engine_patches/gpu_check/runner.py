"""Runs the lanes of `seamark gpu-check`: vLLM alone first, then the engine with the patches, which is held to it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine_patches.gpu_check import judge
from engine_patches.gpu_check.job import COLD_LENGTHS, LaneResult
from engine_patches.gpu_check.judge import LEFT_OUT, NOT_RUN, WRONG, Check
from engine_patches.gpu_check.lanes import KERNELS, RUNNER, Lane
from engine_patches.gpu_check.processes import Engines
from engine_patches.gpu_check.questions import MORE, RESEND, SHARED_LENGTHS, length_section
from engine_patches.settings import DRAFTS, FULL, OFF, REFERENCE

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

FLASHINFER, TRITON = ["flashinfer"], ["triton"]


class _LaneEnd(Exception):
    """A lane cannot go on."""

    def __init__(self, verdict: str, says: str) -> None:
        super().__init__(says)
        self.verdict, self.says = verdict, says


class Runner:
    """Runs lanes one by one, and remembers what vLLM chose by itself."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._chosen: dict[str, Mapping[str, Any]] = {}  # facts by family

    def run(self, lane: Lane, model: Path | str) -> Generator[Check, None, None]:
        """All checks of one lane, each as soon as it is known."""
        told = set()
        try:
            for check in self._checks(lane, model):
                if check.name not in told:
                    told.add(check.name)
                    yield check
        except _LaneEnd as end:
            yield Check(judge.EXACTNESS + lane.name, end.verdict, end.says)

    def _checks(self, lane: Lane, model: Path | str) -> Iterator[Check]:
        if lane.wants_gpu:
            raise _LaneEnd(NOT_RUN, "its kernels are for a GPU alone")
        (lane, wanted, changes), name = self._other(lane), lane.name
        # On a CPU vLLM alone dies of a prompt longer than a block unless that is cured.
        mode = REFERENCE if lane.on_cpu else OFF
        *_, end = self._engines.run(f"{name} alone", lane.job(model, alone=True), mode, changes)
        alone = end.result or LaneResult()
        unfit = _unfit(lane, alone.facts, wanted) if alone.facts else None
        if unfit or not alone.answers:
            raise _LaneEnd(NOT_RUN, unfit or f"vLLM alone does not run here like this: {end.fault}")
        self._chosen.setdefault(lane.family, alone.facts)
        asked = {section: waves for section, waves in alone.sections.items() if section in alone.answers}
        job = lane.job(model)._replace(sections=asked)
        changes = {**changes, DRAFTS: "1"} if lane.drafts is not None else changes
        mine = LaneResult()
        with contextlib.closing(self._engines.run(f"{name} patched", job, FULL, changes)) as ends:
            for end in ends:
                mine = end.result or mine
                if mine.facts:
                    yield from judge.checks(name, mine, alone, lane.own_model, over=end.over)
        if end.fault and not end.from_outside:
            says = f"vLLM alone runs here, but the engine with the patches did not finish: {end.fault}"
            yield Check(f"all of it, {name}", WRONG, says)
        elif end.fault or not mine.answers:
            yield Check(f"all of it, {name}", NOT_RUN, end.fault or "the engine with the patches answered nothing")
        if lane.block_copy and RESEND in mine.answers:
            yield judge.block_copy(name, mine, alone)
        yield from _left_out(lane, name, mine, alone)

    def _other(self, lane: Lane) -> tuple[Lane, Mapping[str, Any], Mapping[str, str]]:
        """The lane with the flags it takes, facts it is meant for, and changes of the environment."""
        if lane.other is None:
            return lane, {}, {}
        chosen = self._chosen.get(lane.family)
        if chosen is None:
            raise _LaneEnd(NOT_RUN, f"what vLLM chooses by itself is not known: no lane of {lane.family} ran before")
        if lane.other == RUNNER:
            runner = "V1" if chosen["runner"] == "V2" else "V2"
            return lane, {"runner": runner}, {RUNNER_VARIABLE: str(int(runner == "V2"))}
        if lane.other == KERNELS and chosen["gdn_prefill"] != FLASHINFER:
            raise _LaneEnd(LEFT_OUT, f"there is no other: without FlashInfer's vLLM took {chosen['gdn_prefill']}")
        flags = ("--additional-config", '{"gdn_prefill_backend": "triton"}', *lane.flags)
        return lane._replace(flags=flags), {"gdn_prefill": TRITON}, {}


def _unfit(lane: Lane, facts: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """Why this engine is not what the lane is for, if it is not."""
    if not facts["recurrent"]:
        return "the model has no recurrent layers: vLLM caches its prefixes by itself"
    if facts["graphs"] == "NONE" and not (lane.on_cpu or lane.own_model or lane.eager):
        return "vLLM ran without CUDA graphs, which this lane is for"
    if facts["drafts"] != (lane.drafts is not None):
        return f"vLLM {'drafts' if facts['drafts'] else 'does not draft'} tokens with this configuration"
    taken = (f"vLLM took {facts[name]} instead of {each}" for name, each in wanted.items() if facts[name] != each)
    return next(taken, None)


def _left_out(lane: Lane, name: str, mine: LaneResult, alone: LaneResult) -> Iterator[Check]:
    """Parts that were left out, and why. Lengths of a user's own model are missed, more of a tiny one are not."""
    for part in dict.fromkeys([*alone.left_out, *mine.left_out]):
        verdict = NOT_RUN if part in alone.sections and part != MORE else LEFT_OUT
        yield Check(f"{part}, {name}", verdict, "no time was left (more with --minutes)")
    longest = alone.facts["longest"]
    lengths = [length_section(shared) for shared in SHARED_LENGTHS if shared + 96 > longest] if lane.own_model else []
    lengths += [f"{length:,} cold tokens" for length in COLD_LENGTHS if lane.timed and length + 32 > longest]
    for part in lengths:
        yield Check(f"{part}, {name}", LEFT_OUT, f"the model's length is {longest:,} tokens")
