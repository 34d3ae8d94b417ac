"""`python -m tests.bench.boundaries`: CPU time that finding boundaries costs the gateway per request, parsing excluded.

A known prefix needs no render; a new one is rendered by the worker, whose answers are played back here so that only the
gateway's own work is timed. On the fast path the gateway renders it by itself; that is set beside one tokenisation of
what is new in the chat. Loop lag is measured while chats of 100,000 tokens arrive one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxy.boundaries.learned import DivergenceLearner
from proxy.boundaries.local_renderer import PROOFS, LocalRender, VerifiedRenderer
from tokenizers import Tokenizer

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import generated_model
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_request
from proxy.observability.request_diff import RememberedRequest, RequestMemory

KNOWN_LIMITS = {2_000: 50e-6, 400_000: 2e-3}  # seconds

LAG_LIMIT = 5e-3

FAST_LIMIT = 1.2  # times one tokenisation of the new part

CHARACTERS_PER_TOKEN = 4

MEMORY_BYTES = 2**26

BYTES_PER_WORD = 6

NEXT_TURN = 2_400  # bytes of an answer and a question


class Cost(NamedTuple):
    """CPU seconds for one request."""

    size: int  # bytes of text
    messages: int
    known: float  # its prefix is known
    new: float  # it is not; the gateway's own share
    renders: int  # asked of the worker for the known one


class Fast(NamedTuple):
    """The fast path, for a chat whose prefix is new; CPU seconds, medians."""

    size: int  # bytes of text
    new: int  # bytes of them that no chat before had
    found: float  # to find its boundaries
    tokenised: float  # to tokenise what is new, once
    renders: int  # asked of the worker

    @property
    def ratio(self) -> float:
        """Finding over tokenising."""
        return self.found / self.tokenised


class Playback:
    """A worker that needs no time: a token for each four characters, as vLLM spells its answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.seconds = 0.0  # of CPU time, this stand-in's own

    async def __call__(self, body: Mapping[str, Any], path: str = CHAT) -> TokenIds:
        began = time.process_time()
        self.asked += 1
        text = "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
        text += "<assistant>" if body.get("add_generation_prompt", True) else ""
        step = CHARACTERS_PER_TOKEN
        tokens = TokenIds.of([hash(text[i : i + step]) % 150_000 for i in range(0, len(text), step)])
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
    memory, renderer = PositionCache(MEMORY_BYTES), Playback()
    finder, recent = BoundaryFinder(memory, DivergenceLearner(MEMORY_BYTES)), RequestMemory(MEMORY_BYTES)

    async def find(body: dict[str, Any]) -> float:
        played, began = renderer.seconds, time.process_time()
        found = await finder.find(chat_request(body), renderer, b"renderer")
        recent.add(RememberedRequest(found.layout, found.tokens, size))
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


async def measure_fast(model: Path, size: int, messages: int, growing: bool, rounds: int) -> Fast:
    """Chats of `size` bytes, each new from its first message on, or `growing`: an answer and a question are new."""
    tokenizer, worker = Tokenizer.from_file(str(model / "tokenizer.json")), LocalRender(model, MEMORY_BYTES)

    async def at_the_worker(body: Mapping[str, Any], path: str = CHAT) -> TokenIds:
        return worker.tokens(body)

    fast = VerifiedRenderer(at_the_worker, LocalRender(model, MEMORY_BYTES))
    finder, recent = (
        BoundaryFinder(PositionCache(MEMORY_BYTES), DivergenceLearner(MEMORY_BYTES)),
        RequestMemory(MEMORY_BYTES),
    )
    seeds = itertools.count()

    def said(turns: Sequence[dict[str, Any]], length: int) -> list[dict[str, Any]]:
        """The roles of `turns`, with new texts of `length` bytes together."""
        words = length // len(turns) // BYTES_PER_WORD
        return [{"role": turn["role"], "content": prose(words, seed=next(seeds))} for turn in turns]

    async def find(turns: Sequence[dict[str, Any]]) -> tuple[float, int]:
        began = time.process_time()
        found = await finder.find(chat_request({"model": "m", "messages": turns}), fast, b"renderer")
        recent.add(RememberedRequest(found.layout, found.tokens, size))
        return time.process_time() - began, found.renders

    shape = chat(size, messages, "First?")["messages"]
    for _ in range(2 * PROOFS):  # until it is trusted, whole chats and those that end before the last answer
        await find(said(shape, 200 * len(shape)))
        await find(said(shape[:2], 400))
    turns = said(shape, size)
    await find(turns)
    costs, tokenised, renders, new = [], [], 0, 0
    for _ in range(rounds):
        added = said([{"role": "assistant"}, {"role": "user"}], NEXT_TURN) if growing else said(shape, size)
        turns = [*turns, *added] if growing else added
        began = time.process_time()
        for turn in added:
            tokenizer.encode(turn["content"], add_special_tokens=False).ids  # noqa: B018 - reading them is part of it
        tokenised.append(time.process_time() - began)
        cost, asked = await find(turns)
        costs.append(cost)
        renders += asked
        new = sum(len(turn["content"]) for turn in added)
    text = sum(len(turn["content"]) for turn in turns)
    return Fast(text, new, statistics.median(costs), statistics.median(tokenised), renders)


class Lag(NamedTuple):
    """99th percentiles of how late the loop is, seconds."""

    idle: float  # nothing arrives: what the machine itself takes
    busy: float  # chats with new prefixes arrive


async def lag(size: int, seconds: float) -> Lag:
    """While chats of `size` bytes with new prefixes arrive, and without; `seconds` for each."""
    memory = PositionCache(MEMORY_BYTES)
    finder, recent = BoundaryFinder(memory, DivergenceLearner(MEMORY_BYTES)), RequestMemory(MEMORY_BYTES)
    base = chat(size, 40, "First?")
    played = TokenIds.of(range(size // CHARACTERS_PER_TOKEN))
    shorter = TokenIds.of(range(size // CHARACTERS_PER_TOKEN - 500))

    async def renderer(body: Mapping[str, Any], path: str = CHAT) -> TokenIds:
        async with writing:  # what asking a real worker costs the loop
            json.dumps(body).encode()
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)
        changed = body["messages"][-1]["content"] != "First?" or not body.get("add_generation_prompt", True)
        return TokenIds(shorter.raw) if changed else TokenIds(played.raw)

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
        recent.add(RememberedRequest(found.layout, found.tokens, size))
        await asyncio.sleep(0.02)
    done.set()
    await watching
    return Lag(idle, statistics.quantiles(late, n=100)[98])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.boundaries", description="CPU time per request for boundaries"
    )
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="requests per size (200)")
    parser.add_argument("--json", action="store_true", help="print the figures for machines")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error("--rounds: at least 1")
    costs = [
        asyncio.run(measure(size, messages, args.rounds))
        for size, messages in ((2_000, 4), (20_000, 20), (400_000, 40), (400_000, 200))
    ]
    model = generated_model(lambda text: print(text, file=sys.stderr))
    sizes = ((2_000, 4, False), (20_000, 20, False), (400_000, 40, False), (20_000, 20, True), (400_000, 40, True))
    fast = [asyncio.run(measure_fast(model, *size, max(5, args.rounds // 20))) for size in sizes]
    late = asyncio.run(lag(400_000, 5.0))
    held = late.busy - late.idle <= LAG_LIMIT and all(
        cost.known <= KNOWN_LIMITS.get(cost.size, 1) and not cost.renders for cost in costs
    )
    held = held and all(each.ratio <= FAST_LIMIT for each in fast)
    if args.json:
        tables = {"costs": [cost._asdict() for cost in costs], "fast": [each._asdict() for each in fast]}
        print(json.dumps({"held": held, "lag_p99": late._asdict(), **tables}))
        return 0 if held else 1
    print("  bytes  messages     known    new (own share)   renders asked on the known path")
    for cost in costs:
        print(
            f"{cost.size:7}{cost.messages:10}{cost.known * 1e6:8.0f} us{cost.new * 1e3:12.2f} ms{cost.renders:12}",
        )
    print("  bytes   of them new   fast path   tokenising the new part   ratio   renders asked")
    for each in fast:
        print(
            f"{each.size:7}{each.new:14}{each.found * 1e3:9.2f} ms{each.tokenised * 1e3:23.2f} ms{each.ratio:8.2f}"
            f"{each.renders:16}{'' if each.ratio <= FAST_LIMIT else '   above'}"
        )
    print(f"loop lag p99 while chats of 100,000 tokens arrive: {late.busy * 1e3:.1f} ms, idle {late.idle * 1e3:.1f} ms")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
