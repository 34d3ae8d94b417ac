"""The two paths told in CONTRIBUTING.md: each named file holds the named function."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TEXT = (ROOT / "CONTRIBUTING.md").read_text()

PATHS = ("The path of one chat request", "The path of one boundary")


def section(heading: str) -> str:
    """What stands under a heading."""
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def steps(heading: str) -> list[str]:
    """What each step of a path names: files, and behind each one its functions."""
    lines = re.findall(r"^\d+\. (.+(?:\n +.+)*)", section(heading), re.M)
    return [" ".join(re.findall(r"`([^`]+)`", line.partition("`:")[0] + "`")) for line in lines]


def definitions(file: str) -> set[str]:
    """Functions and classes of a file, methods as `Class.method`. Read, not imported: the plugin needs vLLM."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


@pytest.mark.parametrize("step", [step for heading in PATHS for step in steps(heading)])
def test_each_step_is_in_the_named_function(step):
    for file, names in re.findall(r"(\S+\.py)((?: (?!\S+\.py)\S+)*)", step):
        assert names and set(names.split()) <= definitions(file)


@pytest.mark.parametrize("package", ["proxy", "engine_patches"])
def test_the_table_lists_the_rooms_in_the_order_of_their_layers(package):
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == [package])
    declared = [name for layer in layers for name in layer.split(" | ") if (ROOT / package / name).is_dir()]
    table = section("Where things are").partition(f"| `{package}/`")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)/` \|", table, re.M) == declared
