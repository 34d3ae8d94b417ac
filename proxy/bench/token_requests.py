"""Requests as token ids, so that a length is exact and nothing but the engine is timed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

from proxy.bench.engines import MODEL_NAME

TOKEN_IDS = range(10, 4000)  # ordinary tokens of the generated models
TAIL = 5  # tokens between the last boundary and the prompt's end


class Reply(NamedTuple):
    """A finished request. Lengths in tokens."""

    seconds: float  # from the last byte handed over to the whole answer
    cached_tokens: int


def fresh_tokens(length: int, *seed: object) -> list[int]:
    """Random tokens, the same for the same seed."""
    return random.Random(repr(seed)).choices(TOKEN_IDS, k=length)


def three_boundaries(shared: int, length: int) -> list[int]:
    """The end of the shared part of a prompt of `length` tokens, a place behind it, and one near the end."""
    return sorted({shared, shared + (length - shared) // 3, max(shared, length - TAIL)})


async def request(
    client: httpx.AsyncClient, url: str, prompt: Sequence[int], tokens: int, boundaries: Sequence[int] = ()
) -> Reply:
    """A greedy completion of exactly `tokens` tokens, hinted where there are `boundaries`.

    Raises `httpx.HTTPStatusError` for an error answer.
    """
    body = {"model": MODEL_NAME, "prompt": list(prompt), "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    if boundaries:
        body["vllm_xargs"] = {"seamark_boundaries": list(boundaries)}
    content = json.dumps(body).encode()
    sent = time.perf_counter()
    response = await client.post(url + "/v1/completions", content=content, headers={"content-type": "application/json"})
    seconds = time.perf_counter() - sent
    response.raise_for_status()
    details = response.json()["usage"].get("prompt_tokens_details") or {}
    return Reply(seconds, details.get("cached_tokens") or 0)
