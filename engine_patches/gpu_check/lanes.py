"""The lanes of `seamark gpu-check`, and the processes in which their engines run.

A lane is one model in one precision. Several engines answer it in turn: with the patches, the reference without any
cache, and beside them another model runner or vLLM alone.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine_patches.commands.worker import vllm_environment
from engine_patches.gpu_check.engine import Job, Result
from engine_patches.gpu_check.questions import EXACT, PARALLEL, RESEND
from engine_patches.gpu_check.verdicts import (
    EXACTNESS,
    NOT_RUN,
    STRICT,
    WRONG,
    Check,
    Rule,
    judge_answers,
    judge_block_copy,
    judge_environment,
    judge_passes,
    rule_from,
    timing_check,
)
from engine_patches.settings import FULL, MODE_VARIABLE, OFF, REFERENCE

UNTOUCHED, OTHER_RUNNER = "vLLM alone, match unit 16", "the other model runner"

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"

MAX_LENGTH = 4096  # tokens of a prompt and its answer

BUDGET = 2048  # tokens that an engine with a cache computes in a step

MIN_SECONDS = 15.0  # no engine is started with less time left

# The engine runs in the process itself, answers nobody else and asks nobody.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}

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
    """One model in one precision, and the engines that answer it besides the patched one and the reference."""

    family: str
    dtype: str
    beside: Sequence[str] = ()
    eager: bool = True
    strict: bool = False  # float32 kernels that compute every token alike, however a prompt is cut
    timed: bool = False
    few: bool = False  # fewer cases
    attention_backend: str | None = None

    @property
    def name(self) -> str:
        """The lane's name in the report."""
        return f"{self.family} {self.dtype}{'' if self.eager else ' compiled'}"

    def arguments(self, model: Path, **more: Any) -> Mapping[str, Any]:
        """The arguments of `vllm.LLM`."""
        backend = {"attention_backend": self.attention_backend} if self.attention_backend else {}
        own = {"model": str(model), "dtype": self.dtype, "enforce_eager": self.eager}
        return {**ARGUMENTS, **own, **backend, **more}


def lanes_of(device: str, quick: bool, attention_backend: str | None) -> tuple[Sequence[Lane], Sequence[Lane]]:
    """Lanes that may run side by side, and those that want the machine for themselves."""
    if device == "cpu":
        tiny = Lane("nemotron_h", "float32", (UNTOUCHED,), strict=True, timed=True, few=quick)
        return (), (tiny,) if quick else (tiny, Lane("qwen3_next", "bfloat16", few=True))
    beside = () if quick else (OTHER_RUNNER,)
    # Every attention backend takes heads of its size (64).
    delta = Lane("qwen3_next", "bfloat16", (*beside, UNTOUCHED), few=quick, attention_backend=attention_backend)
    sharp = Lane("nemotron_h", "float32", beside)
    # As users run it: half precision, compiled, with CUDA graphs.
    served = Lane("nemotron_h", "bfloat16", (UNTOUCHED,), eager=False, timed=True, few=quick)
    return ((delta,), (served,)) if quick else ((delta, sharp), (served,))


class Outcome(NamedTuple):
    """The end of one engine's job."""

    result: Result | None  # as far as it came; None if the engine never came up
    fault: str | None = None  # why it did not finish
    late: bool = False  # the time was too short for it


class Engines:
    """Starts engines one by one; usable from several threads."""

    def __init__(self, folder: Path, on_cpu: bool, seconds: float) -> None:
        self._folder, self._deadline = folder, time.monotonic() + seconds
        threads = {"OMP_NUM_THREADS": "1"} if on_cpu else {}  # a model this small gains nothing from more
        self._environment = {**vllm_environment(os.environ, on_cpu), **threads, **ENVIRONMENT}
        self._running: set[subprocess.Popen[bytes]] = set()

    def end(self) -> None:
        """End the engines that run and start no more."""
        self._deadline = 0.0
        for process in list(self._running):
            _kill(process)

    def run(self, name: str, job: Job, mode: str, changes: Mapping[str, str] = {}) -> Outcome:
        """Do one job in an engine with `SEAMARK_ENGINE=mode` and further `changes` of its environment."""
        left = self._deadline - time.monotonic()
        if left < MIN_SECONDS:
            return Outcome(None, "no time was left to start the engine (more with --seconds)", late=True)
        stem = self._folder / name.replace(" ", "-")
        job_file, result_file, log_file = (stem.with_suffix(end) for end in (".job", ".result", ".log"))
        job_file.write_bytes(pickle.dumps(job))
        environment = {**self._environment, MODE_VARIABLE: mode, **changes}
        command = [sys.executable, "-m", "engine_patches.gpu_check.engine", str(job_file), str(result_file)]
        with log_file.open("w") as log:
            # A process group of its own, so that whatever vLLM starts ends with it.
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            self._running.add(process)
            late = False
            try:
                status = process.wait(left)
                fault = (_last_error(log_file) or f"exit status {status}") if status else None
            except subprocess.TimeoutExpired:
                fault, late = f"the engine was ended after {left:.0f} s (more with --seconds)", True
            finally:
                _kill(process)
                process.wait()
                self._running.discard(process)
        return Outcome(pickle.loads(result_file.read_bytes()) if result_file.exists() else None, fault, late)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _last_error(log: Path) -> str:
    """The last exception that a log names, with the line after it; empty if it names none."""
    lines = log.read_text(errors="replace").splitlines()
    named = [number for number, line in enumerate(lines) if "Error: " in line or "Exception: " in line]
    return " ".join(line.strip() for line in lines[named[-1] : named[-1] + 2]) if named else ""


def run_lane(lane: Lane, engines: Engines, model: Path) -> list[Check]:
    """All checks of one lane."""
    caching = Job(lane.arguments(model, enable_prefix_caching=True), budget=BUDGET)
    patched = engines.run(f"{lane.name} patched", caching._replace(quick=lane.few, timed=lane.timed), FULL)
    uncached = Job(lane.arguments(model, enable_prefix_caching=False), {})
    mine = patched.result
    if mine is None:
        return [_never_came_up(lane, patched, lambda: engines.run(f"{lane.name} reference", uncached, REFERENCE))]
    checks = [judge_environment(lane.name, mine.facts)]
    if patched.fault or EXACT not in mine.answers:
        return [*checks, _missing(EXACTNESS + lane.name, patched, WRONG)]
    inside_chunks = mine.facts["alignment"] % mine.facts["chunk"] != 0
    job = uncached._replace(sections=mine.sections, again=not lane.strict, odd_steps=inside_chunks)
    reference = engines.run(f"{lane.name} reference", job, REFERENCE)
    truth = reference.result
    if truth is None or reference.fault:
        return [*checks, _missing(EXACTNESS + lane.name, reference, WRONG)]
    rule = STRICT if lane.strict else rule_from(truth)
    checks += judge_answers(lane.name, mine, truth, rule)
    passes = {"Seamark": mine, "without a cache": truth}
    if OTHER_RUNNER in lane.beside:
        runner = "V1" if mine.facts["runner"] == "V2" else "V2"
        name = f"{lane.name} runner {runner}"
        changes = {RUNNER_VARIABLE: str(int(runner == "V2"))}
        outcome = engines.run(name, caching._replace(sections=mine.sections), FULL, changes)
        checks += _judge_runner(name, runner, outcome, truth, rule)
    if UNTOUCHED in lane.beside:
        # On a CPU, untouched vLLM dies of a prompt longer than a cache block.
        longest = mine.facts["block"] if mine.facts["device"] == "CPU" else None
        arguments = {**caching.arguments, "prefix_match_unit": 16}
        job = caching._replace(arguments=arguments, sections={RESEND: mine.sections[RESEND]}, longest=longest)
        untouched = engines.run(f"{lane.name} untouched", job, OFF)
        if untouched.result is None or untouched.fault:
            checks.append(_missing(f"block copy, {lane.name}", untouched, NOT_RUN))
        else:
            passes[UNTOUCHED] = untouched.result
            checks.append(judge_block_copy(lane.name, untouched.result, mine, truth, rule))
    checks.append(judge_passes(lane.name, passes))
    if mine.timing is not None:
        checks.append(timing_check(lane.name, mine.timing))
    return checks


def _never_came_up(lane: Lane, patched: Outcome, without_patches: Callable[[], Outcome]) -> Check:
    name = EXACTNESS + lane.name
    if patched.late:
        return _missing(name, patched, NOT_RUN)
    if without_patches().result is None:
        return Check(name, NOT_RUN, f"vLLM does not run this model here, with or without patches: {patched.fault}")
    return Check(name, WRONG, f"the engine starts without the patches, but not with them: {patched.fault}")


def _judge_runner(name: str, runner: str, outcome: Outcome, truth: Result, rule: Rule) -> list[Check]:
    result = outcome.result
    if result is None:
        return [_missing(EXACTNESS + name, outcome, NOT_RUN)]
    if outcome.fault:
        return [_missing(EXACTNESS + name, outcome, WRONG)]
    if result.facts["runner"] != runner:
        return [Check(EXACTNESS + name, NOT_RUN, f"vLLM ran model runner {result.facts['runner']} instead")]
    return [*judge_answers(name, result, truth, rule), judge_passes(name, {"Seamark": result})]


def _missing(name: str, outcome: Outcome, verdict: str) -> Check:
    fault = outcome.fault or "the engine kept no checkpoints"
    return Check(name, NOT_RUN if outcome.late else verdict, f"the engine did not finish: {fault}")
