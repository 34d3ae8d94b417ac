"""The ledger of patches: what is changed in vLLM, why, and until when; all of them or none.

vLLM's internals move with every release. So each patch states the shape of what it replaces, every shape is checked
before the first patch is applied, and the first surprise leaves vLLM untouched (fail closed).
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MARK = "__seamark_original__"  # on a replacement: the function that it replaced

NAME = "__seamark_patch__"  # on a replacement: the name of its patch

# vLLM's functions, and what replaces them. vLLM is untyped at this seam: its parameters change between releases.
Function = Callable[..., Any]

_live = False


class Role(enum.Enum):
    """Why a patch exists: a `CURE` repairs an upstream defect, a `FEATURE` adds checkpoints."""

    CURE = "cure"
    FEATURE = "feature"


class ShapeMismatch(Exception):
    """vLLM does not look as a patch expects; the message names the target and the difference."""


@dataclass(frozen=True)
class Shape:
    """What a patch relies on: a callable's parameter names, and words its source must contain."""

    target: str  # "package.module:Class.function"
    parameters: str | None = None  # "self, request, num_tokens"
    mentions: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `ShapeMismatch` if vLLM differs."""
        original = _chain(resolve(self.target).value)[-1]
        if self.parameters is not None:
            actual = ", ".join(inspect.signature(original).parameters)
            if actual != self.parameters:
                raise ShapeMismatch(f"{self.target} takes ({actual}), expected ({self.parameters})")
        if self.mentions:
            try:
                source = inspect.getsource(original)
            except (OSError, TypeError) as error:
                raise ShapeMismatch(f"{self.target}: {error}") from error
            missing = [text for text in self.mentions if text not in source]
            if missing:
                raise ShapeMismatch(f"{self.target} no longer mentions {', '.join(missing)}")


@dataclass(frozen=True)
class Patch:
    """One replaced function.

    `build` receives the original function and returns its replacement (if the target is a classmethod, both take
    `cls`). `rebind` lists modules that import the function by name: a module that is already loaded is rebound, any
    other finds the replacement when it imports the function.
    """

    name: str
    target: str  # "package.module:Class.function"
    why: str
    until: str
    build: Callable[[Function], Function]
    role: Role = Role.FEATURE
    upstream: str = "none: depends on hints"
    parameters: str | None = None  # of the target, as in `Shape`
    mentions: tuple[str, ...] = ()
    relies_on: tuple[Shape, ...] = ()  # besides the target
    rebind: tuple[str, ...] = ()
    applies: Callable[[], bool] = field(default=lambda: True)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Everything that has to hold before the patch may be applied."""
        return Shape(self.target, self.parameters, self.mentions), *self.relies_on


@dataclass(frozen=True)
class Target:
    """A resolved "module:attribute" path: `stored` is what `owner` holds under `name`."""

    owner: Any
    name: str
    stored: Any

    @property
    def value(self) -> Any:
        """The function itself, also if a classmethod is stored."""
        return self.stored.__func__ if isinstance(self.stored, classmethod) else self.stored


def resolve(path: str) -> Target:
    """Import the module of "module:Class.function" and walk to the attribute; `ShapeMismatch` if it is missing."""
    module_name, _, attributes = path.partition(":")
    try:
        owner: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ShapeMismatch(f"{module_name} cannot be imported ({error})") from error
    *parents, name = attributes.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    # A method must stand in its own class: an inherited one would be patched for every sibling too.
    if owner is None or name not in vars(owner):
        raise ShapeMismatch(f"{path} does not exist")
    return Target(owner, name, vars(owner)[name])


def exists(path: str) -> bool:
    """Whether a "module:Class.function" path leads to a function here: vLLM moves methods between classes."""
    try:
        resolve(path)
    except ShapeMismatch:
        return False
    return True


def is_applied(patch: Patch) -> bool:
    """Whether the target already holds this patch's replacement."""
    if not exists(patch.target):
        return False
    return any(getattr(function, NAME, None) == patch.name for function in _chain(resolve(patch.target).value))


def _chain(function: Any) -> list[Any]:
    """A function and what it replaces, vLLM's own last: one target can carry several patches."""
    chain = [function]
    while hasattr(chain[-1], MARK):
        chain.append(getattr(chain[-1], MARK))
    return chain


def apply(patches: Sequence[Patch]) -> int:
    """Apply every patch that applies here, or none. Returns how many were applied.

    Patches already in place are left as they are, so a second call changes nothing. Raises `ShapeMismatch` with vLLM
    untouched when anything differs from what a patch expects.
    """
    global _live
    _live = False
    wanted = [patch for patch in patches if patch.applies()]
    missing = [patch for patch in wanted if not is_applied(patch)]
    for patch in missing:
        for shape in patch.shapes:
            shape.check()
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for patch in missing:
            target = resolve(patch.target)
            replacement: Any = patch.build(target.value)
            setattr(replacement, MARK, target.value)
            setattr(replacement, NAME, patch.name)
            stored = classmethod(replacement) if isinstance(target.stored, classmethod) else replacement
            for owner in (target.owner, *_loaded(patch.rebind)):
                if vars(owner).get(target.name) is target.stored:
                    replaced.append((owner, target.name, target.stored))
                    setattr(owner, target.name, stored)
    except Exception:
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)
        raise
    _live = any(patch.role is Role.FEATURE for patch in wanted)
    return len(missing)


def patches_live() -> bool:
    """Whether checkpoints work in this process: the last `apply` was asked for them and succeeded."""
    return _live


def _loaded(names: Sequence[str]) -> list[ModuleType]:
    return [sys.modules[name] for name in names if name in sys.modules]
