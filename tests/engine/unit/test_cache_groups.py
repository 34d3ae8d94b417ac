"""Every manager of cache groups that a vLLM has is named here on purpose, whatever it derives from."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from engine_patches.scheduler.cache_groups import MANAGERS
from tests.harness.versions import source_of

MODULE = "v1/core/single_type_kv_cache_manager.py"

ABSTRACT = {"SingleTypeKVCacheManager", "_HiSparseAuxiliaryManager"}


def managers_in(version: str | None) -> set[str]:
    """All classes of the module that derive from vLLM's base of managers, by their source; of the installed vLLM."""
    (installed,) = importlib.util.find_spec("vllm").submodule_search_locations  # type: ignore[union-attr]
    vllm = Path(installed) if version is None else source_of(version) / "vllm"
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for node in ast.walk(ast.parse((vllm / MODULE).read_text()))
        if isinstance(node, ast.ClassDef)
    }
    found = {"SingleTypeKVCacheManager"}
    while more := {name for name, of_class in bases.items() if of_class & found} - found:
        found |= more
    return found - ABSTRACT


@pytest.mark.parametrize("version", [None, "0.33.0"])
def test_each_manager_of_the_installed_and_of_the_newest_vllm_is_named(version):
    assert len(managers_in(version)) > 9
    assert managers_in(version) <= MANAGERS.keys()


@pytest.mark.on_request
def test_each_manager_of_the_oldest_vllm_is_named_and_none_that_no_version_has():
    assert set().union(*map(managers_in, (None, "0.31.0", "0.33.0"))) == MANAGERS.keys()
