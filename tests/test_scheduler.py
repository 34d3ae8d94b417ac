"""On vLLM's own scheduler: every cache key leads to the state it promises, in every situation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOM = {"blocks": 200}
TIGHT = {"blocks": 30, "running": 4}


def run_apart(module: str, *arguments: str) -> dict:
    """Patches are per process; vLLM's own plugin mechanism stays out of it."""
    environment = {**os.environ, "SEAMARK_ENGINE": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.{module}", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "cores",
    [
        [ROOM, TIGHT, {**TIGHT, "budget": 50}, {**TIGHT, "policy": "priority"}],
        [{**ROOM, "overlap": True}, {**TIGHT, "overlap": True}],
        [{**ROOM, "pieces": False, "export": False}, {**TIGHT, "pieces": False, "export": True}],
    ],
    ids=["states inside the pass", "the next step planned ahead", "states at chunk ends"],
)
def test_every_key_leads_to_what_it_promises(model: Path, cores):
    for found in run_apart("scheduler_audit", str(model), json.dumps({"seeds": [1, 2], "chats": 80, "cores": cores})):
        assert found["errors"] == []
        assert found["hit_tokens"] > 400


@pytest.mark.parametrize(
    ("without", "core"),
    [("true-states", ROOM), ("block-edge-stop", {**ROOM, "pieces": False, "export": True})],
)
def test_the_audit_notices_what_is_left_out(model: Path, without, core):
    wanted = {"seeds": [1, 2], "chats": 60, "without": [without], "cores": [core]}
    (found,) = run_apart("scheduler_audit", str(model), json.dumps(wanted))
    assert any("wrong" in error for error in found["errors"])
