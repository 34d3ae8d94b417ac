"""Fan-outs on vLLM's own scheduler, on a simulated clock: a step takes a floor and a time for each of its tokens.

No model runs. The scheduler, its cache and Seamark's gate are real; what a step takes is computed from what it holds,
so that one process plays a Spark or an H200 in seconds.

Run as `python -m tests.harness.simulated_fan_out MODEL '{"cells": [{...}]}'` (fields of `Cell`), since patching is per
process. Prints JSON: for each cell what its requests computed and waited, gate on and off.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.outputs import ModelRunnerOutput

from engine_patches import ledger
from engine_patches.patches import PATCHES
from tests.harness.audit import Core
from tests.harness.fan_out_cells import Arrival, Cell, arrivals

ANSWER_TOKENS = 8

BLOCK = 528  # tokens, of Qwen3.5-4B


class SimulatedEngine(Core):
    """A core whose steps take `floor + token * tokens` seconds on a clock of its own, and are not audited."""

    now = 0.0  # seconds

    def __init__(self, model: str, cell: Cell, gate: bool) -> None:
        blocks = 64 + sum(len(arrival.tokens) // BLOCK + 8 for arrival in arrivals(cell))
        super().__init__(model, blocks=blocks, budget=cell.budget, running=cell.running, block=BLOCK)
        self._cell = cell
        self.computed = 0  # tokens of prompts
        self.first_tokens: dict[str, float] = {}
        checkpoints = self.scheduler.seamark
        if gate:
            checkpoints.gate._clock = lambda: self.now
        else:
            checkpoints.gate = None
        for _ in range(8):
            for tokens in (1, 1000):
                checkpoints.step_time.step_took(tokens, cell.floor + cell.token * tokens)

    def step(self) -> Any:
        """Plan a step, let its time pass, and report a token for each request whose prompt is computed."""
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        self.now += self._cell.floor + self._cell.token * output.total_num_scheduled_tokens
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            start = request.num_computed_tokens - output.num_scheduled_tokens[name]
            self.computed += max(0, min(request.num_computed_tokens, request.num_prompt_tokens) - start)
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if done else [])
            if done:
                self.first_tokens.setdefault(name, self.now)
        output.seamark_planned_at = float("inf")  # the pace is given, not learnt
        index = {name: number for number, name in enumerate(names)}
        runner = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)
        self.scheduler.update_from_output(output, runner)
        return output


class Side(NamedTuple):
    """What the requests of a cell computed (tokens) and waited (seconds), means."""

    computed: int
    first_token: float  # of all requests
    sharing: float  # of those that share the prefix
    worst: float


def run_cell(model: str, cell: Cell, gate: bool) -> Side:
    """Send a cell's requests to a new engine, and run it until all are answered."""
    engine = SimulatedEngine(model, cell, gate)
    coming = sorted(arrivals(cell), key=lambda arrival: arrival.at)
    sent: dict[str, Arrival] = {}
    while coming or engine.scheduler.has_unfinished_requests():
        if not engine.scheduler.has_unfinished_requests():
            engine.now = max(engine.now, coming[0].at)
        while coming and coming[0].at <= engine.now:
            arrival = coming.pop(0)
            sent[arrival.name] = arrival
            engine.request(arrival.name, arrival.tokens, list(arrival.hint), max_tokens=ANSWER_TOKENS)
        engine.step()
    waits = {name: at - sent[name].at for name, at in engine.first_tokens.items()}
    sharing = [wait for name, wait in waits.items() if sent[name].sharing]
    return Side(engine.computed, statistics.fmean(waits.values()), statistics.fmean(sharing), max(waits.values()))


def run_cells(model: str, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Every cell with its two sides."""
    sides = {"on": True, "off": False}
    return [
        {"cell": asdict(cell)} | {name: run_cell(model, cell, gate)._asdict() for name, gate in sides.items()}
        for cell in cells
    ]


def main(model: str, argument: str) -> None:
    logging.disable(logging.WARNING)
    init_none_hash(sha256)
    ledger.apply(PATCHES)
    print(json.dumps(run_cells(model, (Cell(**fields) for fields in json.loads(argument)["cells"]))))


if __name__ == "__main__":
    main(*sys.argv[1:3])
