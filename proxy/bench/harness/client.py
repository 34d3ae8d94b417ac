"""A chat request as an SDK would send it, timed, with everything an exactness check needs."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.servers import MODEL_NAME

Messages = Sequence[Mapping[str, Any]]

TOP_LOGPROBS = 5


class Step(NamedTuple):
    """One generated token."""

    token: str  # "token_id:<n>"
    logprob: float
    top: Mapping[str, float]  # the most likely tokens and their logprobs


class Answer(NamedTuple):
    """A finished answer. Times in seconds on the monotonic clock, lengths in tokens."""

    steps: tuple[Step, ...]
    prompt_tokens: int
    cached_tokens: int | None
    sent: float
    first_token: float
    finished: float

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first_token - self.sent


def open_client(seconds: float = 300.0) -> httpx.AsyncClient:
    """A client with a connection for each request, which may take `seconds`.

    A server closes an idle connection whenever it likes, even as the next request is on its way.
    """
    return httpx.AsyncClient(timeout=seconds, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))


async def ask(client: httpx.AsyncClient, url: str, messages: Messages, tokens: int, **fields: Any) -> Answer:
    """Stream a greedy answer of exactly `tokens` tokens. Raises `RuntimeError` for an error answer."""
    body = {
        "model": MODEL_NAME,
        "messages": messages,
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
        **fields,
    }
    steps: list[Step] = []
    usage: Mapping[str, Any] = {}
    first_token = 0.0
    sent = time.perf_counter()
    async with client.stream("POST", url + "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{url}: {response.status_code} {(await response.aread()).decode()[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(f"{url}: {event['error']}")
            for choice in event["choices"]:
                for entry in (choice.get("logprobs") or {}).get("content") or ():
                    first_token = first_token or time.perf_counter()
                    top = {candidate["token"]: candidate["logprob"] for candidate in entry["top_logprobs"]}
                    steps.append(Step(entry["token"], entry["logprob"], top))
            usage = event.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        tuple(steps), usage["prompt_tokens"], details.get("cached_tokens"), sent, first_token, time.perf_counter()
    )


async def ask_all(
    client: httpx.AsyncClient, url: str, prompts: Sequence[Messages], tokens: int, parallel: int, **fields: Any
) -> list[Answer]:
    """Answers to all `prompts`, at most `parallel` at a time."""
    gate = asyncio.Semaphore(parallel)

    async def one(messages: Messages) -> Answer:
        async with gate:
            return await ask(client, url, messages, tokens, **fields)

    return list(await asyncio.gather(*(one(messages) for messages in prompts)))


async def status_of(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """What the gateway at `url` says of itself."""
    return (await client.get(url + "/seamark/status")).json()


async def tokens_of(client: httpx.AsyncClient, url: str, messages: Messages) -> list[int]:
    """The prompt as the engine tokenises it."""
    response = await client.post(url + "/tokenize", json={"model": MODEL_NAME, "messages": messages})
    response.raise_for_status()
    return response.json()["tokens"]


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
