"""NVIDIA Dynamo's agentic trace, drawn anew.

Its recipes (Nemotron 3.5 Lightning and others) replay `64k_400_90kv_agent_new_noschedule_short_15perc.jsonl`. That file
is not copied; what is published of it is kept (`recipes/*/perf/README.md` of ai-dynamo/dynamo, vLLM's article on decode
context parallelism): 3,411 requests within a context of 262,144 tokens, half of them of 64k and more, 18 % below 8k,
4 % above 128k; 400 tokens out in the median, one output in ten longer than 6.9k; four shared heads, of 57,600 tokens
each, 90 % of 64,000; 68 to 77 % of all tokens found by a whole engine. How long sessions are is not published: it is
fitted to these hits. There are no times: who replays it says how many requests are under way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from tests.bench.traces.formats import BLOCK

REQUESTS = 3411

CONTEXT = 262_144  # tokens; longer prompts are errors in the published runs

HEAD = 57_600  # tokens that all agents of one kind begin with

HEADS = (4, 3, 2, 1)  # how often each kind is met

AGENTS = 0.67  # of the sessions; the others are subagents and short questions, which share nothing

GOES_ON = 0.4  # after each answer: sessions are cut out of a longer trace, and few of their turns are left

LEAST = 2 * BLOCK  # tokens of one's own, by which sessions are told apart

LONGEST_OUTPUT = 32_768


class _Spread(NamedTuple):
    """A log-normal distribution of tokens."""

    median: float
    sigma: float

    def draw(self, drawn: random.Random) -> int:
        return max(1, round(drawn.lognormvariate(math.log(self.median), self.sigma)))


OWN = _Spread(11_000, 0.95)  # of an agent's first prompt, behind its head

LONG_OWN, LONG = _Spread(150_000, 0.5), 0.06  # of few agents, that have read much

SMALL = _Spread(5_000, 1.2)  # a first prompt without a head

TOOL = _Spread(900, 1.1)  # that a tool's result adds

OUTPUT = _Spread(399, 2.2)


def records(count: int, seed: int) -> Iterator[dict[str, object]]:
    """As many requests in Mooncake's format, without timestamps, in the order in which they are sent."""
    drawn = random.Random(seed)  # a simulation
    turns: list[tuple[float, int, int, list[Hashable]]] = []
    session = 0
    while len(turns) < count:
        session += 1
        turns += _session(session, drawn)
    names: dict[Hashable, int] = {}
    for _, prompt, output, blocks in sorted(turns[:count], key=lambda turn: turn[0]):
        ids = [names.setdefault(block, len(names) + 1) for block in blocks]
        yield {"input_length": prompt, "output_length": output, "hash_ids": ids}


def _session(session: int, drawn: random.Random) -> Iterator[tuple[float, int, int, list[Hashable]]]:
    """Its turns: when each is sent, the prompt's and the output's tokens, and what its blocks hold."""
    head, kind = 0, 0
    if drawn.random() < AGENTS:
        head, (kind,) = HEAD, drawn.choices(range(len(HEADS)), HEADS)
        own = (LONG_OWN if drawn.random() < LONG else OWN).draw(drawn) + LEAST
    else:
        own = min(SMALL.draw(drawn), HEAD)
    shared, sent = head // BLOCK, drawn.random()
    while head + own <= CONTEXT:
        output = min(LONGEST_OUTPUT, OUTPUT.draw(drawn))
        blocks: list[Hashable] = [("head", kind, at) for at in range(shared)]
        # The last block is not full, and another one as soon as the session goes on.
        full = (head + own) // BLOCK
        blocks += [(session, at) for at in range(shared, full)]
        if (head + own) % BLOCK:
            blocks.append((session, full, own))
        yield sent, head + own, output, blocks
        if drawn.random() >= GOES_ON:
            return
        own += output + TOOL.draw(drawn)
        sent += drawn.random() / 20
