"""Traffic in which everything happens that the dashboards show: hits of every degree, waits, evictions, odd hints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from proxy.bench.client import open_client, status_of
from proxy.bench.engines import MODEL_NAME, Server
from proxy.bench.prompts import prose
from proxy.bench.sending import CHAT, COMPLETION

# The engine's: room for some ten long prompts, of which each takes many steps.
TIGHT = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")
# The gateways'
IN_TURN = ("--max-inflight", "3")  # some wait there
IN_SHADOW = ("--shadow",)
CAREFUL = ("--self-check-interval", "1")
CHECKED_SECONDS = 30.0  # for an idle engine to be looked at
FOLLOWERS = 6  # more than that gateway lets through at once
PRESSING = 12  # more than an engine runs at once
# Words of a prefix that is worth waiting for; and of prompts of which the cache holds only some, and not all that grow.
LONG_WORDS, PRESSING_WORDS = 2600, 1500
PRESSING_ANSWER = 200  # tokens
USAGE = {"include_usage": True}
ODD_HINTS: tuple[Any, ...] = ([-16, 10**9, 64], "64", [3])


class Rig(NamedTuple):
    """What the traffic goes to."""

    engine: Server  # with hardly any room
    gateway: Server  # before it, which lets only a few requests through at once
    wide_gateway: Server  # before it, which lets all through
    shadow: Server  # before it, which sends no hints
    careful: Server  # before it, which compares its answers in idle moments


async def one_round(rig: Rig, number: int) -> None:
    """All of it once, the same for the same number. Raises `httpx.HTTPStatusError` where an answer is an error."""
    async with open_client() as client:
        await _hits_and_misses(client, rig.gateway.url, number)
        await _odd_requests(client, rig, number)
        await _followers(client, rig.gateway.url, number)
        await _pressure(client, rig.wide_gateway.url, number)
        await _without_hints(client, rig.shadow.url, number)
        await _compared(client, rig.careful.url, number)


async def _hits_and_misses(client: httpx.AsyncClient, url: str, number: int) -> None:
    system = f"Round {number}. {prose(300, number)}"
    for question in ("What is the tide?", "And the wind?"):
        await _chat(client, url, system, question)
    for year in (2026, 2027):  # what changes from day to day costs the hit
        await _chat(client, url, f"{system} Today is {year}-11-{number % 28 + 1:02}. {prose(40, number)}", "Which day?")
    for words in (4, 200):  # steps of every length, for the engine to learn from
        await _chat(client, url, prose(words, number), "Yes?", max_tokens=8)


async def _odd_requests(client: httpx.AsyncClient, rig: Rig, number: int) -> None:
    for hint in ODD_HINTS:
        body = {"prompt": f"{number} {prose(100, number)}", "max_tokens": 4, "vllm_xargs": {"seamark_boundaries": hint}}
        (await client.post(rig.engine.url + COMPLETION, json={"model": MODEL_NAME, **body})).raise_for_status()
    body = {"model": f"nobody's {number}", "messages": _messages(None, "?")}
    if (await client.post(rig.gateway.url + CHAT, json=body)).status_code != 404:
        raise RuntimeError("a model that nobody serves was answered")


async def _followers(client: httpx.AsyncClient, url: str, number: int) -> None:
    long = f"Round {number}. {prose(LONG_WORDS, 1000 + number)}"
    await asyncio.gather(*(_chat(client, url, long, f"{each}?", stream=True) for each in range(FOLLOWERS)))


async def _pressure(client: httpx.AsyncClient, url: str, number: int) -> None:
    """A conversation whose last turn is gone when it goes on, while what all share is still there."""
    system = f"Pressure {number}. {prose(200, 500 + number)}"
    first = _messages(system, prose(PRESSING_WORDS, 600 + number))
    await _send(client, url, {"messages": first})
    others = (prose(PRESSING_WORDS, 700 + 50 * number + each) for each in range(PRESSING))
    await asyncio.gather(*(_chat(client, url, system, other, max_tokens=PRESSING_ANSWER) for other in others))
    await _send(client, url, {"messages": [*first, {"role": "assistant", "content": "Yes."}, *_messages(None, "So?")]})


async def _without_hints(client: httpx.AsyncClient, url: str, number: int) -> None:
    """Streams of every length, for the shadow to learn from."""
    system = f"Shadow {number}. {prose(200, 900 + number)}"
    for words in (5, 40, 80, 120, 160, 240, 320, 400):
        await _chat(client, url, system, prose(words, number + words), stream=True, stream_options=USAGE)


async def _compared(client: httpx.AsyncClient, url: str, number: int) -> None:
    """A shared prompt, and quiet until something has been looked at. Raises `RuntimeError` where it never is."""
    system = f"Careful {number}. {prose(200, 950 + number)}"
    for question in ("High tide?", "Low tide?", "Slack water?"):
        await _chat(client, url, system, question)
    deadline = time.monotonic() + CHECKED_SECONDS
    while not (await status_of(client, url))["self_check"]["checked"]:
        if time.monotonic() > deadline:
            raise RuntimeError("no answer was compared")
        await asyncio.sleep(0.2)


def _messages(system: str | None, question: str) -> list[Mapping[str, str]]:
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": question}]


async def _chat(client: httpx.AsyncClient, url: str, system: str, question: str, **fields: Any) -> None:
    await _send(client, url, {"messages": _messages(system, question), **fields})


async def _send(client: httpx.AsyncClient, url: str, body: Mapping[str, Any]) -> None:
    body = {"model": MODEL_NAME, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **body}
    (await client.post(url + CHAT, json=body)).raise_for_status()
