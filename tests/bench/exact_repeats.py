"""`python -m tests.bench.exact_repeats`: 10,000 mixed requests through the response cache, before a real engine.

Chats and completions, whole and streamed, greedy and seeded, some of them with `no-store`, by three keys of which two
share; some come many times at once. Every answer from the cache, or shared, has to have the bytes of one that an engine
gave to the same group; no bytes may reach two groups; each text has to be the engine's own without the cache; the
cache's memory has to stay within its bound. Exit status 1 if one of these is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.client import open_client
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from tests.harness.api_keys import bearer, entry

REQUESTS = 10_000

BODIES = 1200  # different ones

FAVOURITES = 1.1  # exponent: how much more often the first ones come than the last

BURST = 4  # the same request that many times at once, at most

CLIENTS = 16

ROOM = 2**20  # bytes: some hundred answers, so that most have to go again

NO_STORE = 0.05  # of requests

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

GROUPS = {"ann": "ann", "bob": "team", "cleo": "team"}

HEADER = "x-seamark-cache"

FROM_CACHE = ("hit", "joined")


def body_of(number: int) -> tuple[str, dict[str, Any]]:
    """One of the mix."""
    common: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 8, "stream": number % 2 == 1}
    common |= {"temperature": 1.0, "seed": number} if number % 5 == 4 else {"temperature": 0}
    text = f"Ship {number} waits in the roads. When may it enter?"
    if number % 3:
        return CHAT, {**common, "messages": [{"role": "user", "content": text}]}
    return TEXT, {**common, "prompt": text}


def text_of(answer: bytes) -> tuple[str, str | None]:
    """Text and finish reason, which do not depend on when it was asked."""
    lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
    parts = [json.loads(line) for line in lines] or [json.loads(answer)]
    choices = [choice for part in parts for choice in part["choices"]]
    said = [choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices]
    return "".join(each.get("content") or "" for each in said), choices[-1]["finish_reason"]


@dataclass
class Seen:
    """What clients got."""

    results: Counter[str] = field(default_factory=Counter)
    computed: dict[tuple[str, int], set[bytes]] = field(default_factory=lambda: defaultdict(set))  # by an engine
    repeated: list[tuple[str, int, bytes]] = field(default_factory=list)  # from the cache, or shared
    failed: list[str] = field(default_factory=list)
    most_bytes: int = 0  # that the cache said it held
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # to the end, by result


async def ask(http: httpx.AsyncClient, gateway: Server, name: str, number: int, store: bool, seen: Seen) -> None:
    """One request."""
    path, body = body_of(number)
    headers = {HEADER: "allow", **bearer(name)} | ({} if store else {"cache-control": "no-store"})
    began = time.monotonic()
    try:
        answer = await http.post(gateway.url + path, json=body, headers=headers)
    except httpx.HTTPError as error:
        seen.failed.append(type(error).__name__)
        return
    if answer.status_code != 200:
        seen.failed.append(f"{answer.status_code} {answer.text[:100]}")
        return
    result = answer.headers[HEADER]
    seen.results[result] += 1
    seen.seconds[result].append(time.monotonic() - began)
    if result in FROM_CACHE:
        seen.repeated.append((GROUPS[name], number, answer.content))
    else:
        seen.computed[GROUPS[name], number].add(answer.content)


async def play(gateway: Server, requests: int, seed: int, say: Callable[[str], None]) -> Seen:
    """The mix, and the cache's size all the while."""
    draw = random.Random(seed)
    weights = [1 / (1 + number) ** FAVOURITES for number in range(BODIES)]
    bursts: list[list[tuple[str, int, bool]]] = []
    left = requests
    while left:
        number = draw.choices(range(BODIES), weights)[0]
        count = min(left, draw.choice((1, 1, 1, BURST)))
        bursts.append([(draw.choice(tuple(GROUPS)), number, draw.random() >= NO_STORE) for _ in range(count)])
        left -= count
    seen, done = Seen(), asyncio.Event()
    waiting = iter(bursts)
    async with open_client() as http:

        async def client() -> None:
            for burst in waiting:
                await asyncio.gather(*(ask(http, gateway, *each, seen) for each in burst))

        async def watch() -> None:
            async with httpx.AsyncClient(timeout=30, headers=bearer("root")) as watcher:
                while not done.is_set():
                    samples = await samples_of(watcher, gateway)
                    seen.most_bytes = max(seen.most_bytes, int(samples["seamark_response_cache_bytes"]))
                    answered = seen.results.total()
                    say(f"{answered} of {requests} answered, {seen.most_bytes} bytes at most")
                    await asyncio.sleep(1)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        done.set()
        await watching
    return seen


async def engines_own(engine: Server, numbers: Sequence[int]) -> dict[int, tuple[str, str | None]]:
    """What the engine answers without the cache, one request after the other."""
    async with httpx.AsyncClient(timeout=300) as http:
        found = {}
        for number in numbers:
            path, body = body_of(number)
            found[number] = text_of((await http.post(engine.url + path, json=body)).raise_for_status().content)
        return found


def complaints(seen: Seen, own: dict[int, tuple[str, str | None]], requests: int) -> list[str]:
    """What is not so."""
    found = [f"{len(seen.failed)} requests failed: {seen.failed[0]}"] if seen.failed else []
    other = sum(content not in seen.computed[group, number] for group, number, content in seen.repeated)
    if other:
        found.append(f"{other} answers from the cache have bytes that no engine gave to that group and request")
    owners: dict[bytes, set[str]] = defaultdict(set)
    for (group, _), contents in seen.computed.items():
        for content in contents:
            owners[content].add(group)
    for group, _, content in seen.repeated:
        owners[content].add(group)
    if strangers := sum(len(groups) > 1 for groups in owners.values()):
        found.append(f"{strangers} answers reached two groups")
    wrong = {
        number
        for (_, number), contents in seen.computed.items()
        for content in contents
        if text_of(content) != own[number]
    }
    if wrong:
        found.append(f"{len(wrong)} requests have another text than without the cache: {sorted(wrong)[:5]}")
    if seen.most_bytes > ROOM:
        found.append(f"the cache held {seen.most_bytes} bytes")
    if not all(seen.results[result] for result in ("hit", "joined", "miss", "bypass")):
        found.append(f"not every way was taken: {dict(seen.results)}")
    if seen.results.total() + len(seen.failed) != requests:
        found.append(f"{seen.results.total()} of {requests} were answered")
    return found


def memory_of(server: Server) -> float:
    """MiB that the process holds."""
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.exact_repeats", description="the response cache")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=f"in all ({REQUESTS})")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the mix (1)")
    args = parser.parse_args(argv)
    if args.requests < 1:
        parser.error("--requests: at least 1")
    say = narrator()
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-repeats-") as folder, Servers(Path(folder)) as servers:
        engine = servers.engine("engine", model)
        keys = Path(folder) / "keys.toml"
        shared = [entry(name, share="team") for name in ("bob", "cleo")]
        keys.write_text("".join([entry("ann"), *shared, entry("root", admin=True)]))
        engine.wait_until_ready()
        gateway = servers.gateway(engine, flags=("--response-cache", str(ROOM), "--api-keys", str(keys)))
        gateway.wait_until_ready("/ready", seconds=60)
        before = memory_of(gateway)
        seen = asyncio.run(play(gateway, args.requests, args.seed, say))
        after = memory_of(gateway)
        say("the same without the cache")
        own = asyncio.run(engines_own(engine, sorted({number for _, number in seen.computed})))
    wrong = complaints(seen, own, args.requests)
    for result, seconds in sorted(seen.seconds.items()):
        p50 = 1000 * sorted(seconds)[len(seconds) // 2]
        print(f"{result:<8}{seen.results[result]:>7} answers, {p50:.1f} ms in the median")
    different = len({number for _, number in seen.computed})
    print(f"{different} different requests, {len(seen.failed)} failed, {len(own)} texts compared with the engine's own")
    print(f"the cache held at most {seen.most_bytes} of {ROOM} bytes; the gateway {before:.0f} -> {after:.0f} MiB")
    for each in wrong:
        print(f"NOT SO: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
