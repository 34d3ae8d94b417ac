"""Pairs of prompts over a grid of shared and own lengths: how much of what two share the second one hits.

Shared tokens are counted on the prompts, never taken from hints. All lengths in tokens.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from proxy.bench.harness.client import ask, complete, tokens_of
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME
from proxy.boundaries.token_ids import common_prefix

SHARED, OWN = (50, 163, 469, 1200), (5, 75, 600)

FIT_ATTEMPTS = 3

OPENINGS = ("What", "Please")  # of the two own parts: they part at their first token


class Cell(NamedTuple):
    """Two requests with a prefix that no other cell has, and the second one's hit."""

    wanted: int  # shared tokens; a template may need some more
    shared: int  # longest common prefix of the two prompts
    delivered: int  # as the engine reports it


async def chat_cells(client: httpx.AsyncClient, gateway: str, worker: str) -> list[Cell]:
    """Chats through `gateway`: the system prompt is shared, the user's text is not. `worker` tokenises them."""
    tokens = await _source(client, worker)
    return [
        await _chat_cell(client, gateway, worker, tokens, shared, own) for shared, own in itertools.product(SHARED, OWN)
    ]


async def token_cells(client: httpx.AsyncClient, worker: str, *, hinted: bool) -> list[Cell]:
    """Prompts given to `worker` as token ids; `hinted`: with the end of the shared part as the boundary."""
    tokens = await _source(client, worker)
    found = []
    for shared, own in itertools.product(SHARED, OWN):
        draw = random.Random(f"{hinted} {shared} {own}")
        prefix = draw.choices(tokens, k=shared)
        pair = [[*prefix, tokens[number], *draw.choices(tokens, k=own - 1)] for number in range(2)]
        fields = {"vllm_xargs": {"seamark_boundaries": [shared]}} if hinted else {}
        answers = [await complete(client, worker, prompt, max_tokens=1, **fields) for prompt in pair]
        found.append(Cell(shared, common_prefix(*pair), answers[1].cached_tokens or 0))
    return found


async def _source(client: httpx.AsyncClient, worker: str) -> list[int]:
    """Tokens of prose in the worker's vocabulary, as many as the longest part of a prompt."""
    body = {"model": MODEL_NAME, "prompt": prose(max(*SHARED, *OWN), seed=0), "add_special_tokens": False}
    tokens: list[int] = (await client.post(worker + "/tokenize", json=body)).raise_for_status().json()["tokens"]
    return tokens


async def _chat_cell(
    client: httpx.AsyncClient, gateway: str, worker: str, tokens: Sequence[int], wanted_shared: int, wanted_own: int
) -> Cell:
    async def text_of(length: int) -> str:
        body = {"model": MODEL_NAME, "tokens": tokens[: max(0, length)]}
        text: str = (await client.post(worker + "/detokenize", json=body)).raise_for_status().json()["prompt"]
        return text

    system, user = wanted_shared, wanted_own
    for _ in range(FIT_ATTEMPTS):
        content = f"Handbook {wanted_shared}/{wanted_own}. {await text_of(system)}"
        text = await text_of(user)
        pair = [
            [{"role": "system", "content": content}, {"role": "user", "content": f"{opening} {text}"}]
            for opening in OPENINGS
        ]
        first, second = [await tokens_of(client, worker, chat) for chat in pair]
        shared = common_prefix(first, second)
        system, user = system + wanted_shared - shared, max(0, user + wanted_own - (len(second) - shared))
        if shared == wanted_shared:
            break
    answers = [await ask(client, gateway, chat, 1) for chat in pair]
    return Cell(wanted_shared, shared, answers[1].cached_tokens or 0)
