"""The processes in which the engines of `seamark gpu-check` run, within the time that the whole check has."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import NamedTuple

from engine_patches.commands.worker import vllm_environment
from engine_patches.gpu_check.job import LaneJob, LaneResult
from engine_patches.settings import MODE_VARIABLE

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
    """Starts engines one by one, and ends each."""

    def __init__(self, folder: Path, on_cpu: bool, seconds: float, offline: bool = True, lanes: int = 1) -> None:
        """`folder` takes jobs, results and logs; `offline`: models are in folders, nothing is looked up on the hub."""
        self._folder, self._deadline, self._lanes = folder, time.monotonic() + seconds, lanes
        self._share = self._alone_took = 0.0
        threads = {"OMP_NUM_THREADS": "1"} if on_cpu and offline else {}  # a tiny model gains nothing from more
        hub = {"HF_HUB_OFFLINE": "1"} if offline else {}
        self._environment = {**vllm_environment(os.environ, on_cpu), **threads, **hub, **ENVIRONMENT}

    def run(
        self, name: str, job: LaneJob, mode: str, changes: Mapping[str, str] = {}
    ) -> Generator[ProcessEnd, None, None]:
        """Do one job in an engine with `SEAMARK_ENGINE=mode` and further `changes` of its environment."""
        began = time.monotonic()
        left = self._deadline - began
        if left < MIN_SECONDS:
            yield ProcessEnd(None, "no time was left to start the engine (more with --minutes)", from_outside=True)
            return
        if job.alone:  # the other half is for the engine with the patches
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
        if job.alone:
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
    return [sys.executable, "-m", "engine_patches.gpu_check.job", str(job_file), str(result_file)]


def _last_error(log: Path, status: int) -> str:
    """The last exception that a log names, with the line after it."""
    lines = log.read_text(errors="replace").splitlines()
    named = [number for number, line in enumerate(lines) if "Error: " in line or "Exception: " in line]
    return " ".join(line.strip() for line in lines[named[-1] : named[-1] + 2]) if named else f"exit status {status}"
