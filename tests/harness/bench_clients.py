"""Clients of the benchmarks that do what only tests want: leave early, and draw prompts as token ids."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import TimedAnswer, TimedEvent, answer_of, events_of

TOKEN_IDS = range(10, 4000)  # ordinary tokens of the generated models


class Leave(NamedTuple):
    """When a client closes its connection before the answer has ended: whichever comes first."""

    seconds: float | None = None  # after sending
    events: int | None = None  # received, of a stream


class Left(NamedTuple):
    """A request whose client has left."""

    events: int  # that had come by then


async def send_and_leave(
    client: httpx.AsyncClient, url: str, path: str, body: Mapping[str, Any], leave: Leave | None
) -> TimedAnswer | Left:
    """The answer of the server at `url`, if the client stays for it. Raises `RuntimeError` for an error answer."""
    leave, sent = leave or Leave(), time.perf_counter()
    received: list[TimedEvent] = []
    try:
        async with asyncio.timeout(leave.seconds), aclosing(events_of(client, url, path, body)) as events:
            async for event in events:
                received.append(event)
                if len(received) == leave.events:
                    return Left(len(received))
    except TimeoutError:
        return Left(len(received))
    return answer_of(received, sent, body)


def fresh_tokens(length: int, *seed: object) -> list[int]:
    """Random tokens, the same for the same seed."""
    return random.Random(repr(seed)).choices(TOKEN_IDS, k=length)
