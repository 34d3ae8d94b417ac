"""The processes in which the engines of `seamark gpu-check` run, within the time that the whole check has."""

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

from engine_patches.commands.worker import vllm_environment
from engine_patches.gpu_check.job import LaneJob, LaneResult
from engine_patches.settings import MODE_VARIABLE

MIN_SECONDS = 15.0  # no engine is started with less time left

# One engine has at most half of what is left, so that one that hangs leaves time for other lanes; but at least this.
FAIR_SECONDS = 120.0

# The engine runs in the process itself, answers nobody else and asks nobody.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
}


class ProcessEnd(NamedTuple):
    """The end of one engine's job."""

    result: LaneResult | None  # as far as it came; None if the engine never came up
    fault: str | None = None  # why it did not finish
    from_outside: bool = False  # the time was too short, or somebody killed it: no fault of what it ran


class Engines:
    """Starts engines one by one, and ends each."""

    def __init__(self, folder: Path, on_cpu: bool, seconds: float, offline: bool = True) -> None:
        """`folder` takes jobs, results and logs; `offline`: models are in folders, nothing is looked up on the hub."""
        self._folder, self._deadline = folder, time.monotonic() + seconds
        threads = {"OMP_NUM_THREADS": "1"} if on_cpu and offline else {}  # a tiny model gains nothing from more
        hub = {"HF_HUB_OFFLINE": "1"} if offline else {}
        self._environment = {**vllm_environment(os.environ, on_cpu), **threads, **hub, **ENVIRONMENT}

    def run(self, name: str, job: LaneJob, mode: str, changes: Mapping[str, str] = {}) -> ProcessEnd:
        """Do one job in an engine with `SEAMARK_ENGINE=mode` and further `changes` of its environment."""
        left = self._deadline - time.monotonic()
        if left < MIN_SECONDS:
            return ProcessEnd(None, "no time was left to start the engine (more with --minutes)", from_outside=True)
        allowed = min(left, max(left / 2, FAIR_SECONDS))
        stem = self._folder / name.replace(" ", "-").replace("/", "-")
        job_file, result_file, log_file = (Path(f"{stem}{end}") for end in (".job", ".result", ".log"))
        job_file.write_bytes(pickle.dumps(job))
        environment = {**self._environment, MODE_VARIABLE: mode, **changes}
        fault, from_outside = None, False
        with log_file.open("w") as log:
            # A process group of its own, so that whatever vLLM starts ends with it.
            process = subprocess.Popen(
                _command(job_file, result_file), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                status = process.wait(allowed)
                from_outside = status in (-signal.SIGKILL, -signal.SIGTERM)
                if from_outside:
                    fault = f"the engine was killed ({signal.Signals(-status).name}; the kernel does so without memory)"
                elif status:
                    fault = _last_error(log_file) or f"exit status {status}"
            except subprocess.TimeoutExpired:
                fault, from_outside = f"the engine was ended after {allowed:.0f} s (more with --minutes)", True
            finally:  # a signal to the check may have come, too
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return ProcessEnd(pickle.loads(result_file.read_bytes()) if result_file.exists() else None, fault, from_outside)


def _command(job_file: Path, result_file: Path) -> list[str]:
    return [sys.executable, "-m", "engine_patches.gpu_check.job", str(job_file), str(result_file)]


def _last_error(log: Path) -> str:
    """The last exception that a log names, with the line after it; empty if it names none."""
    lines = log.read_text(errors="replace").splitlines()
    named = [number for number, line in enumerate(lines) if "Error: " in line or "Exception: " in line]
    return " ".join(line.strip() for line in lines[named[-1] : named[-1] + 2]) if named else ""
