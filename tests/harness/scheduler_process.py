"""The scheduler's tests run in processes of their own, since patches are per process.

Those on the installed vLLM are forks of one process that has imported it, which takes longer than most of them.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]

# vLLM's own plugin mechanism stays out of it. Sets of strings are in the same order every time.
ENVIRONMENT = {"SEAMARK_ENGINE": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

SECONDS = 900


def audit(name: str, model: Path | str, **wanted: Any) -> list[dict[str, Any]]:
    """What the audit of a `name` finds with each of the cores, in a fork; `wanted`: see `audit.results`."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["tests.harness.audit"])  # and with it vLLM
    found, told = forks.Pipe(duplex=False)
    with mock.patch.dict(os.environ, ENVIRONMENT):  # of the process that forks, if this is the first one
        fork = forks.Process(target=_audit, args=(told, name, str(model), wanted), daemon=True)
        fork.start()
    told.close()
    try:
        answer, error = found.recv()
    finally:  # a test's time may be over
        fork.kill()
    assert not error, error
    return answer


def _audit(told: Any, *arguments: Any) -> None:
    try:
        told.send((importlib.import_module("tests.harness.audit").results(*arguments), ""))
    except BaseException:
        told.send((None, traceback.format_exc()))


def run_apart(module: str, *arguments: str, source: Path | None = None) -> Any:
    """The JSON that a module of the harness prints last.

    `source`: folder with the vLLM that it runs on (`versions.engine_of`); None for the installed one.
    """
    environment = {**os.environ, **ENVIRONMENT}
    if source is not None:
        environment |= {"PYTHONPATH": os.pathsep.join((str(source), str(ROOT))), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.harness.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
