"""`python -m tests.bench.first_tokens`: the tail of first tokens through gateways, all before the same worker.

Streamed chats share nothing, some are sent at once. The engine has one core, everything else another, so that no
gateway takes a core from the engine, as beside a GPU. The ways take turns in an order that changes; rounds are pooled.
Engine steps tell whether requests reach the engine together: one that is held up gets steps of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proxy.bench.harness.client import open_client, prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from tests.bench.gateway_cost import percentile
from tests.bench.peers import PEERS, VLLM_ROUTER, start, start_bare
from tests.harness.counters import samples_of
from tests.harness.load import connect, family, request, send_all

# What a run is asked with; name, default, words.
NUMBERS = (
    ("rounds", 5, "rounds that count"),
    ("prompts", 60, "of a round"),
    ("input-words", 400, "of a prompt"),
    ("output-tokens", 16, "of an answer"),
    ("at-once", 4, "requests at once"),
)

WARM_UP = 2  # rounds

# Prefills short enough that a few milliseconds between two requests are felt, as on a GPU.
FLAGS = ("--dtype", "bfloat16")

ENGINE_CORE, OTHER_CORE = 0, 1

STEPS = "vllm:iteration_tokens_total_count"

DIRECT, BARE, SEAMARK = "directly", "bare aiohttp proxy", "seamark"

PERCENTILES = (0.5, 0.9, 0.95, 0.99)

# What may be had over vllm-router: of first tokens by percentile, and of an engine's steps.
LIMITS = {0.5: 1.05, 0.9: 1.10, 0.99: 1.25}
STEPS_LIMIT = 1.05


@dataclass
class Way:
    """What requests are sent to."""

    name: str
    url: str
    first_tokens: list[float] = field(default_factory=list)  # seconds, of all rounds
    steps: int = 0  # of the engine, in all rounds

    async def ask(self, args: argparse.Namespace, seed: int) -> list[float]:
        """One round; seconds to the first token of each request."""
        fields = {"model": MODEL_NAME, "stream": True, "temperature": 0, "ignore_eos": True}
        texts = [f"{seed}/{number}: {prose(args.input_words, 10**6 * seed + number)}" for number in range(args.prompts)]
        bodies = [
            {**fields, "max_tokens": args.output_tokens, "messages": [{"role": "user", "content": text}]}
            for text in texts
        ]
        clients = [await connect(self.url) for _ in range(args.at_once)]
        try:
            samples = await send_all(clients, [request(self.url, json.dumps(body).encode()) for body in bodies])
        finally:
            for client in clients:
                client.close()
        return [sample.first for sample in samples]


def bind(pids: Sequence[int], core: int) -> None:
    """All threads of these processes run on `core` from now on."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(task.name), {core})


async def measure(ways: Sequence[Way], engine: Server, args: argparse.Namespace) -> None:
    """Warm-up rounds, and those that count; every round of every way has prompts of its own."""
    order, seed, say = random.Random(5), 0, narrator()
    async with open_client() as http:
        for number in range(WARM_UP + args.rounds):
            say(f"round {number + 1} of {WARM_UP + args.rounds}")
            for way in order.sample(ways, len(ways)):
                seed += 1
                before = (await samples_of(http, engine))[STEPS]
                first_tokens = await way.ask(args, seed)
                if number >= WARM_UP:
                    way.first_tokens += first_tokens
                    way.steps += int((await samples_of(http, engine))[STEPS] - before)


def start_all(servers: Servers, folder: Path, flags: Sequence[str]) -> tuple[Server, list[Way]]:
    """The engine, and the ways to it; each on its core."""
    say = narrator()
    bound = {"VLLM_CPU_OMP_THREADS_BIND": str(ENGINE_CORE)}  # else it has a thread for each core
    engine = servers.engine("worker", generated_model(say), flags=FLAGS, environment=bound)
    engine.wait_until_ready()
    api, *core = family(engine.process.pid)
    bind([api, os.getpid()], OTHER_CORE)
    bind(core, ENGINE_CORE)
    (peer,) = (peer for peer in PEERS if peer.name == VLLM_ROUTER)
    router = start(servers, peer, engine.url, folder, say)
    if isinstance(router, str):
        raise SystemExit(f"vllm-router does not run: {router}")
    gateways = {BARE: start_bare(servers, engine.url), VLLM_ROUTER: router}
    for each in ("", *flags):
        gateways[f"{SEAMARK} {each}".strip()] = servers.gateway(engine, flags=shlex.split(each))
    for name, server in gateways.items():
        server.wait_until_ready("/ready" if name.startswith(SEAMARK) else "/health", 60)
        bind(family(server.process.pid), OTHER_CORE)
    return engine, [Way(DIRECT, engine.url), *(Way(name, server.url) for name, server in gateways.items())]


def complaints(way: Way, router: Way) -> list[str]:
    """Where it is beyond what it may have over vllm-router."""
    found = [
        f"p{share * 100:g}"
        for share, limit in LIMITS.items()
        if percentile(way.first_tokens, share) > limit * percentile(router.first_tokens, share)
    ]
    return [*found, "steps"] if way.steps > STEPS_LIMIT * router.steps else found


def render(ways: Sequence[Way], router: Way) -> str:
    """A line for each way."""
    names = "".join(f"{f'p{share * 100:g}':>7}" for share in PERCENTILES)
    lines = [f"{'ms to the first token':<34}{names}{'steps':>8}  over vllm-router"]
    for way in ways:
        own = [percentile(way.first_tokens, share) for share in PERCENTILES]
        over = [mine / percentile(router.first_tokens, share) for mine, share in zip(own, PERCENTILES, strict=True)]
        ratios = " ".join(f"{ratio:.2f}" for ratio in [*over, way.steps / router.steps])
        lines.append(f"{way.name:<34}{''.join(f'{1000 * mine:>7.0f}' for mine in own)}{way.steps:>8}  {ratios}")
    for way in ways:
        if way.name.startswith(SEAMARK):
            beyond = complaints(way, router)
            lines.append(f"{'NOT HELD (' + ', '.join(beyond) + ')' if beyond else 'held'}: {way.name}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.first_tokens", description="the tail of first tokens through gateways"
    )
    for name, default, words in NUMBERS:
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{words} ({default})")
    parser.add_argument("--with", dest="flags", action="append", default=[], help="a gateway with these flags, too")
    args = parser.parse_args(argv)
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores at least")
    with tempfile.TemporaryDirectory(prefix="seamark-first-tokens-") as name, Servers(Path(name)) as servers:
        engine, ways = start_all(servers, Path(name), args.flags)
        asyncio.run(measure(ways, engine, args))
    router = next(way for way in ways if way.name == VLLM_ROUTER)
    print(render(ways, router))
    return 1 if any(complaints(way, router) for way in ways if way.name == SEAMARK) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
