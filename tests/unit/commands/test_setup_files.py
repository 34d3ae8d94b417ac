"""The files of each way of running vLLM: what the plan says is in them, and what it lacks is named by its flag."""

from __future__ import annotations

import importlib.util
import shlex
from pathlib import Path
from typing import Any

import pytest

from proxy.commands.setup_files import (
    SetupPlan,
    SetupWay,
    WrittenFile,
    files_for,
    this_python,
)
from proxy.errors import SettingsError
from tests.deploy.compose_files import DEPLOY

SOURCE = DEPLOY.parent

VLLM = "http://127.0.0.1:8000"

SECOND = "http://192.168.1.11:8000"


@pytest.fixture
def spark(tmp_path: Path) -> Path:
    for name in ("mods", "recipes"):
        (tmp_path / "spark vllm" / name).mkdir(parents=True)
    return tmp_path / "spark vllm"


def plan(way: SetupWay, **more: Any) -> SetupPlan:
    usual: dict[str, Any] = {"model": "", "workers": (), "machines": 1, "out": Path("/my out"), "source": SOURCE}
    usual |= {"spark": Path("/nowhere"), "registry": "", "cpu": False}
    return SetupPlan(way, **{**usual, **more})


def lines(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]


def words(written: WrittenFile, script: str) -> list[str]:
    """The command that a script ends in."""
    return shlex.split(lines(written.files[script])[-1])


@pytest.mark.parametrize("has_vllm", [True, False])
def test_the_worker_is_started_here_or_in_the_environment_that_is_active(has_vllm, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_vllm and name == "vllm" else None)
    written = files_for(plan(SetupWay.PIP, model="a/B c"))
    assert list(written.files) == ["seamark.toml", "gateway.sh", "worker.sh"] and len(written.off) == 2
    assert written.go_on == ("sh '/my out/worker.sh'", "sh '/my out/gateway.sh'")
    command = [*shlex.split(this_python()), "-m", "engine_patches"] if has_vllm else ["seamark"]
    assert words(written, "worker.sh") == ["exec", *command, "worker", "a/B c", "--port", "8000", "$@"]
    check = "command -v seamark >/dev/null || "
    assert (check in written.files["worker.sh"]) is not has_vllm
    assert [note.rpartition(": ")[2] for note in written.notes] == (
        [] if has_vllm else [f"pip install --no-deps {shlex.quote(str(SOURCE))}"]
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (note,) = files_for(plan(SetupWay.PIP, model="m", source=None)).notes
    assert note.endswith("/path/to/seamark")


@pytest.mark.parametrize(
    ("way", "more", "said"),
    [
        (SetupWay.PIP, {}, "--model: which model"),
        (SetupWay.COMPOSE, {}, "--model: which model"),
        (SetupWay.SPARK, {}, "--model: which model"),
        (SetupWay.SPARK, {"model": "m"}, "--spark: /nowhere is no checkout"),
        (SetupWay.BESIDE, {}, "--worker: --way compose-beside goes before"),
        (SetupWay.SYSTEMD, {}, "--worker: --way systemd goes before"),
        *(
            (
                way,
                {"model": "m", "workers": (SECOND,) if way is not SetupWay.COMPOSE else (), "source": None},
                "--source",
            )
            for way in (SetupWay.COMPOSE, SetupWay.BESIDE, SetupWay.SYSTEMD, SetupWay.KUBERNETES, SetupWay.SPARK)
        ),
        (SetupWay.COMPOSE, {"model": "m", "machines": 2}, "--worker: name the second machine's address once"),
        (SetupWay.COMPOSE, {"model": "m", "machines": 2, "workers": (SECOND, SECOND)}, "--worker: name the second"),
        (SetupWay.COMPOSE, {"model": "m", "machines": 2, "workers": ("http://b:1",)}, "--worker: b is a name"),
        (SetupWay.COMPOSE, {"model": "m", "machines": 3}, "--workers: Compose starts"),
        (SetupWay.COMPOSE, {"model": "m", "workers": (SECOND,)}, "--workers: Compose starts"),
        (SetupWay.COMPOSE, {"cpu": True, "machines": 2, "workers": (SECOND,)}, "--workers: Compose starts"),
        (SetupWay.KUBERNETES, {"workers": ("http://a:1", VLLM)}, f"--worker: in a pod {VLLM} is the pod itself"),
    ],
)
def test_what_is_missing_or_cannot_be_is_named_by_its_flag(way, more, said):
    with pytest.raises(SettingsError) as error:
        files_for(plan(way, **more))
    assert str(error.value).startswith(said)
