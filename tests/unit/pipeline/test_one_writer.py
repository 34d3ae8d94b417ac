"""What is known of a request and of a worker's load is written in one place each, as the syntax tree shows."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

# The class that alone assigns to an attribute of these names, on whatever object.
WRITERS = {
    "Reply": {"failure", "started", "_begun_as"},  # which make the status
    "ProxiedRequest": {"choice"},  # and with it the worker and the expectation
    "Slot": {"inflight", "prefill_tokens", "dispatched"},
    "WorkerPool": {"probed", "up"},  # what a worker says of itself
    "KeySlot": {"under_way"},  # of an API key
    "Accounting": {"record", "verdict", "report"},  # of the explanation
    "Record": {"_amended", "_so_far"},
}

SEEN = {"_Watched", "IdleTurns"}  # hold what was seen of a worker


def test_each_fact_has_one_writer():
    found: defaultdict[str, set[str]] = defaultdict(set)
    for room in ("pipeline", "fleet", "routing", "observability"):
        for path in (Path(__file__).parents[3] / "proxy" / room).rglob("*.py"):
            for owner in ast.parse(path.read_text()).body:
                for node in ast.walk(owner):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        found[node.attr].add(getattr(owner, "name", path.stem))
    for writer, facts in WRITERS.items():
        assert {fact: found[fact] - SEEN for fact in facts} == {fact: {writer} for fact in facts}
