"""`make demo` itself, with one size: every story holds, the report is complete, nothing is left running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.thorough  # four engines beside the shared ones
def test_the_demo_holds_reports_and_leaves_nothing_behind(model, tmp_path):
    (tmp_path / ".cache").symlink_to(Path(model).parent, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "bench", "demo", "--sizes", "163"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    named = next(line for line in lines if line.startswith("report: "))
    report = json.loads((tmp_path / named.removeprefix("report: ")).read_text())
    assert report["held"] is True
    assert all(story["held"] for story in report["stories"])
    assert all(line["exact"] for story in report["stories"] for line in story["lines"])
    assert [line["hit_second"] for line in report["stories"][0]["lines"]] == [160, 0, 0]
    assert [defect["caught"] for defect in report["planted_defects"]] == [False, True, True, True]
    assert "every story held" in done.stdout and "waited for the leader" in done.stdout
    *_, hits, seconds, exactness, look = lines
    assert hits.endswith("98% of it in the cache with Seamark, and 0% with vLLM alone.")
    assert " ms instead of " in seconds and "NOT" not in exactness and look.startswith("look: make demo ARGS=--keep")
    # States cost no passes. Requests sent at the same time share passes as they happen to meet, so those say nothing.
    system, *_, conversation, twice = report["stories"]
    for story in (system, conversation, twice):
        ours, alone = story["lines"][:2]
        assert ours["passes_cold"] <= alone["passes_cold"], story["title"]
    assert not processes_in(tmp_path)


def processes_in(folder: Path) -> list[str]:
    """Process ids whose working directory is `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "cwd") == str(folder):
                found.append(process.name)
        except OSError:
            continue
    return found
