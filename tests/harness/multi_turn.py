"""Chats of many clients that take turns, as SGLang's benchmark of several rounds sends them: who comes when, with what.

Clients wait in one queue, and at each arrival of a Poisson process one of those whose last answer is there is drawn.
When answers are there is reckoned and not measured, so that whoever serves the chats gets them in the same order.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Seconds of a pass, and of each token in it: assumed for a model of 4 billion parameters on an H200.
FLOOR, TOKEN = 0.01, 0.00003

# What the template writes, as token ids: before a user's text, behind any text, and before an answer.
OPENER, CLOSER, ASKS = (2001, 2002, 2003), (2004, 2005), (2001, 2006, 2003)

WORDS = 2000  # ids of all other tokens are less

# Who keeps the states: vLLM by itself, SGLang before and after its cure, and Seamark.
ALONE, WHOLE_PATH, USED, OURS = "vLLM alone", "whole path", "state used", "Seamark"

BLOCK = 528  # tokens, of Qwen3.5-4B

GROUPS = 2  # of recurrent layers in the toy: blocks that a state takes

EARLIER = 2  # questions before the last one whose openers a hint names, too


@dataclass(frozen=True)
class Pattern:
    """The chats of one run. Lengths in tokens."""

    clients: int = 128
    rounds: int = 12
    question: int = 512  # of a user's text; the benchmark's default
    answer: int = 64
    rate: float = 64.0  # arrivals a second: half of the clients are being answered
    together: bool = True  # nobody begins a round before all have ended the one before
    seed: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the last prompt with its answer, at most."""
        around = len(OPENER) + 2 * len(CLOSER) + len(ASKS)
        return self.rounds * (self.question + self.answer + around)


@dataclass(frozen=True)
class Pool:
    """Room for so many states, and blocks for attention, apart from each other or in one pool."""

    states: int
    attention: int
    parted: bool

    @property
    def blocks(self) -> int:
        """Of the pool that has the states."""
        return self.states * GROUPS + self.attention * (not self.parted)


class Found(NamedTuple):
    """What the requests of a run found, in tokens, and those that are not their client's first."""

    prompts: int
    shareable: int  # with the prompt before, of the same client
    hit: int
    later: int  # requests
    whole: int  # those of them that lacked less than a block of it

    @property
    def hit_rate(self) -> float:
        """Tokens that hit of all tokens of prompts: SGLang's figure."""
        return self.hit / self.prompts

    @property
    def delivered(self) -> float:
        """Tokens that hit of those that could."""
        return self.hit / self.shareable

    @property
    def whole_rate(self) -> float:
        """Later requests that hit what they could."""
        return self.whole / self.later


class Turn(NamedTuple):
    """One request: when (seconds), and the client's which one it is, from 0."""

    at: float
    client: int
    number: int


def turns(pattern: Pattern) -> Iterator[Turn]:
    """All requests of a run, in their order; the same at each call."""
    draw = random.Random(f"{pattern}")
    ready, done = list(range(pattern.clients)), [0] * pattern.clients
    answering: deque[tuple[float, int]] = deque()
    now = 0.0
    while ready or answering:
        now += draw.expovariate(pattern.rate)
        while answering and answering[0][0] <= now:
            ready.append(answering.popleft()[1])
        behind = min((done[client] for client in (*ready, *(client for _, client in answering))), default=0)
        able = [client for client in ready if done[client] == behind or not pattern.together]
        if not able:
            continue
        client = draw.choice(able)
        ready.remove(client)
        yield Turn(now, client, done[client])
        done[client] += 1
        if done[client] < pattern.rounds:
            answering.append((now + pattern.answer * FLOOR, client))


class Chat:
    """One client's conversation, as token ids."""

    def __init__(self, pattern: Pattern, client: int) -> None:
        self._question = pattern.question
        self._draw = random.Random(f"{pattern.seed} {client}")
        self._history: list[int] = []
        self.shared = 0  # tokens of the last prompt with which the next one begins

    def ask(self) -> list[int]:
        """The prompt of the next turn."""
        question = [self._draw.randrange(WORDS) for _ in range(self._question)]
        self._history += [*OPENER, *question, *CLOSER, *ASKS]
        return list(self._history)

    def answered(self, tokens: Sequence[int]) -> None:
        """The answer to the last prompt has come."""
        self.shared = len(self._history)
        self._history += [*tokens, *CLOSER]


def hint(number: int) -> list[int | str]:
    """What the gateway says of turn `number`: behind the openers of the last questions, and the end of the turn."""
    opener = ",".join(map(str, OPENER))
    named = range(min(EARLIER, max(number - 1, 0)) + 1)
    return [*(f"last-{skipped}:{opener}" if skipped else f"last:{opener}" for skipped in named), -len(ASKS)]
