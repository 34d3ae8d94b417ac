"""Exact repeats on a real engine: what the cache gives is what the engine gave, and what it gives without the cache."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.api_keys import bearer, entry
from tests.harness.engines import SharedServers
from tests.harness.gateways import own_gateway

REQUESTS = 600

AT_ONCE = 32

ROOM = 2**21  # bytes

PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}

GROUPS = {"ann": "ann", "bob": "team", "cleo": "team"}

HEADER = "x-seamark-cache"


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """One of the mix: chats and completions, whole and streamed, greedy and seeded."""
    common: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 8, "stream": number % 2 == 1}
    common |= {"temperature": 1.0, "seed": number} if number % 5 == 4 else {"temperature": 0}
    text = f"Ship {number} waits in the roads. When may it enter?"
    if number % 3:
        return PATHS["chat"], {**common, "messages": [{"role": "user", "content": text}]}
    return PATHS["text"], {**common, "prompt": text}


def told(answer: httpx.Response) -> tuple[str, str | None]:
    """Text and finish reason, which do not depend on when it was asked."""
    body = answer.text
    parts = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")] or [json.loads(body)]
    choices = [choice for part in parts for choice in part["choices"]]
    said = [choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices]
    return "".join(each.get("content") or "" for each in said), choices[-1]["finish_reason"]


async def test_a_mix_of_repeats_gets_the_engines_own_answers(servers: SharedServers, tmp_path: Path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("ann") + entry("bob", share="team") + entry("cleo", share="team") + entry("root", admin=True))
    draw = random.Random(21)
    bodies = [body_of(number) for number in range(24)]
    asked = [(draw.choice(tuple(GROUPS)), draw.randrange(len(bodies))) for _ in range(REQUESTS)]
    results: Counter[str] = Counter()
    contents: dict[tuple[str, int], set[bytes]] = defaultdict(set)
    answers: dict[int, tuple[str, str | None]] = {}
    turns = asyncio.Semaphore(AT_ONCE)
    with own_gateway(servers.seamark, response_cache=ROOM, api_keys=keys) as own:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=AT_ONCE)) as http:

            async def ask(name: str, number: int) -> None:
                path, body = bodies[number]
                async with turns:
                    headers = {HEADER: "allow", **bearer(name)}
                    answer = await http.post(own.url + path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                results[answer.headers[HEADER]] += 1
                contents[GROUPS[name], number].add(answer.content)
                answers[number] = told(answer)

            await asyncio.gather(*(ask(name, number) for name, number in asked))
            assert own.gateway.response_cache is not None and 0 < own.gateway.response_cache.answers.size <= ROOM
            # Without the cache: the same engine, one request after the other.
            for number in sorted(answers):
                path, body = bodies[number]
                plain = await http.post(servers.gateway.url + path, json=body)
                assert told(plain) == answers[number], (number, body)
    assert results["miss"] == len(contents) and results["hit"] and results["joined"]
    assert results.total() == REQUESTS
    assert all(len(each) == 1 for each in contents.values())  # bytes, ids and times included
    # Each group has answers of its own, with ids of their own.
    assert len({content for each in contents.values() for content in each}) == len(contents)
