"""What is known of a request and of a worker's load is written in one place each, as the syntax tree shows."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOMS = Path(__file__).parents[3] / "proxy"

# The class that alone assigns to an attribute of that name, on whatever object.
WRITERS = {
    "failure": "Reply",  # with the two below, the status
    "started": "Reply",
    "_begun_as": "Reply",
    "choice": "ProxiedRequest",  # and with it the worker and the expectation
    "inflight": "Slot",
    "prefill_tokens": "Slot",
    "dispatched": "Slot",
    "probed": "WorkerPool",  # what a worker says of itself
    "up": "WorkerPool",
    "under_way": "KeySlot",  # of an API key
    "record": "Accounting",  # of the explanation
    "verdict": "Accounting",
    "report": "Accounting",
    "_amended": "Record",
    "_so_far": "Record",
}

SOURCES = [path for room in ("pipeline", "fleet", "routing", "observability") for path in (ROOMS / room).rglob("*.py")]


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to, tuples taken apart."""
    if isinstance(node, ast.Assign):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        found = [node.target]
    else:
        return
    while found:
        target = found.pop()
        if isinstance(target, ast.Tuple | ast.List):
            found += target.elts
        else:
            yield target


def writers(tree: ast.Module) -> dict[str, set[str]]:
    """By attribute, the classes and functions of a module that assign to it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for owner in tree.body:
        for node in ast.walk(owner):
            for target in targets(node):
                if isinstance(target, ast.Attribute):
                    found[target.attr].add(getattr(owner, "name", "the module"))
    return found


@pytest.mark.parametrize("attribute", WRITERS)
def test_each_fact_has_one_writer(attribute):
    found = {
        f"{path.stem}.{owner}"
        for path in SOURCES
        for owner in writers(ast.parse(path.read_text())).get(attribute, ())
        if owner not in ("_Watched", "IdleTurns")  # what was seen of a worker
    }
    assert {name.rpartition(".")[2] for name in found} == {WRITERS[attribute]}, found


@pytest.mark.parametrize(
    "written", ["request.failure = 1", "request.failure += 1", "a, request.failure = 1, 2", "request.failure: int = 1"]
)
def test_a_second_writer_would_be_seen(written):
    assert writers(ast.parse(f"def other(request, a):\n    {written}"))["failure"] == {"other"}
