"""`make lint` can fail: it finds a planted upward import and a planted wrong type."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def run(tool: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One of the commands of `make lint`, on the copy in `folder`."""
    program = str(Path(sys.executable).with_name(tool))
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}
    return subprocess.run([program, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def copied(tmp_path):
    """The packages and their configuration, to plant something in."""
    for package in ("proxy", "engine_patches"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_layers_contract_refuses_an_upward_import(copied):
    assert run("lint-imports", "--no-cache", folder=copied).returncode == 0
    low = copied / "proxy" / "http" / "json_body.py"
    low.write_text(low.read_text() + "\n\nimport proxy.pipeline.gateway  # planted\n")
    planted = run("lint-imports", "--no-cache", folder=copied)
    assert planted.returncode == 1
    assert "proxy.http is not allowed to import proxy.pipeline" in planted.stdout
    assert "proxy.http.json_body -> proxy.pipeline.gateway" in planted.stdout


def test_the_type_checker_refuses_a_wrong_type(copied):
    file = copied / "proxy" / "planted.py"
    file.write_text(
        "from proxy.errors import SettingsError\n\n\ndef text(error: SettingsError) -> str:\n    return {}\n"
    )
    wrong = run("mypy", str(file), folder=copied)
    assert wrong.returncode == 1 and "planted.py:5: error: Incompatible return value type" in wrong.stdout


def test_hooks_and_hosts_run_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # nothing is fetched
    commands = [hook["entry"] for hook in repository["hooks"]]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    commands += [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {command.removeprefix("make ") for command in commands} == {"lint", "test-fast", "test", "audit"} <= targets
