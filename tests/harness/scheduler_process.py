"""The scheduler's tests run in processes of their own, since patches are per process.

Those on the installed vLLM are forks of one process that has imported it, which takes longer than most of them.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# vLLM's own plugin mechanism stays out of it. Sets of strings are in the same order every time.
ENVIRONMENT = {"SEAMARK_ENGINE": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

SECONDS = 900


_server: subprocess.Popen[str] | None = None  # what the forks are made of; it ends with its input


def audit(name: str, model: Path | str, **wanted: Any) -> list[dict[str, Any]]:
    """What the audit of a `name` finds with each of the cores; `wanted`: see `audit.results`.

    In a fork of a process that has imported vLLM and no more. It is not Python's own server of forks, which a test
    process has once, and has for gateways: that one's environment would have the plugin patch vLLM.
    """
    global _server
    if _server is None or _server.poll() is not None:
        command = [sys.executable, "-m", "tests.harness.scheduler_process"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        _server = subprocess.Popen(command, **pipes, text=True, env=os.environ | ENVIRONMENT, start_new_session=True)
    assert _server.stdin and _server.stdout
    try:
        print(json.dumps([name, str(model), wanted]), file=_server.stdin, flush=True)
        found, error = json.loads(_server.stdout.readline())
    except BaseException:  # a test's time is over: the next one must not get this one's answer
        os.killpg(_server.pid, signal.SIGKILL)
        _server.wait()
        raise
    assert not error, error
    return found


def serve() -> None:
    """Do in a fork what each line of the input asks for."""
    results = importlib.import_module("tests.harness.audit").results  # and with it vLLM
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        read, write = os.pipe()
        if not (child := os.fork()):
            try:
                answer = [results(*json.loads(line)), ""]
            except BaseException:
                answer = [None, traceback.format_exc()]
            with os.fdopen(write, "w") as told:
                json.dump(answer, told)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as told:
            text = told.read()
        _, status = os.waitpid(child, 0)
        print(text or json.dumps([None, f"the fork ended with {status}"]), file=answers, flush=True)


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
