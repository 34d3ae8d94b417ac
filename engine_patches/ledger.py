"""The ledger of patches: what is changed in vLLM, why, and until when; all of them or none.

vLLM's internals move with every release. So each patch states the shape of what it replaces, every shape is checked
before the first patch is applied, and the first surprise leaves vLLM untouched (fail closed).

No module is imported for that, since many load kernels: it is read from its file, and patched when vLLM imports it. If
it then differs from what was read, all patches of the process are taken back; and if others rely on them already, the
import fails, and with it the engine.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, update_wrapper, wraps
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from engine_patches import module_source
from engine_patches.module_source import ImportHook
from engine_patches.settings import logger

MARK = "__seamark_original__"  # on a replacement: the function that it replaced

NAME = "__seamark_patch__"  # on a replacement: the name of its patch

# Where functions lie that are patched.
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
KV_CACHE_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
KV_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
POOL = "vllm.v1.core.block_pool:BlockPool"
CORE = "vllm.v1.engine.core:EngineCore"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
LAYERS = "vllm.model_executor.layers.mamba"

_FINE_PREFIX = (
    f"{SCHEDULER}._mamba_block_aligned_split",
    f"{SCHEDULER}.__init__",
    f"{MANAGERS}:MambaManager._cache_partial_tail_block",
)

# Mods of others, and what their own scripts replace of what is patched here: where such a function differs, its mod may
# be why.
KNOWN_MODS: Mapping[str, Sequence[str]] = {
    "fix-hybrid-prefix-cache-eagle": _FINE_PREFIX,
    "fix-eagle-fine-prefix": _FINE_PREFIX,
    "fix-qwen3-coder-next": (f"{MANAGERS}:MambaManager.cache_blocks",),
    "glm53-port-*": (f"{SCHEDULER}.__init__", f"{SCHEDULER}.schedule"),
}

# vLLM's functions, and what replaces them. vLLM is untyped at this seam: its parameters change between releases.
Function = Callable[..., Any]


def replacement(function: Any) -> Callable[[Function], Function]:
    """A `Patch.build`: the `function` itself, given by name as `original` what it replaces, at no further call.

    What is built has the original's signature: by that vLLM counts and converts what comes to an engine core by name.
    """

    @wraps(function)
    def build(original: Function) -> Function:
        made = FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__)
        made.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "original": original}
        return update_wrapper(made, original, assigned=(), updated=())

    return build


class PatchRole(enum.Enum):
    """Why a patch exists: a `CURE` repairs an upstream defect, a `FEATURE` adds checkpoints."""

    CURE = "cure"
    FEATURE = "feature"


class Platform(enum.Enum):
    """What a vLLM is built for, as far as patches differ by it."""

    CPU = "CPU"
    GPU = "GPU"


class ShapeMismatch(Exception):
    """vLLM does not look as a patch expects; the message names the target and the difference."""


@dataclass(frozen=True)
class Shape:
    """What a patch relies on: a callable's parameter names, and words its source must contain."""

    target: str  # "package.module:Class.function"
    parameters: str | None = None  # "self, request, num_tokens"
    mentions: tuple[str, ...] = ()
    where: str = ""  # looked at only in a vLLM that has this class or function

    def check(self) -> None:
        """Raise `ShapeMismatch` if vLLM differs: the function itself, or its source if nobody has imported it yet."""
        if self.where and not exists(self.where):
            return
        if _module_of(self.target) in sys.modules:
            original = _chain(resolve(self.target).value)[-1]
            if self.parameters is not None:
                self._compare_parameters(", ".join(inspect.signature(original).parameters))
            if self.mentions:
                try:
                    source = inspect.getsource(original)
                except (OSError, TypeError) as error:
                    raise ShapeMismatch(f"{self.target}: {error}") from error
                self._compare_source(source)
            return
        for definition in _definitions(self.target):
            if self.parameters is not None:
                self._compare_parameters(definition.parameters)
            self._compare_source(definition.source)

    def _compare_parameters(self, actual: str) -> None:
        if actual != self.parameters:
            raise self._differs(f"takes ({actual}), expected ({self.parameters})")

    def _compare_source(self, source: str) -> None:
        missing = [text for text in self.mentions if text not in source]
        if missing:
            raise self._differs(f"no longer mentions {', '.join(missing)}")

    def _differs(self, how: str) -> ShapeMismatch:
        mods = [mod for mod, targets in KNOWN_MODS.items() if self.target in targets]
        return ShapeMismatch(f"{self.target} {how}" + (f"; mods known to edit it: {', '.join(mods)}" if mods else ""))


@dataclass(frozen=True)
class Patch:
    """One replaced function: a row of the ledger, which stands over what replaces `target`.

    `parameters` and `mentions` are what the target must look like for that: its parameter names (those of what stands
    there, if it names all), and words that its source contains. `relies_on` says the same of other functions; what
    several rows rely on stands in one of them. `on` and `applies` say on which platform and in which versions the row
    has a meaning. `rebind` lists modules that import the function by name, and may be loaded already. A row without
    `upstream` serves hints, so upstream has nothing to repair. Of a kind of rows (`cure`, `inside`, ...) is said once
    what all say.

    `build` receives the original function and returns its replacement (if the target is a classmethod, both take
    `cls`). It imports no module of vLLM, since it runs while the target's is being imported: the replacement does, when
    it is called.
    """

    name: str
    target: str  # "package.module:Class.function"
    why: str
    until: str
    build: Callable[[Function], Function] = lambda original: original
    role: PatchRole = PatchRole.FEATURE
    upstream: str = "none: depends on hints"
    parameters: str | None = None  # of the target, as in `Shape`
    mentions: tuple[str, ...] = ()
    relies_on: tuple[Shape, ...] = ()  # besides the target
    rebind: tuple[str, ...] = ()
    also: tuple[str, ...] = ()  # functions that the replacement replaces in turn, where the loaded model has them
    on: Platform | None = None  # where alone it has a meaning; None: everywhere
    applies: Callable[[], bool] = field(default=lambda: True)  # to this version of vLLM, by its source

    def __call__(self, function: Any) -> Callable[[Function], Function]:
        """A decorator: what it stands over is `build`, or makes it, if it takes the `original` by name."""
        takes = inspect.getfullargspec(function)
        takes_it_by_name = "original" in takes.kwonlyargs
        build: Callable[[Function], Function] = replacement(function) if takes_it_by_name else function
        is_whole = takes_it_by_name and not (takes.varargs or takes.varkw)
        parameters = ", ".join(takes.args) if is_whole else self.parameters
        _rows.setdefault(build.__module__, []).append(replace(self, build=build, parameters=parameters))
        return build

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return Shape(self.target, self.parameters, self.mentions), *self.relies_on

    def is_for(self, platform: Platform | None) -> bool:
        """Whether the patch has a meaning on a platform, and in the vLLM that is installed."""
        return self.on in (None, platform) and self.applies()


_rows: dict[str, list[Patch]] = {}  # by the module that has them


def rows_of(*modules: ModuleType) -> tuple[Patch, ...]:
    """The patches over functions of these modules. Of several on one target the last is called first."""
    return tuple(patch for module in modules for patch in _rows[module.__name__])


cure = partial(Patch, role=PatchRole.CURE)

inside = partial(Patch, until="vLLM exports several states from one pass")

ours = partial(Patch, until="never: ours")


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
    """Whether a "module:Class.function" path leads to a function; a module that nobody has imported is only read."""
    return holds(Shape(path))


def is_applied(patch: Patch) -> bool:
    """Whether the target holds this patch's replacement, or is going to once vLLM imports its module."""
    module = _module_of(patch.target)
    if module not in sys.modules:
        return any(patch.name == awaited.name for awaited in _awaited.get(module, ()))
    return exists(patch.target) and has_patch(resolve(patch.target).value, patch.name)


def has_patch(function: Any, name: str) -> bool:
    """Whether the patch of this name has replaced a function, among others perhaps."""
    return any(getattr(each, NAME, None) == name for each in _chain(function))


def holds(shape: Shape) -> bool:
    """Whether vLLM looks like this: what `Patch.applies` asks of a part that some versions do not have."""
    try:
        shape.check()
    except ShapeMismatch:
        return False
    return True


def _module_of(path: str) -> str:
    return path.partition(":")[0]


def _definitions(path: str) -> list[module_source.Definition]:
    """What a module that is not imported defines under a path, at least one; `ShapeMismatch` if it is missing."""
    module, _, attributes = path.partition(":")
    try:
        found = module_source.definitions(module, attributes)
    except (ImportError, SyntaxError) as error:
        raise ShapeMismatch(f"{module} cannot be imported ({error})") from error
    if not found:
        raise ShapeMismatch(f"{path} does not exist")
    return found


def _chain(function: Any) -> list[Any]:
    """A function and what it replaces, vLLM's own last: one target can carry several patches."""
    chain = [function]
    while hasattr(chain[-1], MARK):
        chain.append(getattr(chain[-1], MARK))
    return chain


_awaited: dict[str, list[Patch]] = {}  # by a module that is not imported: the patches with a shape there

_replaced: list[Target] = []  # what was replaced in this process, in order

_live = False

_relied_on = False


def apply(patches: Sequence[Patch]) -> int:
    """Apply every patch that applies here, or none. Returns how many were applied.

    A patch of a module that is not imported counts as applied. Patches already in place are left as they are, so a
    second call changes nothing. Raises `ShapeMismatch` with vLLM untouched when anything differs.
    """
    global _live
    _live = False
    here = platform_here() if any(patch.on for patch in patches) else None
    missing, misfits = judge([patch for patch in patches if not is_applied(patch)], here)
    if misfits:
        raise next(iter(misfits.values()))
    before = len(_replaced)
    for patch in missing:
        for module in {_module_of(shape.target) for shape in patch.shapes} - sys.modules.keys():
            _awaited.setdefault(module, []).append(patch)
            _hook.install()
    try:
        for patch in missing:
            if _module_of(patch.target) in sys.modules:
                _replace(patch)
    except Exception:
        _put_back(before)
        for module in list(_awaited):
            _awaited[module] = [patch for patch in _awaited[module] if patch not in missing]
        raise
    _live = any(patch.role is PatchRole.FEATURE for patch in patches)
    return len(missing)


def platform_here() -> Platform | None:
    """The one that vLLM has found in this process; None for one that no patch is for."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Platform.CPU
    return Platform.GPU if current_platform.is_cuda_alike() else None


class Fit(NamedTuple):
    """What `apply` would do in a process of a platform."""

    patches: Sequence[Patch]  # that have a meaning there
    misfits: Mapping[str, ShapeMismatch]  # how vLLM differs from what a patch expects; none: all would be applied


def judge(patches: Sequence[Patch], platform: Platform | None) -> Fit:
    """Whether vLLM is as these patches expect. Nothing is applied, and nothing is imported."""
    misfits = {}
    try:
        wanted = [patch for patch in patches if patch.is_for(platform)]
        for patch in wanted:
            try:
                for shape in patch.shapes:
                    shape.check()
            except ShapeMismatch as difference:
                misfits[patch.name] = difference
    finally:
        module_source.forget()
    return Fit(wanted, misfits)


def patches_live() -> bool:
    """Whether checkpoints work in this process: the last `apply` was asked for them, and nothing differed since."""
    return _live


def rely_on_patches() -> bool:
    """Whether checkpoints work in this process, asked by who then makes another part of the engine count on them.

    After a yes the patches can no longer be taken back: a module that differs when it is imported stops the engine.
    """
    global _relied_on
    _relied_on = _relied_on or _live
    return _live


def _imported(module: str) -> None:
    """A module that patches wait for has been imported: check it as it is now, and patch it."""
    awaited = _awaited.pop(module, [])
    try:
        for patch in awaited:
            for shape in patch.shapes:
                if _module_of(shape.target) == module:
                    shape.check()
        for patch in awaited:
            if _module_of(patch.target) == module:
                _replace(patch)
    except Exception as error:
        _withdraw(error)


def _withdraw(reason: Exception) -> None:
    """Take all patches of this process back; if others rely on them, fail the import that showed the difference."""
    global _live
    _live = False
    _put_back(0)
    _awaited.clear()
    if _relied_on:
        raise ShapeMismatch(f"{reason}; the engine already counts on Seamark's patches and cannot go on") from reason
    logger.error("seamark: vLLM is left untouched, no checkpoints: %s", reason)


def _replace(patch: Patch) -> None:
    """Put the replacement into its place, and wherever a loaded module holds the original by name."""
    target = resolve(patch.target)
    replacement: Any = patch.build(target.value)
    setattr(replacement, MARK, target.value)
    setattr(replacement, NAME, patch.name)
    stored = classmethod(replacement) if isinstance(target.stored, classmethod) else replacement
    for owner in (target.owner, *(sys.modules[name] for name in patch.rebind if name in sys.modules)):
        if vars(owner).get(target.name) is target.stored:
            _replaced.append(Target(owner, target.name, target.stored))
            setattr(owner, target.name, stored)


def _put_back(length: int) -> None:
    """Undo all replacements but the first `length`, the last one first."""
    while len(_replaced) > length:
        target = _replaced.pop()
        setattr(target.owner, target.name, target.stored)


_hook = ImportHook(_awaited, _imported)
