"""Every cache key leads to the state it promises, on the block layouts of a CPU and of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def audit(**wanted) -> dict:
    command = [sys.executable, "-m", "tests.cache_audit", json.dumps(wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("export", [False, True], ids=["states at chunk ends", "states exported inside a pass"])
@pytest.mark.parametrize("blocks", [400, 40], ids=["room", "tight"])
def test_every_key_leads_to_what_it_promises(export, blocks):
    found = audit(seeds=[1, 2, 3], chats=150, export=export, blocks=blocks)
    assert found["errors"] == []
    assert found["hit_tokens"] > 5000


def test_the_audit_notices_an_upstream_defect_left_uncured():
    found = audit(seeds=[1, 2, 3], chats=150, export=True, blocks=400, without=["block-edge-stop"])
    assert any("wrong" in error for error in found["errors"])
