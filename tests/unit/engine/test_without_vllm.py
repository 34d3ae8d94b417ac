"""Each command of the plugin, in an environment without vLLM or torch: one line says what is missing, and the cure."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib import metadata

import pytest

from engine_patches import __main__ as plugin


def absent(name: str) -> str:
    raise metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("command", [["worker", "m"], ["gpu-check"]], ids=lambda command: command[0])
@pytest.mark.parametrize("missing", ["vLLM", "torch"])
def test_what_starts_vllm_says_that_it_or_torch_is_missing(monkeypatch, capsys, tmp_path, command, missing):
    monkeypatch.chdir(tmp_path)
    if missing == "vLLM":
        monkeypatch.setattr(metadata, "version", absent)
        monkeypatch.setattr(metadata, "distributions", lambda **_: [])
    else:
        monkeypatch.setattr(metadata, "version", lambda name: "0.32.0")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert plugin.main(command) == (3 if command == ["gpu-check"] else 1)  # nothing was proven
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{missing} is not installed here" in line and "pip install --no-deps /path/to/seamark" in line


def test_a_model_needs_torch(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert plugin.main(["model", "--out", str(tmp_path / "model")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark model: torch is not installed here") and not (tmp_path / "model").exists()


def test_the_ledger_can_be_read_without_vllm_and_torch():
    without = "import sys; sys.modules.update(vllm=None, torch=None); from engine_patches.__main__ import main; "
    done = subprocess.run(
        [sys.executable, "-c", without + "sys.exit(main(['patches']))"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "block-copy (cure)" in done.stdout, done.stderr


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0)])
def test_an_unknown_command_is_answered_with_the_usage(capsys, arguments, status):
    assert plugin.main(arguments) == status
    assert "usage: python -m engine_patches" in capsys.readouterr().err


def test_a_command_of_the_gateway_is_answered_with_where_it_is(capsys):
    assert plugin.main(["doctor", "--worker", "http://127.0.0.1:8000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seamark doctor: only the plugin is here") and "pip install /path/to/seamark" in line
