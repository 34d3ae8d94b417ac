"""Cold fan-outs on vLLM's own scheduler on a simulated clock, the gate on and off: what a step takes is given.

No model runs. The scheduler, its cache and Seamark's parts in it are real; a step takes a floor and a time for each of
its tokens, so that one process plays a Spark or an H200 in seconds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from vllm.v1.outputs import ModelRunnerOutput

from tests.harness.audit import Scene
from tests.harness.audited_core import Core
from tests.harness.modelled_worker import UNIT, Worker

BLOCK = 528  # tokens, of Qwen3.5-4B

# Seconds of a pass, and of each token in it. Spark: one report of Nemotron-3-Super; H200: assumed for a small model.
PACES = {"Spark": (0.4, 0.0005), "H200": (0.02, 0.00003)}

ANSWER = 7  # every token that is sampled


class Cell(NamedTuple):
    """A leader, its followers, and requests between them that share nothing; all come at once. Lengths in tokens."""

    pace: str
    followers: int
    shared: int
    own: int = 60
    strangers: int = 0
    stranger_tokens: int = 2000
    budget: int = 8192
    running: int = 256

    @property
    def ideal(self) -> int:
        """Tokens that have to be computed if the shared part is computed once, up to the match unit."""
        found = self.shared // UNIT * UNIT
        return found + (self.followers + 1) * (self.shared - found + self.own) + self.strangers * self.stranger_tokens


def requests_of(cell: Cell) -> Iterator[tuple[str, list[int], list[int]]]:
    """A cell's requests, the same at each call: name, prompt, hint."""
    draw = random.Random(f"{cell}")

    def text(length: int) -> list[int]:
        return [draw.randrange(1000) for _ in range(length)]

    head = text(cell.shared)
    kinds = [True] * cell.followers + [False] * cell.strangers
    draw.shuffle(kinds)
    for number, sharing in enumerate([True, *kinds]):
        if sharing:
            yield f"r{number}", head + text(cell.own), [cell.shared]
        else:
            yield f"s{number}", text(cell.stranger_tokens), [cell.stranger_tokens // 2]


def table() -> list[Cell]:
    """Every pace, number of followers and shared length."""
    return [
        Cell(pace, followers, shared) for pace in PACES for shared in (163, 487, 1000, 4000) for followers in (4, 32)
    ]


def mixed() -> list[Cell]:
    """What holding could make worse: others wait too, own parts are long, few requests may run, or a step is short."""
    more: list[dict[str, Any]] = [
        *({"followers": 1, "shared": shared} for shared in (163, 1000, 4000)),
        {"followers": 1, "shared": 1000, "strangers": 16, "stranger_tokens": 1000},
        {"followers": 30, "shared": 163, "strangers": 4, "stranger_tokens": 4000},
        {"followers": 32, "shared": 163, "strangers": 64, "stranger_tokens": 200},
        {"followers": 8, "shared": 4000, "strangers": 8, "stranger_tokens": 500, "budget": 2048},
        {"followers": 16, "shared": 1000, "own": 3000, "strangers": 16, "stranger_tokens": 500},
        {"followers": 32, "shared": 1000, "running": 8},
    ]
    return [Cell(pace, **fields) for pace in PACES for fields in more]


class Unjudged(Worker):
    """Nothing is computed, so there is nothing to judge."""

    judges_keys = False

    def compute_row(self, name: str, start: int, end: int, output: Any) -> list[int]:
        return [ANSWER] if end == len(self.tokens[name]) else []


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: fields of a `Cell`; the gate "on" and "off"."""
    cell = Cell(**options)
    for gate in ("on", "off"):
        blocks = 64 + sum(len(tokens) // BLOCK + 8 for _, tokens, _ in requests_of(cell))
        core = Core(model, blocks, cell.budget, Unjudged(), running=cell.running, block=BLOCK)
        yield Scene(gate, [core], partial(run_cell, core, cell, gate == "on"))


def run_cell(core: Core, cell: Cell, gate: bool) -> Mapping[str, float]:
    """What the requests of a cell computed (tokens), and waited for a first token (seconds, mean)."""
    floor, token = PACES[cell.pace]
    scheduler, now, computed = core.scheduler, 0.0, 0
    checkpoints = scheduler.seamark
    checkpoints.turn_value._clock = checkpoints.gate._clock = lambda: now
    for _ in range(8):
        for tokens in (1, 1000):
            checkpoints.step_time.step_took(tokens, floor + token * tokens)
    if not gate:
        checkpoints.gate = None
    for name, prompt, hint in requests_of(cell):
        core.request(name, prompt, hint, max_tokens=8)
    first_tokens: dict[str, float] = {}
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        now += floor + token * output.total_num_scheduled_tokens
        names, sampled = list(output.num_scheduled_tokens), []
        for name in names:
            request = scheduler.requests[name]
            start = request.num_computed_tokens - output.num_scheduled_tokens[name]
            computed += max(0, min(request.num_computed_tokens, request.num_prompt_tokens) - start)
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([ANSWER] if done else [])
            if done:
                first_tokens.setdefault(name, now)
        output.seamark_planned_at = float("inf")  # the pace is given, not learnt
        index = {name: number for number, name in enumerate(names)}
        runner = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=sampled)
        scheduler.update_from_output(output, runner)
    return {"computed": computed, "first_token": statistics.fmean(first_tokens.values())}
