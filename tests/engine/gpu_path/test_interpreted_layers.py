"""States written through vLLM's Triton kernels are those of a pass that ends there, and defects would be seen.

The kernels are those that a GPU runs; the machine is Triton's interpreter. `make test-gpu-path` repeats it on the
source of vLLM 0.33.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.triton_interpreter import environment

VERSION = "SEAMARK_TEST_GPU_PATH"  # of the vLLM whose source is used; unset: the installed one

CASES = {
    "mamba2": [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "aligned": True},
        {"dtype": "bfloat16", "states": "bfloat16"},
    ],
    "gdn": [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "aligned": True}],
}

DEFECTS = (
    "a state one unit early",
    "a part left out",
    "another row's running block",
    "states rounded to bfloat16",
)

ONE_ROUNDING = 2**-8  # of bfloat16, relative


def shown(family: str, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What the cases show, in a process of their own."""
    command = [sys.executable, "-m", "tests.harness.interpreted_layers"]
    done = subprocess.run(
        [*command, json.dumps([{"family": family, **case} for case in cases])],
        env=environment(folder, os.environ.get(VERSION)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def errors(found: dict[str, Any]) -> list[float]:
    return [error for state in found["states"] for error in (state["conv"], state["state"])]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", CASES)
def test_states_are_those_of_a_pass_that_ends_there(family, tmp_path):
    for case, found in zip(CASES[family], shown(family, CASES[family], tmp_path), strict=True):
        assert len(found["states"]) == (12 if family == "mamba2" else 8) and found["size"] > 0.1
        assert all(state["size"] > 0.1 for state in found["states"])
        if case.get("states") == "bfloat16":  # a state inside a chunk goes on from one that was rounded
            assert all(state["conv"] == 0 for state in found["states"])
            assert all(state["state"] <= ONE_ROUNDING * state["size"] for state in found["states"])
        else:
            assert errors(found) == [0.0] * len(errors(found)), case
        if family == "mamba2":  # the scan is whole: nothing else in the step is computed otherwise than by vLLM alone
            assert set(found["outputs"] + found["running"]) == {0.0}, case


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", CASES)
def test_planted_defects_are_seen(family, tmp_path):
    cases = [{"dtype": "bfloat16", "defect": defect} for defect in DEFECTS]
    for case, found in zip(cases, shown(family, cases, tmp_path), strict=True):
        assert max(errors(found)) > 0, case
