"""On `PYTHONPATH`: a torchvision of nothing, with which modules of models that see can be imported for their layers.

vLLM inspects a model's class in a process of its own, so every process has to have it. Nothing of it can be called.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import MutableSequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

NAME = "torchvision"


class Nothing(ModuleType):
    """A module that has every name."""

    __path__: MutableSequence[str] = []  # noqa: RUF012  # none is ever added
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Finder:
    """Finds the module, and whatever is looked for in it."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != NAME and not name.startswith(f"{NAME}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Nothing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs."""


sys.meta_path.append(Finder())  # last: one that is installed goes before
