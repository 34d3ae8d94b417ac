"""The fan-outs that are simulated (`simulated_fan_out.py`): who comes when, and how fast the engine is."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

UNIT = 16  # tokens

# Seconds of a pass, and of each token in it. Spark: one report of Nemotron-3-Super; H200: assumed for a small model.
PACES = {"Spark": (0.4, 0.0005), "H200": (0.02, 0.00003)}

OWN_TOKENS = 60

STAGGER = 0.25  # of a pass, between two arrivals

STRANGER_TOKENS = 2000


class Arrival(NamedTuple):
    """One request: when (seconds), its prompt, and the positions it hints at."""

    at: float
    name: str
    tokens: list[int]
    hint: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """A leader and its followers. Times in seconds, lengths in tokens."""

    pace: str
    followers: int
    shared: int
    staggered: bool = False
    own: int = OWN_TOKENS
    strangers: int = 0  # requests between them that share nothing
    stranger_tokens: int = STRANGER_TOKENS
    budget: int = 8192
    running: int = 256

    @property
    def floor(self) -> float:
        return PACES[self.pace][0]

    @property
    def token(self) -> float:
        return PACES[self.pace][1]

    @property
    def ideal(self) -> int:
        """Tokens that have to be computed if the shared part is computed once, up to the match unit."""
        found = self.shared // UNIT * UNIT
        return found + (self.followers + 1) * (self.shared - found + self.own) + self.strangers * self.stranger_tokens


def arrivals(cell: Cell) -> Iterator[Arrival]:
    """A cell's requests, the same at each call."""
    draw = random.Random(f"{cell}")
    gap = STAGGER * cell.floor if cell.staggered else 0.0

    def text(length: int) -> list[int]:
        return [draw.randrange(1000) for _ in range(length)]

    head = text(cell.shared)
    kinds = [True] * cell.followers + [False] * cell.strangers
    draw.shuffle(kinds)
    for number, sharing in enumerate([True, *kinds]):
        if sharing:
            yield Arrival(number * gap, f"r{number}", head + text(cell.own), (cell.shared,))
        else:
            yield Arrival(number * gap, f"s{number}", text(cell.stranger_tokens), (cell.stranger_tokens // 2,))


def table() -> list[Cell]:
    """Every pace, number of followers and shared length, all at once."""
    return [
        Cell(pace, followers, shared)
        for pace in PACES
        for shared in (163, 487, 1000, 4000)
        for followers in (4, 8, 32, 128)
    ]


def mixed() -> list[Cell]:
    """What holding could make worse: others wait too, own parts are long, few requests may run, or a step is short."""
    alone = [Cell(pace, 1, shared) for pace in PACES for shared in (163, 1000, 4000)]
    among_others = [
        Cell(pace, followers, shared, strangers=strangers, stranger_tokens=length, budget=budget)
        for pace in PACES
        for followers, shared, strangers, length, budget in (
            (1, 1000, 16, 1000, 8192),
            (1, 4000, 16, 2000, 8192),
            (4, 1000, 32, 2000, 8192),
            (8, 163, 8, 2000, 8192),
            (30, 163, 4, 4000, 8192),
            (32, 163, 64, 200, 8192),
            (32, 1000, 32, 2000, 8192),
            (32, 1000, 8, 2000, 2048),
            (8, 4000, 8, 500, 2048),
        )
    ]
    long_tails = [
        Cell(pace, 16, shared, own=own, strangers=strangers, stranger_tokens=500)
        for pace in PACES
        for shared, own, strangers in ((163, 2000, 0), (1000, 3000, 16))
    ]
    narrow = [
        Cell(pace, followers, shared, staggered, budget=budget, running=running)
        for pace in PACES
        for followers, shared, staggered, budget, running in (
            (32, 163, False, 8192, 8),
            (32, 1000, False, 8192, 8),
            (32, 1000, True, 2048, 8),
            (8, 4000, False, 2048, 64),
            (32, 4000, True, 1024, 64),
        )
    ]
    return alone + among_others + long_tails + narrow
