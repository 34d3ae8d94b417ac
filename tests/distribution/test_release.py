"""The release workflow, as far as it runs here: its scripts, what they refuse, and that nothing names a registry; and
that `make lint` can fail."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.version import version
from tests.deploy.tools import SBOM_PROGRAM
from tests.harness.helm import helm

ROOT = Path(__file__).parents[2]

TEXT = (ROOT / ".github/workflows/release.yml").read_text()

JOBS: dict[str, Any] = yaml.safe_load(TEXT)["jobs"]

RELEASE = version().partition("+")[0]  # without a commit

STEPS = {step["name"]: step for job in JOBS.values() for step in job["steps"] if "name" in step}


def run(name: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """A step's script, as GitHub's runners start one without a shell of its own."""
    command = ["bash", "-e", "-c", STEPS[name]["run"]]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def stand_in(folder: Path, program: str, script: str) -> str:
    """A PATH whose first `program` is this script."""
    folder.mkdir(exist_ok=True)
    (folder / program).write_text(f"#!/bin/sh\n{script}\n")
    (folder / program).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize("name", STEPS)
def test_a_script_is_one(name):
    if "run" in STEPS[name]:
        subprocess.run(["bash", "-n", "-c", STEPS[name]["run"]], check=True)


def test_a_tag_that_is_not_the_version_ends_the_release():
    name = "The tag names the version"
    assert run(name, ROOT, TAG=f"v{RELEASE}").returncode == 0
    wrong = run(name, ROOT, TAG="v0.0.1")
    assert wrong.returncode == 1 and RELEASE in wrong.stderr
    assert all("test" in (job["needs"], *job["needs"]) for name, job in JOBS.items() if name != "test")


def test_no_registry_and_no_secret_is_named_in_the_workflow():
    assert re.findall(r"https?://|\b[\w-]+\.(?:io|org|com|dev)\b", TEXT) == []
    for step in STEPS.values():
        for name, value in step.get("env", {}).items():
            assert ("secrets." in value) is any(word in name for word in ("PASSWORD", "USER")), name


def test_images_are_pushed_under_their_version_by_a_key_that_no_command_line_shows(tmp_path):
    docker = f'echo "$@" >> "{tmp_path}/calls"; [ "$1" = login ] && cat >> "{tmp_path}/stdin"\ntrue'
    path = stand_in(tmp_path / "bin", "docker", docker)
    given = {"REGISTRY": "registry.example/us", "REGISTRY_USER": "me", "REGISTRY_PASSWORD": "a secret", "TAG": "v9.8.7"}
    done = run("Push the images", tmp_path, PATH=path, **given)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text()
    assert calls.splitlines()[0] == "login registry.example --username me --password-stdin"
    assert "push registry.example/us/seamark-gateway:9.8.7\n" in calls
    assert "push registry.example/us/seamark-plugin:9.8.7\n" in calls
    assert "a secret" not in calls + done.stdout and (tmp_path / "stdin").read_text() == "a secret"


def test_an_sbom_of_each_image_goes_with_the_release(tmp_path):
    """Its script on stand-ins of docker and pip; with real ones in `make test-deploy`."""
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    docker = f'echo "$@" >> "{tmp_path}/calls"; case "$1" in image) echo sha256:0 1 bytes;; run) echo "{{}}";; esac'
    stand_in(tmp_path / "bin", "docker", docker)
    path = stand_in(tmp_path / "bin", "python3", f'echo "$@" > "{tmp_path}/installed"; mkdir sbom-tools')
    done = run("List what is inside", tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    inside = tmp_path / "inside"
    assert {each.name for each in inside.iterdir()} == {
        f"seamark-{half}.{kind}" for half in ("gateway", "plugin") for kind in ("txt", "cdx.json")
    }
    assert (inside / "seamark-plugin.cdx.json").read_text() == "{}\n"
    runs = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("run ")]
    confined = f"run --rm --read-only --network none --user 65532:65532 --volume {tmp_path}/sbom-tools:/sbom:ro,z"
    assert [line.startswith(f"{confined} --entrypoint python3 seamark-") for line in runs] == [True, True]
    installed = (tmp_path / "installed").read_text().split()
    assert installed[-1] == SBOM_PROGRAM and SBOM_PROGRAM in (ROOT / "deploy/sbom.sh").read_text()


def test_images_are_built_from_the_wheel_that_goes_out(tmp_path):
    for folder in ("dist", "deploy/wheels"):
        (tmp_path / folder).mkdir(parents=True)
    wheel = f"vllm_seamark-{version()}-py3-none-any.whl"
    (tmp_path / "dist" / wheel).touch()
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    path = stand_in(tmp_path / "bin", "docker", f'echo "$@" >> "{tmp_path}/calls"')
    done = run("Build the images", tmp_path, PATH=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "deploy/wheels" / wheel).exists() and "wheel" in JOBS["images"]["needs"]
    gateway, plugin = (line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("build "))
    assert f"SEAMARK=vllm-seamark[tracing]=={RELEASE} " in gateway and f"SEAMARK=vllm-seamark=={RELEASE} " in plugin


def test_the_chart_is_packed_with_what_its_links_lead_to(tmp_path):
    packed = subprocess.run(
        [str(helm()), "package", str(ROOT / "deploy/helm/seamark"), "--destination", str(tmp_path)],
        env={"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert packed.returncode == 0, packed.stderr
    (chart,) = tmp_path.glob("seamark-*.tgz")
    assert chart.name == f"seamark-{RELEASE.replace('.dev', '-dev')}.tgz"  # as SemVer wants it
    with tarfile.open(chart) as archive:
        names = set(archive.getnames())
        rules = archive.extractfile("seamark/files/rules.yml")
        assert rules is not None and rules.read() == (ROOT / "grafana/rules.yml").read_bytes()
    assert {"seamark/files/models/qwen3.8-27b.yaml", "seamark/files/dashboards/overview.json"} <= names


def tool(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One of the commands of `make lint`, on the copy in `folder`."""
    program = str(Path(sys.executable).with_name(name))
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
    assert tool("lint-imports", "--no-cache", folder=copied).returncode == 0
    low = copied / "proxy" / "http" / "json_body.py"
    low.write_text(low.read_text() + "\n\nimport proxy.pipeline.gateway  # planted\n")
    planted = tool("lint-imports", "--no-cache", folder=copied)
    assert planted.returncode == 1
    assert "proxy.http is not allowed to import proxy.pipeline" in planted.stdout
    assert "proxy.http.json_body -> proxy.pipeline.gateway" in planted.stdout


def test_the_type_checker_refuses_a_wrong_type(copied):
    file = copied / "proxy" / "planted.py"
    file.write_text(
        "from proxy.errors import SettingsError\n\n\ndef text(error: SettingsError) -> str:\n    return {}\n"
    )
    wrong = tool("mypy", str(file), folder=copied)
    assert wrong.returncode == 1 and "planted.py:5: error: Incompatible return value type" in wrong.stdout


def test_hooks_and_hosts_run_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # nothing is fetched
    commands = [hook["entry"] for hook in repository["hooks"]]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]
    commands += [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert {command.removeprefix("make ") for command in commands} == {"lint", "test-fast", "test", "audit"} <= targets
