"""One meaning for a type's name in the whole product; JSON of others is read where all that it raises is caught.

That is `ValueError`, also for a number of more than 4,300 digits, and `RecursionError` for what is nested too deep.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PROXY = Path(__file__).parents[2] / "proxy"

OWN = {
    "commands/setup.py": "what pip notes of this installation",
    "http/json_body.py": "`loads` itself",
    "pipeline/cacheable.py": "`is_final` calls what reads events, and catches both",
}


def caught(handler: ast.ExceptHandler) -> str:
    return ast.unparse(handler.type) if handler.type is not None else "Exception"


def guarded(tree: ast.AST) -> set[ast.Call]:
    """Calls of `json.loads` in a `try`, or a `with suppress`, for both."""
    found: set[ast.Call] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            kinds, body = " ".join(map(caught, node.handlers)), node.body
        elif isinstance(node, ast.With):
            kinds, body = " ".join(ast.unparse(each.context_expr) for each in node.items), node.body
        else:
            continue
        if "Exception" in kinds or ("RecursionError" in kinds and "ValueError" in kinds):
            found |= {call for each in body for call in calls(each)}
    return found


def calls(tree: ast.AST) -> set[ast.Call]:
    return {node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "json.loads"}


def test_nothing_else_reads_it():
    modules = [path for path in sorted(PROXY.rglob("*.py")) if "bench" not in path.parts]
    assert len(modules) > 80
    for path in modules:
        tree = ast.parse(path.read_text())
        if str(path.relative_to(PROXY)) not in OWN:
            assert [ast.unparse(call) for call in calls(tree) - guarded(tree)] == [], path


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
