"""`make demo` itself, with one size: every story holds, the report is complete, nothing is left running."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.thorough  # four engines beside the shared ones
def test_the_demo_holds_reports_and_leaves_nothing_behind(model, tmp_path):
    (tmp_path / ".cache").symlink_to(Path(model).parent, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, "-m", "proxy.cli", "bench", "demo", "--sizes", "1864", "163"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and done.stdout.count("\n") == 10, done.stdout + done.stderr
    _, asked, found, saved, equal, cost, _, verdict, told, look = done.stdout.splitlines()
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("reports/*.json"))
    assert report["held"] is True
    assert all(story["held"] for story in report["stories"])
    assert all(line["exact"] for story in report["stories"] for line in story["lines"])
    hits = [[line["hit_second"] for line in story["lines"]] for story in report["stories"][:2]]
    assert hits == [[1856, 1600, 1600], [160, 0, 0]]  # vLLM finds whole blocks
    assert [defect["caught"] for defect in report["planted_defects"]] == [False, True, True, True]
    assert found.endswith(": 100% with Seamark, 79% with vLLM alone, 79% with vLLM tuned")
    assert asked.endswith("cache blocks of 1,600 tokens") and "behind 1,864 tokens" in saved and "NOT" not in equal
    assert cost.endswith("+0 forward passes") and verdict.startswith("every story held, ")
    (tables,) = tmp_path.glob("reports/*.txt")
    assert str(tables.relative_to(tmp_path)) in told and found in tables.read_text() and "--keep" in look
    assert re.search(r"\d+ requests done; held: the same request twice", done.stderr) and "\x1b" not in done.stderr
    for story in report["stories"]:  # states cost no passes
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
