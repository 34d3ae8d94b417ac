"""The gateway with scales: `python -m tests.bench.measured_gateway FILE serve ...`.

At each SIGUSR1 it writes to FILE what its parts hold, in bytes of objects, and how many entries its large tables have.
A copy of the process looks, so that looking takes no memory of the gateway.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from proxy import cli
from proxy.boundaries.divergence import DivergenceLearner
from proxy.boundaries.positions import PositionCache
from proxy.chat.responses import StoredResponses
from proxy.fleet.hot_prefixes import WarmupSet
from proxy.metrics import Metrics
from proxy.observability.explanations import Explanations
from proxy.observability.request_diff import RequestMemory
from proxy.routing.held_states import HeldStates
from proxy.routing.prefix_index import PrefixIndex

# What grows with traffic. What two of them hold counts for the first.
PARTS = {
    "metrics": Metrics,
    "prefix index": PrefixIndex,
    "positions": PositionCache,
    "states that engines reported": HeldStates,
    "recent requests": RequestMemory,
    "texts, to learn what they share": DivergenceLearner,
    "stored responses": StoredResponses,
    "prompts to warm up with": WarmupSet,
    "explanations": Explanations,
}

REST = "all else"

# Not a part of whatever refers to them.
SHARED = (
    *(type, ModuleType, FunctionType, MethodType, FrameType),
    *(asyncio.Future, asyncio.AbstractEventLoop),
    *PARTS.values(),
)

TABLES = (dict, OrderedDict, list, deque, set)

LARGE_TABLE = 500  # entries


def weighed() -> dict[str, dict[str, int]]:
    """Bytes by part, and entries of large tables by owner and attribute."""
    gc.unfreeze()  # what was there before the first request
    gc.collect()
    alive = gc.get_objects()
    seen: set[int] = set()
    seen |= {id(alive), id(seen)}
    parts = {
        name: _size((each for part in alive if type(part) is kind for each in gc.get_referents(part)), seen)
        for name, kind in PARTS.items()
    }
    parts[REST] = _size(alive, seen)
    # The collector does not track a table of nothing but numbers and texts.
    tables = {id(each): each for owner in alive for each in (owner, *gc.get_referents(owner)) if _is_large(each)}
    entries: Counter[str] = Counter()
    for each in tables.values():
        if each is not alive and each is not seen:
            entries[_owner(each)] += len(each)
    return {"parts": parts, "tables": dict(entries)}


def _is_large(value: Any) -> bool:
    return type(value) in TABLES and len(value) >= LARGE_TABLE


def _size(roots: Iterable[Any], seen: set[int]) -> int:
    """Bytes of all that is reached from `roots` and not yet `seen`."""
    size, rest = 0, list(roots)
    while rest:
        each = rest.pop()
        if id(each) not in seen and not isinstance(each, SHARED):
            seen.add(id(each))
            size += sys.getsizeof(each)
            rest += gc.get_referents(each)
    return size


def _owner(table: Any) -> str:
    referrers = gc.get_referrers(table)
    owners = [each for each in referrers if type(each) is not dict]
    # Attributes may lie in a dictionary of the owner's.
    owners += [each for names in referrers if type(names) is dict for each in gc.get_referrers(names)]
    for owner in owners:
        for name in (*getattr(type(owner), "__slots__", ()), *getattr(owner, "__dict__", ())):
            if getattr(owner, name, None) is table:
                return f"{type(owner).__name__}.{name}"
    return f"a {type(table).__name__}"


def look(file: Path) -> None:
    """Write what is held to `file`, which is there once it is complete."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    try:
        written = file.with_suffix(".part")
        written.write_text(json.dumps(weighed()))
        written.rename(file)
    finally:
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: look(Path(sys.argv[1])))
    sys.exit(cli.main(sys.argv[2:]))
