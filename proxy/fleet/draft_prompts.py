"""Prompts on which drafts are tried: drawn token ids, of lengths and in orders in which hits can go wrong.

No tokenizer is known here. Ids are drawn from a range that vocabularies have, apart from where special tokens lie, and
phrases come again and again, so that a model has something to guess.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

# Ranges of ids, the first that the worker does not refuse. Below 1,000, some tokenizers have special tokens alone.
RANGES = ((1000, 30_000), (256, 1000), (16, 128))

ANSWER = 32  # tokens

SHORT, LONG = 163, 448  # tokens

LONGEST_EDGE = 8192  # tokens of a cache block whose end an answer is to cross

PHRASE, POOL = 24, 48  # tokens of a phrase, and ids that a prompt is made of
CHANGED = 1 / 12  # of a phrase's tokens, each time it comes

# `edge`: its answer crosses the end of a cache block. `turn`: it goes on behind an answer. `together`: its state is
# written beside another one. `staggered`: while it is answered, others come and end, so that rows of a batch move.
TrialKind = Literal["short", "long", "together", "edge", "turn", "staggered", "client"]

BUILT_IN: tuple[TrialKind, ...] = ("short", "long", "together", "edge", "turn", "staggered")


@dataclass(frozen=True)
class TrialPrompt:
    """One prompt to be recomputed, and to be continued from the cache."""

    kind: TrialKind
    ids: Sequence[int]
    hint: int  # tokens, up to which a state is asked for; one at least is left to compute

    def foretold(self, unit: int, ahead: int) -> int:
        """Tokens that the second request is to find: whole units."""
        return max(0, self.hint - ahead) // unit * unit


def drawn(length: int, ids: tuple[int, int], draw: random.Random) -> list[int]:
    """So many ids of this range."""
    pool = [draw.randrange(*ids) for _ in range(POOL)]
    phrase = [draw.choice(pool) for _ in range(PHRASE)]
    prompt: list[int] = []
    while len(prompt) < length:
        prompt += [draw.choice(pool) if draw.random() < CHANGED else each for each in phrase]
    return prompt[:length]


def built_in(kind: TrialKind, ids: tuple[int, int], block: int, most: int, draw: random.Random) -> TrialPrompt:
    """A new prompt of this kind. `block`: tokens of a cache block; `most`: tokens that fit."""
    length = LONG if kind in ("long", "together") else SHORT
    if kind == "edge":
        half = ANSWER // 2
        length = next((each for each in range(block - half, most, block) if each >= SHORT), block - half)
        if not 0 < length <= min(most, LONGEST_EDGE):
            length = SHORT
    length = max(2, min(length, most))
    return TrialPrompt(kind, drawn(length, ids, draw), length - 1)


def kinds() -> Iterator[TrialKind]:
    """Each kind in turn, for ever."""
    while True:
        yield from BUILT_IN
