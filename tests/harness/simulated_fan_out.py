"""Fan-outs on vLLM's own scheduler, on a simulated clock (`simulated_core`).

Run as `python -m tests.harness.simulated_fan_out MODEL '{"cells": [{...}]}'` (fields of `Cell`), since patching is per
process. Prints JSON: for each cell what its requests computed and waited, gate on and off.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from engine_patches import ledger
from engine_patches.patches import PATCHES
from tests.harness.fan_out_cells import Cell, arrivals
from tests.harness.simulated_core import SimulatedCore

ANSWER_TOKENS = 8

BLOCK = 528  # tokens, of Qwen3.5-4B


class SimulatedEngine(SimulatedCore):
    """One that a cell's requests come to."""

    def __init__(self, model: str, cell: Cell, gate: bool) -> None:
        blocks = 64 + sum(len(arrival.tokens) // BLOCK + 8 for arrival in arrivals(cell))
        super().__init__(
            model, cell.floor, cell.token, blocks=blocks, budget=cell.budget, running=cell.running, block=BLOCK
        )
        if not gate:
            self.checkpoints.gate = None


class Side(NamedTuple):
    """What the requests of a cell computed (tokens) and waited (seconds), means."""

    computed: int
    first_token: float


def run_cell(model: str, cell: Cell, gate: bool) -> Side:
    """Send a cell's requests to a new engine, and run it until all are answered."""
    engine = SimulatedEngine(model, cell, gate)
    coming = sorted(arrivals(cell), key=lambda arrival: arrival.at)
    sent: dict[str, float] = {}
    while coming or engine.scheduler.has_unfinished_requests():
        if not engine.scheduler.has_unfinished_requests():
            engine.now = max(engine.now, coming[0].at)
        while coming and coming[0].at <= engine.now:
            arrival = coming.pop(0)
            sent[arrival.name] = arrival.at
            engine.request(arrival.name, arrival.tokens, list(arrival.hint), max_tokens=ANSWER_TOKENS)
        engine.step()
    waits = [at - sent[name] for name, at in engine.first_tokens.items()]
    return Side(engine.computed, statistics.fmean(waits))


def run_cells(model: str, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Every cell with its two sides."""
    sides = {"on": True, "off": False}
    return [{name: run_cell(model, cell, gate)._asdict() for name, gate in sides.items()} for cell in cells]


def main(model: str, argument: str) -> None:
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    ledger.apply(PATCHES)
    print(json.dumps(run_cells(model, (Cell(**fields) for fields in json.loads(argument)["cells"]))))


if __name__ == "__main__":
    main(*sys.argv[1:3])
