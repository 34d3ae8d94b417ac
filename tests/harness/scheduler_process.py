"""The scheduler's tests run in processes of their own, since patches are per process.

Those on the installed vLLM are forks of one process that has imported it, which takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]

# vLLM's own plugin mechanism stays out of it. Sets of strings are in the same order every time.
ENVIRONMENT = {"SEAMARK_ENGINE": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

SECONDS = 900

# Which of an audit's seeds a test takes.
TRAFFIC = pytest.mark.parametrize(
    "share",
    [pytest.param(slice(1), id="a seed"), pytest.param(slice(None), id="all seeds", marks=pytest.mark.thorough)],
)


def run_forked(module: str, *arguments: str) -> Any:
    """The JSON that `main` of a module of the harness prints last, in a process that has imported vLLM but no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.harness.audit"])
    with mock.patch.dict(os.environ, ENVIRONMENT | {"PYTHONPATH": str(ROOT)}):
        forkserver.ensure_running()
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return json.loads(process.submit(_printed, module, arguments).result(timeout=SECONDS))


def audit(name: str, model: Path | str, **wanted: Any) -> list[dict[str, Any]]:
    """What the audit of a `name` finds with each of the cores; `wanted`: see `audit.main`."""
    found: list[dict[str, Any]] = run_forked("audit", name, str(model), json.dumps(wanted))
    return found


def _printed(module: str, arguments: tuple[str, ...]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        importlib.import_module(f"tests.harness.{module}").main(*arguments)
    return output.getvalue().splitlines()[-1]


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
