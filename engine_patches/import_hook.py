"""Does something right behind the import of chosen modules, before the code that imports them goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Calls `imported(name)` once a module among `awaited` has run; what that raises fails the import.

    `awaited` may change at any time: it is looked at when a module is searched for.
    """

    def __init__(self, awaited: Container[str], imported: Callable[[str], None]) -> None:
        self.awaited = awaited
        self.imported = imported

    def install(self) -> None:
        """Be asked before all others, from now on."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find; if somebody waits for the module, with a loader that tells."""
        if fullname not in self.awaited:
            return None
        for finder in tuple(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if finder is self or find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _TellingLoader(spec.loader, self.imported)
                return spec
        return None


class _TellingLoader(Loader):
    """Loads a module as its own loader does, which the module then knows as its loader, and tells."""

    def __init__(self, loader: Loader, imported: Callable[[str], None]) -> None:
        self.loader = loader
        self.imported = imported

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.imported(module.__name__)
