"""`seamark bench boundaries`: what finding boundaries costs the gateway, in CPU time per request, parsing excluded.

A known prefix needs no render; a new one is rendered by the worker, whose answers are played back here so that only the
gateway's own work is timed. Loop lag is measured while chats of 100,000 tokens arrive one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.boundaries import BoundaryFinder
from proxy.chat import CHAT, chat_request
from proxy.learned import Learner
from proxy.memory import PositionMemory
from proxy.recent import Recent, RecentRequests
from proxy.tokens import Tokens

KNOWN_LIMITS = {2_000: 50e-6, 400_000: 2e-3}  # seconds
LAG_LIMIT = 5e-3
CHARACTERS_PER_TOKEN = 4
MEMORY_BYTES = 2**26


class Cost(NamedTuple):
    """CPU seconds for one request."""

    size: int  # bytes of text
    messages: int
    known: float  # its prefix is known
    new: float  # it is not; the gateway's own share
    renders: int  # asked of the worker for the known one


class Playback:
    """A worker that needs no time: a token for each four characters, as vLLM spells its answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.seconds = 0.0  # of CPU time, this stand-in's own

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> Tokens:
        began = time.process_time()
        self.asked += 1
        text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        text += "<assistant>" if body.get("add_generation_prompt", True) else ""
        step = CHARACTERS_PER_TOKEN
        tokens = Tokens.of([hash(text[i : i + step]) % 150_000 for i in range(0, len(text), step)])
        self.seconds += time.process_time() - began
        return tokens


def chat(size: int, messages: int, last: str) -> dict[str, Any]:
    """A chat of about `size` bytes."""
    each = "The pilot boards two miles off the bar. " * (size // messages // 40 + 1)
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} {each}"[: size // messages]} for i in range(messages)
    ]
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "You."}, *turns, {"role": "user", "content": last}],
    }


async def measure(size: int, messages: int, rounds: int) -> Cost:
    """Cost of one size; medians over `rounds`."""
    memory, renderer = PositionMemory(MEMORY_BYTES), Playback()
    finder, recent = BoundaryFinder(memory, Learner(MEMORY_BYTES)), RecentRequests(MEMORY_BYTES)

    async def find(body: dict[str, Any]) -> float:
        played, began = renderer.seconds, time.process_time()
        found = await finder.find(chat_request(body), renderer, b"renderer")
        recent.add(Recent(found.layout, found.tokens, size))
        return time.process_time() - began - (renderer.seconds - played)

    await find(chat(size, messages, "First?"))
    asked = renderer.asked
    bodies = [chat(size, messages, f"{number} more?") for number in range(rounds)]
    known = [await find(body) for body in bodies]
    renders = renderer.asked - asked
    new = []
    for number in range(max(3, rounds // 20)):
        body = chat(size, messages, "First?")
        body["messages"][0] = {"role": "system", "content": f"You, {number}."}
        new.append(await find(body))
    return Cost(size, messages, statistics.median(known), statistics.median(new), renders)


class Lag(NamedTuple):
    """99th percentiles of how late the loop is, seconds."""

    idle: float  # nothing arrives: what the machine itself takes
    busy: float  # chats with new prefixes arrive


async def lag(size: int, seconds: float) -> Lag:
    """While chats of `size` bytes with new prefixes arrive, and without; `seconds` for each."""
    memory = PositionMemory(MEMORY_BYTES)
    finder, recent = BoundaryFinder(memory, Learner(MEMORY_BYTES)), RecentRequests(MEMORY_BYTES)
    base = chat(size, 40, "First?")
    played = Tokens.of(range(size // CHARACTERS_PER_TOKEN))
    shorter = Tokens.of(range(size // CHARACTERS_PER_TOKEN - 500))

    async def renderer(body: Mapping[str, Any], path: str = CHAT) -> Tokens:
        async with writing:  # what asking a real worker costs the loop
            json.dumps(body).encode()
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)
        changed = body["messages"][-1]["content"] != "First?" or not body.get("add_generation_prompt", True)
        return Tokens(shorter.raw) if changed else Tokens(played.raw)

    late: list[float] = []
    writing = asyncio.Lock()
    done = asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            late.append(time.perf_counter() - before - 0.001)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(seconds)
    idle, late[:] = statistics.quantiles(late, n=100)[98], []
    end, number = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        number += 1
        body = {**base, "messages": [{"role": "system", "content": f"You, {number}."}, *base["messages"][1:]]}
        found = await finder.find(chat_request(body), renderer, b"renderer")
        recent.add(Recent(found.layout, found.tokens, size))
        await asyncio.sleep(0.02)
    done.set()
    await watching
    return Lag(idle, statistics.quantiles(late, n=100)[98])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="seamark bench boundaries", description="CPU time per request for boundaries")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="requests per size (200)")
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    costs = [
        asyncio.run(measure(size, messages, args.rounds))
        for size, messages in ((2_000, 4), (20_000, 20), (400_000, 40), (400_000, 200))
    ]
    late = asyncio.run(lag(400_000, 5.0))
    held = late.busy - late.idle <= LAG_LIMIT and all(
        cost.known <= KNOWN_LIMITS.get(cost.size, 1) and not cost.renders for cost in costs
    )
    if args.json:
        print(json.dumps({"held": held, "lag_p99": late._asdict(), "costs": [cost._asdict() for cost in costs]}))
        return 0 if held else 1
    print("  bytes  messages     known    new (own share)   renders asked on the known path")
    for cost in costs:
        print(
            f"{cost.size:7}{cost.messages:10}{cost.known * 1e6:8.0f} us{cost.new * 1e3:12.2f} ms{cost.renders:12}",
        )
    print(f"loop lag p99 while chats of 100,000 tokens arrive: {late.busy * 1e3:.1f} ms, idle {late.idle * 1e3:.1f} ms")
    return 0 if held else 1
