"""Rounds of hinted prompts by token ids, asked of a worker over HTTP one after the other, and what they came to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import complete, open_client
from proxy.bench.harness.servers import Server
from tests.harness.restarts import UNIT, Round


class Turn(NamedTuple):
    """A prompt, and where its states are wanted."""

    prompt: list[int]
    ends: tuple[int, ...]


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


def metrics_of(server: Server) -> list[str]:
    """Lines of the worker's /metrics."""
    return httpx.get(server.url + "/metrics", timeout=30).text.splitlines()


async def ask(server: Server, turns: Sequence[Turn], **fields: Any) -> Round:
    """`fields`: further ones of each request's body."""
    answers, began = [], time.monotonic()
    async with open_client(240) as client:
        for turn in turns:
            hint = {"seamark_boundaries": [end // UNIT * UNIT for end in turn.ends]}
            answers.append(await complete(client, server.url, turn.prompt, vllm_xargs=hint, **fields))
    return Round(answers, time.monotonic() - began)
