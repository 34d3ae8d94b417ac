"""Every defect that a cure repairs is still in the installed vLLM, and gone with the cures.

The first time that an untouched vLLM passes, its cure and its report can go.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.upstream.preloaded import CURED, UNTOUCHED

pytestmark = pytest.mark.thorough

HERE = Path(__file__).parent

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Run(NamedTuple):
    """One reproduction, in one mode."""

    code: int | None
    log: str

    @property
    def verdict(self) -> str:
        """The last line that the script itself printed, or the whole log if it printed none."""
        said = [line for line in self.log.splitlines() if line in ("no defect", "defect present")]
        return said[-1] if said else self.log[-3000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, str], Run]:
    """All of them, by script and mode."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("SEAMARK_", "VLLM_"))}
    command = [sys.executable, str(HERE / "preloaded.py"), str(tmp_path_factory.mktemp("upstream"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env={**inherited, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    for run in found:
        print(f"{run['script']} with SEAMARK_ENGINE={run['mode']}: {run['seconds']:.1f} s")
    return {(run["script"], run["mode"]): Run(run["code"], run["log"]) for run in found}


@pytest.mark.parametrize("script", CURED)
def test_an_untouched_vllm_still_has_the_defect(runs, script):
    run = runs[script, UNTOUCHED]
    assert (run.verdict, run.code) == ("defect present", 1)


@pytest.mark.parametrize("script", CURED)
def test_the_cures_repair_it(runs, script):
    run = runs[script, CURED[script]]
    assert (run.verdict, run.code) == ("no defect", 0)


def test_the_report_covers_every_script():
    report = (HERE / "README.md").read_text()
    assert [script for script in CURED if f"`{script}.py`" not in report] == []
