"""The ledger on a module that stands for vLLM: what it checks, what it replaces, and what it takes back."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_patches import ledger
from engine_patches.ledger import Patch, Role, Shape, ShapeMismatch

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

    @classmethod
    def make(cls, size):
        return (cls.__name__, size)
"""

USER = "from toy_vllm import greet\n"


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch) -> Iterator[Any]:
    """A module `toy_vllm`, and two that import its function by name."""
    monkeypatch.setattr(ledger, "_live", False)
    for name, source in (("toy_vllm", SOURCE), ("toy_user", USER), ("toy_other", USER)):
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


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        (Shape("toy_vllm:Engine.step", "self, prompt"), "takes (self, tokens), expected (self, prompt)"),
        (Shape("toy_vllm:greet", mentions=("hello", "goodbye")), "toy_vllm:greet no longer mentions goodbye"),
        (Shape("toy_vllm:Engine.gone"), "toy_vllm:Engine.gone does not exist"),
        (Shape("toy_vllm:Gone.step"), "toy_vllm:Gone.step does not exist"),
        (Shape("toy_vllm:Engine.inherited"), "toy_vllm:Engine.inherited does not exist"),
        (Shape("toy_gone:greet"), "toy_gone cannot be imported"),
        (Shape("toy_vllm:length", mentions=("source",)), "toy_vllm:length: "),
    ],
)
def test_a_difference_is_named_and_nothing_is_replaced(toy, shape, named):
    original = toy.Engine.step
    with pytest.raises(ShapeMismatch) as error:
        ledger.apply([STEP, dataclasses.replace(STEP, name="other", relies_on=(shape,))])
    assert named in str(error.value)
    assert toy.Engine.step is original and not ledger.patches_live()


def test_the_shape_of_the_target_itself_is_checked(toy):
    with pytest.raises(ShapeMismatch, match="no longer mentions"):
        ledger.apply([dataclasses.replace(STEP, mentions=("gone",))])
    with pytest.raises(ShapeMismatch, match="takes"):
        ledger.apply([dataclasses.replace(STEP, parameters="self")])


def test_several_patches_of_one_target_are_each_applied_once_and_checked_against_the_original(toy):
    second = dataclasses.replace(STEP, name="second", build=added("second"), mentions=('return ["step"]',))
    assert ledger.apply([STEP, second]) == 2
    assert ledger.apply([STEP, second]) == 0
    assert toy.Engine().step([]) == ["step", "patched", "second"]
    third = dataclasses.replace(second, name="third", build=added("third"))
    assert ledger.apply([STEP, second, third]) == 1
    assert toy.Engine().step([]) == ["step", "patched", "second", "third"]
    assert ledger.is_applied(STEP) and not ledger.is_applied(dataclasses.replace(STEP, name="fourth"))


def test_a_patch_that_has_no_meaning_here_is_neither_checked_nor_applied(toy):
    absent = dataclasses.replace(STEP, name="absent", target="toy_vllm:Gone.step", applies=lambda: False)
    assert ledger.apply([absent, STEP]) == 1
    assert not ledger.is_applied(absent) and not ledger.exists(absent.target)


def test_a_classmethod_stays_one(toy):
    class_patch = Patch("make", "toy_vllm:Engine.make", "why", "until", added("patched"), parameters="cls, size")
    ledger.apply([class_patch])
    assert toy.Engine.make(3) == ["Engine", 3, "patched"]
    assert type("Child", (toy.Engine,), {}).make(3) == ["Child", 3, "patched"]


def test_modules_that_import_a_function_by_name_are_rebound_unless_they_hold_another(toy):
    user, other = sys.modules["toy_user"], sys.modules["toy_other"]
    own = other.greet = lambda name: "own"
    rebind = ("toy_user", "toy_other", "toy_not_loaded")
    greeting = Patch("greet", "toy_vllm:greet", "why", "until", lambda _: lambda name: "patched", rebind=rebind)
    ledger.apply([greeting])
    assert user.greet is toy.greet and toy.greet("x") == "patched" and other.greet is own


def test_a_failure_puts_everything_back_in_its_place(toy):
    user, original = sys.modules["toy_user"], (toy.greet, toy.Engine.step)
    patches = [
        Patch("greet", "toy_vllm:greet", "why", "until", lambda _: lambda name: "patched", rebind=("toy_user",)),
        STEP,
        dataclasses.replace(STEP, name="second", build=added("second")),
        dataclasses.replace(STEP, name="fails", build=failing),
    ]
    with pytest.raises(RuntimeError, match="planned"):
        ledger.apply(patches)
    assert (toy.greet, toy.Engine.step) == original and user.greet is toy.greet
    assert not ledger.patches_live()


def test_checkpoints_are_live_with_features_not_with_cures_alone_nor_after_a_failure(toy):
    cure = dataclasses.replace(STEP, name="cure", role=Role.CURE)
    ledger.apply([cure])
    assert not ledger.patches_live()
    ledger.apply([cure, STEP])
    assert ledger.patches_live()
    ledger.apply([STEP])
    assert ledger.patches_live()
    with pytest.raises(ShapeMismatch):
        ledger.apply([dataclasses.replace(STEP, name="other", parameters="self")])
    assert not ledger.patches_live()
