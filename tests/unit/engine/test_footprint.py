"""What hangs on vLLM's objects, and what the forward pass keeps in globals, is listed in one module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_patches import footprint

PACKAGE = Path(footprint.__file__).parent

MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != Path(footprint.__file__)]

LISTED = {
    name: value for name, value in vars(footprint).items() if isinstance(value, str) and re.match("_?seamark_", value)
}

ATTRIBUTE = "seamark"  # the one that code writes as it is


def reached(tree: ast.AST) -> Iterator[str]:
    """Attributes of ours that code names, as `x.seamark` or by a string given to `getattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "getattr",
            "setattr",
            "hasattr",
            "delattr",
            "setdefault",
        ):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_hung_under_a_name_of_its_own(module):
    found = {name for name in reached(ast.parse(module.read_text())) if re.match("_*seamark", name)}
    assert found <= {ATTRIBUTE, "seamark_introduce"}  # a method of our own connector


def test_each_listed_name_is_used():
    trees = [ast.parse(module.read_text()) for module in MODULES]
    used = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert len(LISTED) == len(set(LISTED.values())) > 10 and used >= LISTED.keys()


def test_the_forward_pass_has_no_other_globals():
    for module in (PACKAGE / "forward").glob("*.py"):
        assert not [node for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Global)], module
    assert vars(footprint.RUNNING) == dict.fromkeys(("step", "scan", "convolution", "kernel"))
