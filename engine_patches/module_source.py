"""What a module defines, read from its file: nothing is imported, and nothing of it runs. And a hook behind its import.

Most of what is patched lives in modules that load kernels or look for a device, and most processes of vLLM never need
them. Python compiles each module once and keeps the result beside it, with parameters and lines of every function.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Container, Sequence
from functools import cache
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import NamedTuple


class Definition(NamedTuple):
    """A function or class as its module's file spells it."""

    parameters: str  # of a function, as `inspect.signature` orders them: "self, request, num_tokens"
    source: str  # with its decorators


def definitions(module: str, attributes: str) -> list[Definition]:
    """Every definition of "Class.function" in a module, several if branches of an `if` each have one.

    Raises `ImportError` if the module is not there or has no source, `SyntaxError` if Python cannot read it.
    """
    code, lines = _read(module)
    found = [code]
    for name in attributes.split("."):
        inside = [constant for owner in found for constant in owner.co_consts if isinstance(constant, CodeType)]
        found = [each for each in inside if each.co_name == name]
    return [Definition(", ".join(_parameters(each)), _source(each, lines)) for each in found]


def forget() -> None:
    """Drop what was read: a module of vLLM has up to 8,000 lines."""
    _read.cache_clear()


@cache
def _read(module: str) -> tuple[CodeType, list[str]]:
    spec = _find(module)
    if spec is None:
        raise ImportError("there is no such module", name=module)
    source = code = None
    if isinstance(spec.loader, InspectLoader):
        source, code = spec.loader.get_source(module), spec.loader.get_code(module)
    if source is None or code is None:
        raise ImportError("its source cannot be read", name=module)
    return code, source.splitlines(keepends=True)


def _find(module: str) -> ModuleSpec | None:
    """Where an import would find the module. `importlib.util.find_spec` would run the packages on the way."""
    package, _, _ = module.rpartition(".")
    if not package:
        return importlib.util.find_spec(module)
    if package in sys.modules:
        path = getattr(sys.modules[package], "__path__", None)
    else:
        above = _find(package)
        path = None if above is None else above.submodule_search_locations
    return None if path is None else PathFinder.find_spec(module, path)


def _parameters(function: CodeType) -> list[str]:
    names = list(function.co_varnames)
    given, last = function.co_argcount, function.co_argcount + function.co_kwonlyargcount
    ordered, keywords = names[:given], names[given:last]
    for flag, further in ((inspect.CO_VARARGS, keywords), (inspect.CO_VARKEYWORDS, [])):
        if function.co_flags & flag:  # `*args` stands before what is given by keyword, `**kwargs` at the end
            ordered.append(names[last])
            last += 1
        ordered += further
    return ordered


def _source(definition: CodeType, lines: list[str]) -> str:
    return "".join(inspect.getblock(lines[definition.co_firstlineno - 1 :]))


class ImportHook(MetaPathFinder):
    """Calls `imported(name)` once a module among `awaited` has run; what that raises fails the import."""

    def __init__(self, awaited: Container[str], imported: Callable[[str], None]) -> None:
        self.awaited = awaited  # may change at any time
        self.imported = imported

    def install(self) -> None:
        """Be asked before all others, from now on."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find; the loader of a module that somebody waits for tells."""
        if fullname not in self.awaited:
            return None
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: Loader) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self.imported(module.__name__)

        loader.exec_module = exec_module  # type: ignore[method-assign]
