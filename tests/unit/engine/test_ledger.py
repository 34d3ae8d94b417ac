"""The ledger on a module that stands for vLLM: what it checks, what it replaces, and what it takes back."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_patches import ledger, module_source
from engine_patches.ledger import Patch, PatchRole, Platform, Shape, ShapeMismatch

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


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Iterator[Any]:
    """A module `toy_vllm`, and two that import its function by name."""
    for name, source in (
        ("toy_vllm", SOURCE),
        *((name, "from toy_vllm import greet\n") for name in ("toy_user", "toy_other")),
    ):
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    return sys.modules["toy_vllm"]


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
    assert verdict.patches == 3 and [each.patch.name for each in verdict.misfits] == ["gone", "other"]
    assert "toy_vllm:greet takes (name, loud)" in str(verdict.misfits[1].difference)
    assert toy.Engine.step is original
    assert ledger.judge([STEP], Platform.GPU).misfits == []


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

LATE_GREETING = Patch(
    "greet", "late_vllm.engine:greet", "why", "until", lambda _: lambda name: "patched", parameters="name, loud"
)


LATE_CHECK = Patch(
    "check", "late_vllm.other:check", "why", "until", lambda _: lambda prompt: "patched", parameters="prompt"
)


@pytest.fixture
def late(tmp_path, monkeypatch) -> Iterator[Any]:
    """Imports a module of the package `late_vllm`, of which none is imported yet."""
    folder = tmp_path / "late_vllm"
    folder.mkdir()
    for name, source in {
        "__init__": "",
        "names": "changed = False\n",
        "engine": LATE,
        "other": "def check(prompt):\n    return prompt\n",
    }.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda name: importlib.import_module(f"late_vllm.{name}")
    for name in [name for name in sys.modules if name.startswith("late_vllm")]:
        del sys.modules[name]


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


def test_a_cure_without_features_is_no_checkpoints(toy):
    assert ledger.apply([]) == 0 and not ledger.patches_live()
