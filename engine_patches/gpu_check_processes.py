"""The engines of `seamark gpu-check`: a process for each, one time limit for all, and nothing left running."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engine_patches.gpu_check_engine import Job, Result
from engine_patches.plugin import MODE_VARIABLE
from engine_patches.worker import vllm_environment

MIN_SECONDS = 15.0  # no engine is started with less time left
# The engine runs in the process itself, answers nobody else and asks nobody.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
}


class Outcome(NamedTuple):
    """What became of one engine."""

    result: Result | None  # as far as it came; None where it never came up
    fault: str | None = None  # why it did not finish
    late: bool = False  # there was not time enough for it


class Engines:
    """Starts engines one by one; usable from several threads."""

    def __init__(self, folder: Path, on_cpu: bool, seconds: float) -> None:
        self._folder, self._deadline = folder, time.monotonic() + seconds
        threads = {"OMP_NUM_THREADS": "1"} if on_cpu else {}  # of use to nobody on a model this small
        self._environment = {**vllm_environment(os.environ, on_cpu), **threads, **ENVIRONMENT}
        self._running: set[subprocess.Popen] = set()

    def end(self) -> None:
        """End what is running and start nothing more."""
        self._deadline = 0.0
        for process in list(self._running):
            _kill(process)

    def run(self, name: str, job: Job, mode: str, changes: Mapping[str, str] = {}) -> Outcome:
        """Do one job in an engine with `SEAMARK_ENGINE=mode` and further `changes` of its environment."""
        left = self._deadline - time.monotonic()
        if left < MIN_SECONDS:
            return Outcome(None, "no time was left for it (--seconds)", late=True)
        stem = self._folder / name.replace(" ", "-")
        job_file, result_file, log_file = (stem.with_suffix(end) for end in (".job", ".result", ".log"))
        job_file.write_bytes(pickle.dumps(job))
        environment = {**self._environment, MODE_VARIABLE: mode, **changes}
        command = [sys.executable, "-m", "engine_patches.gpu_check_engine", str(job_file), str(result_file)]
        with log_file.open("w") as log:
            # A process group of its own, so that whatever vLLM starts ends with it.
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
            self._running.add(process)
            late = False
            try:
                status = process.wait(left)
                fault = (_last_error(log_file) or f"exit status {status}") if status else None
            except subprocess.TimeoutExpired:
                fault, late = f"no time was left after {left:.0f} s (--seconds)", True
            finally:
                _kill(process)
                process.wait()
                self._running.discard(process)
        return Outcome(pickle.loads(result_file.read_bytes()) if result_file.exists() else None, fault, late)


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _last_error(log: Path) -> str:
    """The last exception that a log names, with the line after it; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines()
    named = [number for number, line in enumerate(lines) if "Error: " in line or "Exception: " in line]
    return " ".join(line.strip() for line in lines[named[-1] : named[-1] + 2]) if named else ""
