"""Prompts on which drafts are tried: drawn token ids, of lengths and in orders in which hits can go wrong.

Ids are drawn apart from where special tokens lie, and phrases come again and again, so that a model has something to
guess.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

FIRST_ID, LAST_ID = 1000, 30_000  # of the vocabulary, as far as it goes; of a small one the upper three quarters

ANSWER = 32  # tokens

SHORT, LONG = 163, 448  # tokens

LONGEST_EDGE = 8192  # tokens of a cache block whose end an answer is to cross

PHRASE, POOL = 24, 48  # tokens of a phrase, and ids that a prompt is made of
CHANGED = 1 / 12  # of a phrase's tokens, each time it comes

CACHE_SHARE = 1 / 4  # of the cache, that one prompt may take

BETWEEN = 40  # tokens of a turn behind an answer

# `edge`: its answer crosses the end of a cache block. `turn`: it goes on behind an answer. `together`: its state is
# written beside another one. `staggered`: while it is answered, others come and end, so that rows of a batch move.
TrialKind = Literal["short", "long", "together", "edge", "turn", "staggered"]

KINDS: tuple[TrialKind, ...] = ("short", "long", "together", "edge", "turn", "staggered")


class Facts(NamedTuple):
    """What prompts for an engine depend on. Lengths in tokens."""

    vocabulary: int
    longest: int  # prompt and answer
    cache: int  # that fit into it; 0: vLLM does not say
    block: int
    unit: int  # what a hit is a multiple of
    ahead: int  # past a state that a prefix has to share


class TrialPrompt(NamedTuple):
    """One prompt to be recomputed, and to be continued from the cache."""

    ids: Sequence[int]
    hint: int  # tokens, up to which a state is asked for; one at least is left to compute

    def foretold(self, facts: Facts) -> int:
        """Tokens that the second request is to find: whole units."""
        return max(0, self.hint - facts.ahead) // facts.unit * facts.unit


def drawn(length: int, vocabulary: int, draw: random.Random) -> list[int]:
    """So many ids."""
    pool = [draw.randrange(min(FIRST_ID, vocabulary // 4), min(LAST_ID, vocabulary)) for _ in range(POOL)]
    phrase = [draw.choice(pool) for _ in range(PHRASE)]
    prompt: list[int] = []
    while len(prompt) < length:
        prompt += [draw.choice(pool) if draw.random() < CHANGED else each for each in phrase]
    return prompt[:length]


def prompt_of(kind: TrialKind, facts: Facts, draw: random.Random) -> TrialPrompt:
    """A new one of this kind, which leaves room for answers and a turn."""
    most = min(facts.longest - 4 * ANSWER - BETWEEN, int(facts.cache * CACHE_SHARE) or facts.longest)
    length = LONG if kind in ("long", "together") else SHORT
    if kind == "edge":
        half = ANSWER // 2
        length = next((each for each in range(facts.block - half, most, facts.block) if each >= SHORT), 0)
        if not 0 < length <= LONGEST_EDGE:
            length = SHORT
    length = max(2, min(length, most))
    return TrialPrompt(drawn(length, facts.vocabulary, draw), length - 1)
