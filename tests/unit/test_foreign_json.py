"""JSON of others is read by `proxy.http.json_body.loads`, or where all that Python's reader raises is caught.

That is `ValueError`, also for a number of more than 4,300 digits, and `RecursionError` for what is nested too deep.
"""

from __future__ import annotations

import ast
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
