"""Runs the lanes of `seamark gpu-check`: vLLM alone first, then the engine with the patches, which is held to it.

Each engine has a process, within the time that the whole check has.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.commands.worker import vllm_environment
from engine_patches.gpu_check import judge
from engine_patches.gpu_check.engine import COLD_LENGTHS, LaneJob, LaneResult
from engine_patches.gpu_check.judge import LEFT_OUT, NOT_RUN, WRONG, Check
from engine_patches.gpu_check.lanes import KERNELS, MORE, RESEND, RUNNER, SHARED_LENGTHS, Lane, length_section
from engine_patches.settings import DRAFTS, FULL, MODE_VARIABLE, OFF, REFERENCE

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
FLASHINFER, TRITON = ["flashinfer"], ["triton"]
MIN_SECONDS = 15.0  # no engine is started with less time left
LANE_SECONDS = 180.0  # that a lane has before parts of it are left out for the sake of later ones
LIKE_ALONE = 3.0  # times as long as vLLM alone an engine with the patches may take: one that hangs leaves other lanes

# The engine runs in the process itself, answers nobody else and asks nobody.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}


class ProcessEnd(NamedTuple):
    """One engine's job, as far as it has come."""

    result: LaneResult | None  # None if the engine never came up
    fault: str | None = None  # why it did not finish
    from_outside: bool = False  # the time was too short, or somebody killed it: no fault of what it ran
    over: bool = True


class Engines:
    def __init__(self, folder: Path, on_cpu: bool, seconds: float, offline: bool = True, lanes: int = 1) -> None:
        """`folder` takes jobs, results and logs; `offline`: models are in folders, nothing is looked up on the hub."""
        self._folder, self._deadline, self._lanes = folder, time.monotonic() + seconds, lanes
        self._share = self._alone_took = 0.0
        threads = {"OMP_NUM_THREADS": "1"} if on_cpu and offline else {}  # a tiny model gains nothing from more
        hub = {"HF_HUB_OFFLINE": "1"} if offline else {}
        self._environment = {**vllm_environment(os.environ, on_cpu), **threads, **hub, **ENVIRONMENT}

    def run(self, name: str, job: LaneJob, mode: str, changes: Mapping[str, str]) -> Generator[ProcessEnd, None, None]:
        """Do one job in an engine with `SEAMARK_ENGINE=mode` and further `changes` of its environment."""
        began = time.monotonic()
        left = self._deadline - began
        if left < MIN_SECONDS:
            yield ProcessEnd(None, "no time was left to start the engine (more with --minutes)", from_outside=True)
            return
        if job.sections is None:  # the other half is for the engine with the patches
            self._share, self._lanes = max(left / max(self._lanes, 1), LANE_SECONDS), self._lanes - 1
            wanted, allowed = self._share / 2, left / 2
        else:
            wanted = self._share - self._alone_took
            allowed = min(left, max(LIKE_ALONE * self._alone_took, wanted))
        stem = self._folder / name.replace(" ", "-").replace("/", "-")
        job_file, result_file, log_file = (Path(f"{stem}{end}") for end in (".job", ".result", ".log"))
        job_file.write_bytes(pickle.dumps(job._replace(seconds=wanted)))
        environment, seen = {**self._environment, MODE_VARIABLE: mode, **changes}, 0
        with log_file.open("w") as log:
            # A process group of its own, so that whatever vLLM starts ends with it.
            process = subprocess.Popen(
                _command(job_file, result_file), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                while (status := process.poll()) is None and time.monotonic() - began < allowed:
                    time.sleep(0.1)
                    written = result_file.stat().st_mtime_ns if result_file.exists() else 0
                    if written != seen:
                        seen = written
                        yield ProcessEnd(pickle.loads(result_file.read_bytes()), over=False)
            finally:  # a signal to the check may have come, too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if job.sections is None:
            self._alone_took = time.monotonic() - began
        faults = {
            None: f"the engine was ended after {allowed:.0f} s (more with --minutes)",
            -signal.SIGKILL: "the engine was killed (SIGKILL; the kernel does so without memory)",
            -signal.SIGTERM: "the engine was killed (SIGTERM)",
        }
        from_outside = status in faults
        fault = faults[status] if from_outside else _last_error(log_file, status) if status else None
        yield ProcessEnd(pickle.loads(result_file.read_bytes()) if result_file.exists() else None, fault, from_outside)


def _command(job_file: Path, result_file: Path) -> list[str]:
    code = "from engine_patches.gpu_check import engine; engine.main()"
    return [sys.executable, "-c", code, str(job_file), str(result_file)]


def _last_error(log: Path, status: int) -> str:
    """The last exception that a log names, with the line after it."""
    lines = log.read_text(errors="replace").splitlines()
    named = [number for number, line in enumerate(lines) if "Error: " in line or "Exception: " in line]
    return " ".join(line.strip() for line in lines[named[-1] : named[-1] + 2]) if named else f"exit status {status}"


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
        except Exception as error:  # a fault of this check proves nothing about vLLM, and must not hide other lanes
            yield Check(f"the check itself, {lane.name}", NOT_RUN, f"failed: {type(error).__name__}: {error}")

    def _checks(self, lane: Lane, model: Path | str) -> Iterator[Check]:
        name, chosen = lane.name, self._chosen.get(lane.family)
        answer = partial(Check, judge.EXACTNESS + name)  # of a lane that cannot go on
        if lane.wants_gpu:
            yield answer(NOT_RUN, "its kernels are for a GPU alone")
            return
        if lane.other and chosen is None:
            yield answer(NOT_RUN, f"what vLLM chooses by itself is not known: no lane of {lane.family} ran before")
            return
        if lane.other == KERNELS and chosen and chosen["gdn_prefill"] != FLASHINFER:
            yield answer(LEFT_OUT, f"there is no other: without FlashInfer's vLLM took {chosen['gdn_prefill']}")
            return
        lane, wanted, changes = _other(lane, chosen or {})
        # On a CPU vLLM alone dies of a prompt longer than a block unless that is cured.
        mode = REFERENCE if lane.on_cpu else OFF
        *_, end = self._engines.run(f"{name} alone", LaneJob(lane, str(model)), mode, changes)
        alone = end.result or LaneResult()
        unfit = _unfit(lane, alone.facts, wanted) if alone.facts else None
        if unfit or not alone.answers:
            yield answer(NOT_RUN, unfit or f"vLLM alone does not run here like this: {end.fault}")
            return
        self._chosen.setdefault(lane.family, alone.facts)
        asked = {section: waves for section, waves in alone.sections.items() if section in alone.answers}
        job = LaneJob(lane, str(model), asked)
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


def _other(lane: Lane, chosen: Mapping[str, Any]) -> tuple[Lane, Mapping[str, Any], Mapping[str, str]]:
    """The lane with the flags it takes, facts it is meant for, and changes of the environment."""
    if lane.other == RUNNER:
        runner = "V1" if chosen["runner"] == "V2" else "V2"
        return lane, {"runner": runner}, {RUNNER_VARIABLE: str(int(runner == "V2"))}
    if lane.other == KERNELS:
        flags = ("--additional-config", '{"gdn_prefill_backend": "triton"}', *lane.flags)
        return lane._replace(flags=flags), {"gdn_prefill": TRITON}, {}
    return lane, {}, {}


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
    """Parts that were left out, and why. Geometry of a user's own model are missed, more of a tiny one are not."""
    for part in dict.fromkeys([*alone.left_out, *mine.left_out]):
        verdict = NOT_RUN if part in alone.sections and part != MORE else LEFT_OUT
        yield Check(f"{part}, {name}", verdict, "no time was left (more with --minutes)")
    longest = alone.facts["longest"]
    lengths = [length_section(shared) for shared in SHARED_LENGTHS if shared + 96 > longest] if lane.own_model else []
    lengths += [f"{length:,} cold tokens" for length in COLD_LENGTHS if lane.timed and length + 32 > longest]
    for part in lengths:
        yield Check(f"{part}, {name}", LEFT_OUT, f"the model's length is {longest:,} tokens")
