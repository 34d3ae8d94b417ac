"""Cells of shared and own lengths: how much of its shared tokens the second of two prompts hits.

A cell is two requests with a prefix that no other cell has. Their shared tokens are counted on the prompts, never taken
from hints.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import ask, complete, tokens_of
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME
from proxy.bench.stories import UNIT, floored
from proxy.boundaries.token_ids import common_prefix
from proxy.fleet import worker_metrics
from proxy.fleet.worker_metrics import EngineInfo

WANTED = 0.99  # of all shareable tokens, by each of Seamark's two ways

FIT_ATTEMPTS = 3

OPENINGS = ("What", "Please")  # of the two own parts: they part at their first token


class Lengths(NamedTuple):
    """A cell's two lengths in tokens."""

    shared: int
    own: int  # of each prompt, behind the shared part


@dataclass(frozen=True)
class CellPlan:
    """Which cells are measured; lengths in tokens."""

    shared: tuple[int, ...]
    own: tuple[int, ...]
    sweep_own: int  # own length of the curve over shared lengths
    sweep_to: int  # its longest shared length, in whole cache blocks; 0: no curve

    @property
    def grid(self) -> tuple[Lengths, ...]:
        """The cells of the grid."""
        return tuple(Lengths(shared, own) for shared in self.shared for own in self.own)

    def sweep(self, block_size: int) -> tuple[Lengths, ...]:
        """Cells of the curve: both sides of the places in each cache block where a hit of vLLM's changes.

        These are the block's edge, and where the first prompt's own part begins to reach into the next block: vLLM then
        keeps the state of that edge, which lies behind the shared part.
        """
        if not self.sweep_to:
            return ()
        reach = max(2, block_size - self.sweep_own)
        steps = (0, reach // 2, reach - 2, reach + 2, block_size - 1)
        end = self.sweep_to // block_size * block_size
        lengths = {edge + step for edge in range(0, end, block_size) for step in steps} | {self.shared[0], end}
        usable = sorted(length for length in lengths if length >= self.shared[0])
        return tuple(Lengths(shared, self.sweep_own) for shared in usable)


# The curve ends below the 2,048 tokens of a step, so that no hit on it depends on where a step ends.
FULL = CellPlan((50, 75, 110, 163, 260, 430, 800, 1500, 3000, 6000), (5, 12, 30, 75, 190, 480, 1200, 3000), 75, 1920)

QUICK = CellPlan((50, 163, 469, 1200), (5, 75, 600), 75, 0)


@dataclass(frozen=True)
class Cell:
    """Two requests, the second one's hit. Lengths in tokens."""

    wanted: Lengths  # its place in the grid
    shared: int  # longest common prefix of the two prompts
    own: int  # the second prompt's tokens behind it
    delivered: int  # the second request's cached tokens, as the engine reports them

    @property
    def oracle(self) -> int:
        """Tokens a perfect cache with the finest match unit of any engine here gives."""
        return floored(self.shared)

    @property
    def efficiency(self) -> float:
        """Delivered of what could be."""
        return self.delivered / self.oracle


@dataclass(frozen=True)
class Mode:
    """One way to an engine, measured."""

    name: str
    ours: bool
    cells: tuple[Cell, ...]  # of the grid
    sweep: tuple[Cell, ...]  # of the curve
    seconds: float

    @property
    def efficiency(self) -> float:
        """Delivered tokens of all cells, of what could be."""
        return sum(cell.delivered for cell in self.cells) / sum(cell.oracle for cell in self.cells)

    @property
    def worst(self) -> Cell:
        """The cell, curve included, that is given the smallest part; the most tokens among equals."""
        return min(self.cells + self.sweep, key=lambda cell: (cell.efficiency, -cell.oracle))

    def efficiency_at(self, unit: int, ahead: int) -> float:
        """As `efficiency`, of what a match unit of `unit` tokens and drafts that need `ahead` more allow."""
        possible = sum(floored(max(cell.shared - ahead, 0), unit) for cell in self.cells)
        return sum(cell.delivered for cell in self.cells) / possible


@dataclass(frozen=True)
class CellFamily:
    """All modes on one model."""

    name: str
    block_size: int  # tokens of a cache block
    plan: CellPlan
    modes: tuple[Mode, ...]
    seconds: float
    unit: int = UNIT  # match unit of Seamark's engine, tokens
    ahead: int = 0  # tokens past a state that its drafts need a prefix to share

    def allowed(self, mode: Mode) -> float:
        """The part that `mode` gives of what the match unit and the drafts of Seamark's engine allow."""
        return mode.efficiency_at(self.unit, self.ahead)

    @property
    def short(self) -> list[Mode]:
        """Seamark's modes that give less than what is wanted of what their engine allows."""
        return [mode for mode in self.modes if mode.ours and self.allowed(mode) < WANTED]


Measure = Callable[[Lengths], Awaitable[Cell]]


async def source_tokens(client: httpx.AsyncClient, url: str, length: int) -> list[int]:
    """`length` tokens of prose in the vocabulary of the worker at `url`."""
    body = {"model": MODEL_NAME, "prompt": prose(length, seed=0), "add_special_tokens": False}
    response = await client.post(url + "/tokenize", json=body)
    response.raise_for_status()
    tokens: list[int] = response.json()["tokens"]
    return tokens[:length]


def chats(client: httpx.AsyncClient, gateway: str, worker: str, tokens: Sequence[int]) -> Measure:
    """Cells of chats through `gateway`: the system prompt is shared, the user's text is not.

    `worker` is asked how the engine tokenises them, so lengths can be some tokens off where a template needs more.
    """

    async def text_of(length: int) -> str:
        body = {"model": MODEL_NAME, "tokens": tokens[: max(0, length)]}
        response = await client.post(worker + "/detokenize", json=body)
        response.raise_for_status()
        text: str = response.json()["prompt"]
        return text

    async def measure(wanted: Lengths) -> Cell:
        system, user = wanted
        for _ in range(FIT_ATTEMPTS):
            content = f"Handbook {wanted.shared}/{wanted.own}. {await text_of(system)}"
            text = await text_of(user)
            pair = [
                [{"role": "system", "content": content}, {"role": "user", "content": f"{opening} {text}"}]
                for opening in OPENINGS
            ]
            first, second = [await tokens_of(client, worker, chat) for chat in pair]
            shared = common_prefix(first, second)
            own = len(second) - shared
            if (shared, own) == wanted:
                break
            system, user = system + wanted.shared - shared, max(0, user + wanted.own - own)
        await ask(client, gateway, pair[0], 1)
        return Cell(wanted, shared, own, (await ask(client, gateway, pair[1], 1)).cached_tokens or 0)

    return measure


def token_prompts(client: httpx.AsyncClient, worker: str, tokens: Sequence[int], hinted: bool) -> Measure:
    """Cells of prompts given to `worker` as token ids; `hinted`: with the end of the shared part as the boundary."""

    async def measure(wanted: Lengths) -> Cell:
        draw = random.Random(f"{hinted} {wanted}")
        prefix = draw.choices(tokens, k=wanted.shared)
        rests = [draw.choices(tokens, k=wanted.own - 1) for _ in range(2)]
        first, second = ([*prefix, tokens[index], *rest] for index, rest in enumerate(rests))
        fields: dict[str, Any] = {"max_tokens": 1}
        if hinted:
            fields["vllm_xargs"] = {"seamark_boundaries": [wanted.shared]}
        await complete(client, worker, first, **fields)
        answer = await complete(client, worker, second, **fields)
        shared = common_prefix(first, second)
        return Cell(wanted, shared, len(second) - shared, answer.cached_tokens or 0)

    return measure


async def measured(name: str, ours: bool, measure: Measure, grid: Sequence[Lengths], sweep: Sequence[Lengths]) -> Mode:
    """All cells of a mode, one request at a time. A cell of both is measured once: its prefix has to be new."""
    began = time.monotonic()
    found = {lengths: await measure(lengths) for lengths in dict.fromkeys((*grid, *sweep))}
    cells, curve = (tuple(found[lengths] for lengths in wanted) for wanted in (grid, sweep))
    return Mode(name, ours, cells, curve, time.monotonic() - began)


async def measure_seamark(
    client: httpx.AsyncClient, gateway: str, worker: str, plan: CellPlan
) -> tuple[EngineInfo, list[Mode]]:
    """The worker's engine, and Seamark's two modes: chats through the gateway, hints by hand."""
    tokens = await source_tokens(client, worker, max(*plan.shared, *plan.own))
    await ask(client, gateway, [{"role": "user", "content": "Seamark"}], 1)  # a process's first request pays for set-up
    engine = worker_metrics.read((await client.get(worker + "/metrics")).text).engine
    if engine is None:
        raise RuntimeError(f"{worker}: the patches are not live")
    sweep = plan.sweep(engine.block_size)
    return engine, [
        await measured("Seamark, gateway", True, chats(client, gateway, worker, tokens), plan.grid, sweep),
        await measured("Seamark, hints", True, token_prompts(client, worker, tokens, True), plan.grid, ()),
    ]


async def measure_baseline(
    client: httpx.AsyncClient, name: str, worker: str, plan: CellPlan, sweep: Sequence[Lengths]
) -> Mode:
    """An engine without hints, given token ids."""
    tokens = await source_tokens(client, worker, max(*plan.shared, *plan.own))
    return await measured(name, False, token_prompts(client, worker, tokens, False), plan.grid, sweep)
