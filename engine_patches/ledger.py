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

_live = False

MARK = "__seamark_original__"  # on a replacement: what it replaced

NAME = "__seamark_patch__"  # on a replacement: whose it is


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
    parameters: tuple[str, ...] | None = None
    mentions: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise `ShapeMismatch` where vLLM differs."""
        found = _chain(resolve(self.target).value)[-1]
        if self.parameters is not None:
            actual = tuple(inspect.signature(found).parameters)
            if actual != self.parameters:
                raise ShapeMismatch(f"{self.target} takes {actual}, expected {self.parameters}")
        if self.mentions:
            try:
                source = inspect.getsource(found)
            except (OSError, TypeError) as error:
                raise ShapeMismatch(f"{self.target}: {error}") from error
            missing = [word for word in self.mentions if word not in source]
            if missing:
                raise ShapeMismatch(f"{self.target} no longer mentions {', '.join(missing)}")


@dataclass(frozen=True)
class Patch:
    """One replaced function.

    `build` receives the original function and returns its replacement (both take `cls` where the target is a
    classmethod). `rebind` lists modules that import the function by name:
    those already loaded are rebound, the others will find the replacement when they import it.
    """

    name: str
    role: Role
    target: str
    why: str
    upstream: str
    until: str
    shape: Shape
    build: Callable[[Callable[..., Any]], Callable[..., Any]]
    relies_on: tuple[Shape, ...] = ()
    rebind: tuple[str, ...] = ()
    applies: Callable[[], bool] = field(default=lambda: True)


@dataclass(frozen=True)
class Target:
    """A resolved "module:attribute" path: `stored` is what `owner` holds under `name`."""

    owner: Any
    name: str
    stored: Any

    @property
    def value(self) -> Any:
        """The function itself, where a classmethod is stored."""
        return self.stored.__func__ if isinstance(self.stored, classmethod) else self.stored


def resolve(path: str) -> Target:
    """Import the module of "module:Class.function" and walk to the attribute; `ShapeMismatch` where it is missing."""
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
    """Whether a "module:Class.function" path stands where it says: vLLM moves methods between classes."""
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


def apply(patches: Sequence[Patch]) -> None:
    """Apply every patch that applies here, or none.

    Patches already in place are left as they are, so a second call changes nothing. Raises `ShapeMismatch` with vLLM
    untouched when anything differs from what a patch expects.
    """
    wanted = [patch for patch in patches if patch.applies() and not is_applied(patch)]
    for patch in wanted:
        for shape in (patch.shape, *patch.relies_on):
            shape.check()
    replaced: list[tuple[Any, str, Any]] = []
    try:
        for patch in wanted:
            target = resolve(patch.target)
            replacement = patch.build(target.value)
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


def _loaded(names: Sequence[str]) -> list[ModuleType]:
    return [sys.modules[name] for name in names if name in sys.modules]


def patches_live() -> bool:
    """Whether checkpoints work in this process: all features of the ledger are in place."""
    return _live


def mark_live(live: bool) -> None:
    """Note whether all features of the ledger are in place in this process."""
    global _live
    _live = live
