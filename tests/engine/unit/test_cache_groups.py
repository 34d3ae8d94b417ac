"""Every manager of cache groups that a vLLM has is named here on purpose, whatever it derives from."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine_patches.scheduler.cache_groups import MANAGERS
from tests.harness.versions import source_of

MODULE = "v1/core/single_type_kv_cache_manager.py"

ABSTRACT = {"SingleTypeKVCacheManager", "_HiSparseAuxiliaryManager"}


def managers_in(vllm: Path) -> set[str]:
    """All classes of the module that derive from vLLM's base of managers, by their source."""
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for node in ast.walk(ast.parse((vllm / MODULE).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {"SingleTypeKVCacheManager"}
    while more := {name for name, of_class in bases.items() if of_class & found} - found:
        found |= more
    return found - ABSTRACT


def installed() -> Path:
    (folder,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    return Path(folder)


def test_each_manager_of_the_installed_vllm_is_named():
    assert len(managers_in(installed())) > 9
    assert managers_in(installed()) <= MANAGERS.keys()


def test_each_manager_of_the_newest_vllm_is_named():
    assert managers_in(source_of("0.33.0") / "vllm") <= MANAGERS.keys()


@pytest.mark.on_request
def test_each_manager_of_the_oldest_vllm_is_named_and_none_that_no_version_has():
    of_each = [managers_in(source_of(version) / "vllm") for version in ("0.31.0", "0.33.0")]
    assert set().union(managers_in(installed()), *of_each) == MANAGERS.keys()


def manager(name: str, *, prefix_cacheable: bool = True) -> SimpleNamespace:
    return type(name, (SimpleNamespace,), {})(kv_cache_spec=SimpleNamespace(prefix_cacheable=prefix_cacheable))
