"""Rounds of hinted prompts by token ids, asked of a worker over HTTP one after the other, and what they came to."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import Answer, complete, open_client
from proxy.bench.harness.exact import FLOAT32, compare
from proxy.bench.harness.servers import Server

UNIT = 16


class Turn(NamedTuple):
    """A prompt, and where its states are wanted."""

    prompt: list[int]
    ends: tuple[int, ...]


class Round(NamedTuple):
    """What a round of prompts came to."""

    answers: list[Answer]
    hits: int  # tokens


def tokens(draw: Random, count: int) -> list[int]:
    """So many token ids of the generated models."""
    return [draw.randrange(20, 400) for _ in range(count)]


def two_rounds(draw: Random) -> tuple[list[Turn], list[Turn]]:
    """Twelve first turns of 250 to 1,395 tokens behind three heads, and the second turns that follow them."""
    heads = [tokens(draw, count) for count in (150, 417, 800)]
    pairs = [(heads[number % 3], tokens(draw, 100 + 45 * number)) for number in range(12)]
    first = [Turn(head + tail, (len(head), len(head) + len(tail) - 3)) for head, tail in pairs]
    second = [Turn(turn.prompt + tokens(draw, 70), (turn.ends[-1], len(turn.prompt) + 60)) for turn in first]
    return first, second


def told(server: Server) -> dict[str, float]:
    """Sums of the worker's own counters by name, their labels left out."""
    sums: dict[str, float] = {}
    for line in metrics_of(server):
        if found := re.match(r"(seamark_\w+)(?:\{[^}]*\})? (\S+)$", line):
            sums[found[1]] = sums.get(found[1], 0.0) + float(found[2])
    return sums


def metrics_of(server: Server) -> list[str]:
    """Lines of the worker's /metrics."""
    return httpx.get(server.url + "/metrics", timeout=30).text.splitlines()


async def ask(server: Server, turns: Sequence[Turn], **fields: Any) -> Round:
    """`fields`: further ones of each request's body."""
    answers = []
    async with open_client(240) as client:
        for turn in turns:
            hint = {"seamark_boundaries": [end // UNIT * UNIT for end in turn.ends]}
            answers.append(await complete(client, server.url, turn.prompt, vllm_xargs=hint, **fields))
    return Round(answers, sum(answer.cached_tokens or 0 for answer in answers))


def differing(found: Round, wanted: Round) -> int:
    """Answers that are not the wanted ones: other tokens, or a log-probability further off than 1e-4."""
    pairs = zip(found.answers, wanted.answers, strict=True)
    return sum(not FLOAT32.accepts(compare(answer, right)) for answer, right in pairs)


def kill(server: Server) -> None:
    """SIGKILL, all of its processes."""
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
