"""`python -m tests.bench.first_tokens`: the tail of first tokens through gateways, all before the same worker.

vLLM's own client sends prompts that share nothing, some at once. Engines have one core, everything else another, so
that no gateway takes a core from an engine, as beside a GPU. The ways take turns in an order that changes; rounds are
pooled. Engine steps tell whether requests reach the engine together: one that is held up gets steps of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from proxy.bench.harness.client import open_client
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.servers import Server, Servers, generated_model, narrator
from tests.bench.gateway_cost import percentile
from tests.bench.peers import PEERS, VLLM_ROUTER, start, start_bare
from tests.bench.serve_client import ServeClient, arguments_of
from tests.harness.cpu_time import family

INPUT_TOKENS, OUTPUT_TOKENS, AT_ONCE, PROMPTS, ROUNDS, WARM_UP = 400, 16, 4, 60, 5, 2

SPREAD = 0.0

# Prefills short enough that a few milliseconds between two requests are felt, as on a GPU.
FLAGS = ("--dtype", "bfloat16")

ENGINE_CORE, OTHER_CORE = 0, 1

STEPS, HITS = "vllm:iteration_tokens_total_count", "vllm:prefix_cache_hits_total"

DIRECT, BARE, SEAMARK = "directly", "bare aiohttp proxy", "seamark"

PERCENTILES = (0.5, 0.9, 0.95, 0.99)

# What may be had over vllm-router: of first tokens by percentile, and of an engine's steps.
LIMITS = {0.5: 1.05, 0.9: 1.10, 0.99: 1.25}
STEPS_LIMIT = 1.05

WORDS = (
    "ms to the first token, all rounds pooled; steps: of the engine in a round, mean; hits: prompt tokens in a round,\n"
    "mean; over: of vllm-router in the same sitting. Directly with several workers: the first one alone."
)


@dataclass
class Way:
    """What requests are sent to."""

    name: str
    url: str
    first_tokens: list[float] = field(default_factory=list)  # seconds, of all rounds
    steps: list[int] = field(default_factory=list)  # of the engines, a round
    hits: list[int] = field(default_factory=list)  # tokens, a round


class Load(NamedTuple):
    """What a round sends; tokens."""

    prompts: int
    input_tokens: int
    output_tokens: int
    at_once: int
    spread: float = 0.0  # of lengths around these, 0 to 1; without it all answers of a wave end in one step

    def arguments(self, way: Way, model: Path, seed: int) -> list[str]:
        """Of `vllm bench serve`."""
        options = {"random-input-len": self.input_tokens, "random-output-len": self.output_tokens}
        options["random-range-ratio"] = self.spread
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        common = arguments_of(way.url, model, self.prompts, self.at_once, seed)
        return [*common, "--dataset-name", "random", *flags]


def bind(pids: Sequence[int], core: int) -> None:
    """All threads of these processes run on `core` from now on."""
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(task.name), {core})


async def measure(
    ways: Sequence[Way],
    engines: Sequence[Server],
    load: Load,
    rounds: int,
    model: Path,
    say: Callable[[str], None],
) -> None:
    """Warm-up rounds, and `rounds` that count; every round of every way has prompts of its own."""
    order = random.Random(5)
    async with open_client() as http, ServeClient() as client:
        bind([client.pid], OTHER_CORE)

        async def total(name: str) -> int:
            return int(sum([(await samples_of(http, engine))[name] for engine in engines]))

        seed = 0
        for number in range(WARM_UP + rounds):
            say(f"round {number + 1} of {WARM_UP + rounds}")
            for way in order.sample(ways, len(ways)):
                seed += 1
                steps, hits = await total(STEPS), await total(HITS)
                first_tokens = await client.run(load.arguments(way, model, seed))
                if number >= WARM_UP:
                    way.first_tokens += first_tokens
                    way.steps.append(await total(STEPS) - steps)
                    way.hits.append(await total(HITS) - hits)


class Setup:
    """The servers of one sitting, and the ways through them. Use as a context manager."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        self._stack = contextlib.ExitStack()
        self.servers = self._stack.enter_context(Servers(folder))
        self.ways: list[Way] = []

    def __enter__(self) -> Setup:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def engines(self, model: Path, count: int) -> list[Server]:
        """So many, on one core together."""
        bound = {"VLLM_CPU_OMP_THREADS_BIND": str(ENGINE_CORE)}  # else it has a thread for each core
        found = [
            self.servers.engine(f"worker-{number}", model, flags=FLAGS, environment=bound) for number in range(count)
        ]
        for engine in found:
            engine.wait_until_ready()
            api, *core = family(engine.process.pid)
            bind([api], OTHER_CORE)
            bind(core, ENGINE_CORE)
        self.ways.append(Way(DIRECT, found[0].url))
        return found

    def bare(self, worker: Server) -> None:
        """A proxy that does nothing but pass on."""
        self._add(BARE, start_bare(self.servers, worker.url))

    def router(self, workers: Sequence[Server]) -> None:
        """vllm-router as it is shipped."""
        (peer,) = (peer for peer in PEERS if peer.name == VLLM_ROUTER)
        server, failure = start(self.servers, peer, [worker.url for worker in workers], self._folder, self._say)[1:]
        if server is None:
            raise SystemExit(f"vllm-router does not run: {failure}")
        self._add(VLLM_ROUTER, server)

    def gateway(self, workers: Sequence[Server], flags: str = "") -> None:
        """Ours, with further flags."""
        self._add(f"{SEAMARK} {flags}".strip(), self.servers.gateway(*workers, flags=shlex.split(flags)))

    def _add(self, name: str, server: Server) -> None:
        server.wait_until_ready("/health", 60)
        if name.startswith(SEAMARK):
            server.wait_until_ready("/ready", 60)
        bind(family(server.process.pid), OTHER_CORE)
        self.ways.append(Way(name, server.url))


def figures(way: Way) -> dict[float, float]:
    """Seconds by percentile."""
    return {share: percentile(way.first_tokens, share) for share in PERCENTILES}


def complaints(way: Way, router: Way) -> list[str]:
    """Where it is beyond what it may have over vllm-router."""
    ours, theirs = figures(way), figures(router)
    found = [f"p{share * 100:g}" for share, limit in LIMITS.items() if ours[share] > limit * theirs[share]]
    return [*found, "steps"] if sum(way.steps) > STEPS_LIMIT * sum(router.steps) else found


def render(ways: Sequence[Way]) -> str:
    """A line for each way."""
    names = [f"p{share * 100:g}" for share in PERCENTILES]
    lines = [f"{'way':<34}" + "".join(f"{name:>7}" for name in names) + f"{'steps':>8}{'hits':>7}  over vllm-router"]
    router = next((way for way in ways if way.name == VLLM_ROUTER), None)
    for way in ways:
        own = figures(way)
        line = f"{way.name:<34}" + "".join(f"{1000 * own[share]:>7.0f}" for share in PERCENTILES)
        line += f"{sum(way.steps) / len(way.steps):>8.0f}{sum(way.hits) / len(way.hits):>7.0f}"
        if router is not None and way is not router:
            theirs = figures(router)
            line += "  " + " ".join(f"{own[share] / theirs[share]:.2f}" for share in PERCENTILES)
            line += f", steps {sum(way.steps) / sum(router.steps):.2f}"
        lines.append(line)
    if router is not None:
        for way in ways:
            if way.name.startswith(SEAMARK):
                beyond = complaints(way, router)
                lines.append(f"{'NOT HELD (' + ', '.join(beyond) + ')' if beyond else 'held'}: {way.name}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.first_tokens", description="the tail of first tokens through gateways"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"that count ({ROUNDS})")
    for name, default, words in (
        ("prompts", PROMPTS, "of a round"),
        ("input-tokens", INPUT_TOKENS, "of a prompt"),
        ("output-tokens", OUTPUT_TOKENS, "of an answer"),
        ("at-once", AT_ONCE, "requests at once"),
        ("workers", 1, "engines, which share a core"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{words} ({default})")
    parser.add_argument("--spread", type=float, default=SPREAD, metavar="SHARE", help=f"of both lengths ({SPREAD})")
    parser.add_argument("--with", dest="flags", action="append", default=[], help="a gateway with these flags, too")
    args = parser.parse_args(argv)
    if min(args.rounds, args.prompts, args.input_tokens, args.output_tokens, args.at_once, args.workers) < 1:
        parser.error("all numbers: at least 1")
    if not 0 <= args.spread < 1:
        parser.error("--spread: at least 0, less than 1")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores at least")
    say = narrator()
    model = generated_model(say)
    load = Load(args.prompts, args.input_tokens, args.output_tokens, args.at_once, args.spread)
    with tempfile.TemporaryDirectory(prefix="seamark-first-tokens-") as name, Setup(Path(name), say) as setup:
        say("starting everything")
        engines = setup.engines(model, args.workers)
        if args.workers == 1:
            setup.bare(engines[0])
        setup.router(engines)
        for flags in ["", *args.flags]:
            setup.gateway(engines, flags)
        asyncio.run(measure(setup.ways, engines, load, args.rounds, model, say))
    print(f"{render(setup.ways)}\n\n{WORDS}")
    router = next(way for way in setup.ways if way.name == VLLM_ROUTER)
    return 1 if any(complaints(way, router) for way in setup.ways if way.name == SEAMARK) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
