"""A type's name means one thing in the whole product, whoever may see it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]

# ASGI's own terms, in the two halves that do not import each other.
ASGI = {"Message", "Receive", "Scope", "Send"}


def defined(tree: ast.Module) -> set[str]:
    """Classes, and aliases of types, without a leading underscore."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= {name for name in names if name[0].isupper() and not name.isupper()}
    return {name.lstrip("_") for name in found}


def test_no_two_types_have_one_name():
    where = defaultdict(set)
    for half in ("proxy", "engine_patches"):
        for path in (ROOT / half).rglob("*.py"):
            for name in defined(ast.parse(path.read_text())):
                where[name].add(path.relative_to(ROOT).as_posix())
    twice = {name: sorted(paths) for name, paths in where.items() if len(paths) > 1}
    assert twice.keys() == ASGI, twice


def test_a_second_type_of_a_name_would_be_seen():
    tree = ast.parse("class _Plan:\n    pass\nKind = Literal['a']\nMOST = 3\nLIMITS = TypeVar('T')\n")
    assert defined(tree) == {"Plan", "Kind"}
