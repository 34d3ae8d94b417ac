"""The scheduler's tests run in a process of their own, since patches are per process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_apart(module: str, *arguments: str, source: Path | None = None) -> Any:
    """The JSON that a module of the harness prints last. Patches are per process; vLLM's own plugin mechanism stays out
    of it.

    `source`: folder with the vLLM that it runs on (`versions.engine_of`); None for the installed one.
    """
    environment = {**os.environ, "SEAMARK_ENGINE": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    if source is not None:
        environment |= {"PYTHONPATH": os.pathsep.join((str(source), str(ROOT))), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.harness.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
