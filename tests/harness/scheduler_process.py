"""The scheduler's tests run in processes of their own, since patches are per process.

Those on the installed vLLM are forks of one process that has imported it, which takes longer than most of them.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

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


_server: subprocess.Popen[str] | None = None  # what the forks are made of; it ends with its input


def run_forked(module: str, *arguments: str) -> Any:
    """The JSON that `main` of a module of the harness prints last, in a process that has imported vLLM but no more."""
    global _server
    if _server is None or _server.poll() is not None:
        command = [sys.executable, "-m", "tests.harness.scheduler_process"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _server = subprocess.Popen(command, **pipes, text=True, env=os.environ | ENVIRONMENT, start_new_session=True)
    assert _server.stdin and _server.stdout
    try:
        print(json.dumps([module, arguments]), file=_server.stdin, flush=True)
        printed, error = json.loads(_server.stdout.readline())
    except BaseException:  # a test's time is over: the next one must not get this one's answer
        os.killpg(_server.pid, signal.SIGKILL)
        _server.wait()
        raise
    assert not error, error
    return json.loads(printed)


def serve() -> None:
    """Do in a fork what each line of the input asks for."""
    importlib.import_module("tests.harness.audit")  # and with it vLLM
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        read, write = os.pipe()
        if not (child := os.fork()):
            with os.fdopen(write, "w") as answer:
                json.dump(_outcome(*json.loads(line)), answer)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
        _, status = os.waitpid(child, 0)
        print(text or json.dumps(["", f"the fork ended with {status}"]), file=answers, flush=True)


def _outcome(module: str, arguments: list[str]) -> tuple[str, str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            importlib.import_module(f"tests.harness.{module}").main(*arguments)
        return output.getvalue().splitlines()[-1], ""
    except BaseException:
        return "", traceback.format_exc()


def audit(name: str, model: Path | str, **wanted: Any) -> list[dict[str, Any]]:
    """What the audit of a `name` finds with each of the cores; `wanted`: see `audit.main`."""
    found: list[dict[str, Any]] = run_forked("audit", name, str(model), json.dumps(wanted))
    return found


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


if __name__ == "__main__":
    serve()
