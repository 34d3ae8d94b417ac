"""`seamark bench resume`: what it costs to resume from a shared prefix, against the prompt's own part alone.

Each engine gets the same three requests: a cold one, a warm one with the same prefix, and a prompt as long as the warm
one's own part. Exit status 1 if Seamark's warm first token takes more than `MOST` times as long as the own part's.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.cost import Metered
from proxy.bench.harness.client import fresh_tokens, open_client, request, three_boundaries
from proxy.bench.harness.counters import CpuTime
from proxy.bench.harness.ratios import Comparison, Pair, Spread, in_words, spread
from proxy.bench.harness.servers import Servers, generated_model, narrator
from proxy.bench.passes import BASELINE, FLAGS, OURS
from proxy.commands.parser import Parser

MOST = 1.15  # a warm first token over the first token of the own part alone

SHARED, OWN = 2700, 300  # tokens; the workload that mlx-lm has published a factor for

MLX_LM = "2.9 to 3.1"  # its factor, cold over warm

PAIRS = 24

WORDS = (
    "first token: wall time of a request for one token, as a client sees it; CPU: user and system, all processes of\n"
    f"the server. {BASELINE}: SEAMARK_ENGINE=reference, prefix caching on. On a CPU and a toy model; mlx-lm's factor\n"
    "is from other hardware and another model: the two factors say that both gain, not who is faster. In a small\n"
    "model the own part's attention to the shared part is a large share of the time, whoever resumes. Hence the\n"
    "comparison with vLLM's warm request, which writes no state and, at these lengths, has the same hit."
)


class Sample(NamedTuple):
    """One request for one token. Seconds."""

    first_token: float
    cpu: float
    cached_tokens: int


class Round(NamedTuple):
    """One prefix: first sight of it, going on from it, and the own part alone, the last two in turns."""

    cold: Sample
    warm: Sample
    alone: Sample


@dataclass(frozen=True)
class Resumed:
    """All rounds of one engine."""

    engine: str
    rounds: tuple[Round, ...]

    @property
    def first_token(self) -> Comparison:
        """Warm over alone, wall time."""
        return Comparison(
            "first token", tuple(Pair(r.warm.first_token, r.alone.first_token) for r in self.rounds), MOST
        )

    @property
    def cpu(self) -> Comparison:
        """Warm over alone, CPU time."""
        return Comparison("CPU", tuple(Pair(r.warm.cpu, r.alone.cpu) for r in self.rounds), MOST)

    @property
    def factor(self) -> float:
        """Cold first token over warm first token, medians."""
        return self.median("cold", "first_token") / self.median("warm", "first_token")

    @property
    def cpu_factor(self) -> float:
        """The same of CPU time."""
        return self.median("cold", "cpu") / self.median("warm", "cpu")

    @property
    def cached_tokens(self) -> float:
        """Tokens of a warm request that were not computed, median."""
        return self.median("warm", "cached_tokens")

    def median(self, kind: str, number: str) -> float:
        """Median over the rounds of one number of one kind of request."""
        values: list[float] = [getattr(getattr(r, kind), number) for r in self.rounds]
        return statistics.median(values)


class Beside(NamedTuple):
    """Warm requests of two engines, round by round."""

    first_token: Spread
    cpu: Spread


def beside_alone(ours: Resumed, theirs: Resumed) -> Beside:
    """How long Seamark's warm requests take over those of vLLM alone."""
    pairs = list(zip(ours.rounds, theirs.rounds, strict=True))
    return Beside(
        spread([mine.warm.first_token / other.warm.first_token for mine, other in pairs]),
        spread([mine.warm.cpu / other.warm.cpu for mine, other in pairs]),
    )


async def sample(client: httpx.AsyncClient, engine: Metered, prompt: list[int], boundaries: Sequence[int]) -> Sample:
    """One request, timed."""
    before = await engine.cpu.settled()
    reply = await request(client, engine.server.url, prompt, 1, boundaries)
    return Sample(reply.seconds, await engine.cpu.settled() - before, reply.cached_tokens)


async def one_round(client: httpx.AsyncClient, engine: Metered, number: int) -> Round:
    """A prefix that nobody has seen. The own part alone is no one's either, and carries a hint of its own end."""
    prefix = fresh_tokens(SHARED, "prefix", number)
    boundaries = three_boundaries(SHARED, SHARED + OWN)
    cold = await sample(client, engine, [*prefix, *fresh_tokens(OWN, "cold", number)], boundaries)

    async def warm() -> Sample:
        return await sample(client, engine, [*prefix, *fresh_tokens(OWN, "warm", number)], boundaries)

    async def alone() -> Sample:
        return await sample(client, engine, fresh_tokens(OWN, "alone", number), boundaries[:0])

    if number % 2:
        return Round(cold, await warm(), await alone())
    last = await alone()
    return Round(cold, await warm(), last)


async def measure_family(name: str, pairs: int, say: Callable[[str], None]) -> list[Resumed]:
    """Both engines on the generated model of family `name`, round about."""
    model = generated_model(say, name)
    with tempfile.TemporaryDirectory(prefix="seamark-resume-") as folder, Servers(Path(folder)) as servers:
        async with open_client(300) as client:
            say(f"{name}: starting Seamark and vLLM alone")
            modes = {"seamark": "1", "baseline": "reference"}
            started = [servers.engine(name, model, mode, FLAGS) for name, mode in modes.items()]
            for server in started:
                server.wait_until_ready()
            engines = [Metered(server, CpuTime(server.process.pid)) for server in started]
            rounds: list[list[Round]] = [[], []]
            for engine in engines:
                await one_round(client, engine, -1)  # a process's first requests pay for set-up
            for number in range(pairs):
                say(f"round {number + 1} of {pairs}")
                for engine, of_engine in zip(engines, rounds, strict=True):
                    of_engine.append(await one_round(client, engine, number))
    names = (OURS, BASELINE)
    return [Resumed(engine, tuple(of_engine)) for engine, of_engine in zip(names, rounds, strict=True)]


def render(name: str, engines: Sequence[Resumed]) -> str:
    """Medians, ratios and factors of each engine."""
    lines = [f"{name}: {SHARED} tokens shared, {OWN} own; medians of {len(engines[0].rounds)} rounds"]
    head = f"{'hit':>6}{'cold':>8}{'warm':>8}{'alone':>8}  {'warm over alone':<24}cold over warm"
    lines.append(f"  {'':<14}{'':<14}{head}")
    for engine in engines:
        for label, number, comparison, factor in (
            ("first token", "first_token", engine.first_token, engine.factor),
            ("CPU", "cpu", engine.cpu, engine.cpu_factor),
        ):
            times = "".join(f"{1000 * engine.median(kind, number):>8.1f}" for kind in Round._fields)
            row = f"{engine.cached_tokens:>6g}{times}  {in_words(comparison.ratio):<24}{factor:.2f}"
            lines.append(f"  {engine.engine:<14}{label + ' (ms)':<14}{row}")
    ours, theirs = engines
    verdict = "held" if ours.first_token.held else "NOT HELD"
    lines.append(f"  {verdict}: warm over alone {ours.first_token.ratio.median:.3f}, at most {MOST} wanted")
    beside = beside_alone(ours, theirs)
    lines.append(f"  warm over vLLM's warm: first token {in_words(beside.first_token)}, CPU {in_words(beside.cpu)}")
    lines.append(f"  cold over warm {ours.factor:.2f}; mlx-lm published {MLX_LM} for these lengths")
    return "\n".join(lines)


def report(families: dict[str, list[Resumed]]) -> list[dict[str, Any]]:
    """Everything measured, for machines; lengths in tokens, times in seconds."""
    return [
        {
            "family": name,
            "held": engines[0].first_token.held,
            "warm_over_vllm_warm": {kind: s._asdict() for kind, s in beside_alone(*engines)._asdict().items()},
            "engines": [_described(engine) for engine in engines],
        }
        for name, engines in families.items()
    ]


def _described(engine: Resumed) -> dict[str, Any]:
    return {
        "engine": engine.engine,
        "shared": SHARED,
        "own": OWN,
        "cached_tokens": engine.cached_tokens,
        "first_token_ratio": engine.first_token.ratio._asdict(),
        "cpu_ratio": engine.cpu.ratio._asdict(),
        "factor": engine.factor,
        "cpu_factor": engine.cpu_factor,
        "rounds": [{kind: getattr(r, kind)._asdict() for kind in Round._fields} for r in engine.rounds],
    }


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark bench resume", description="the price of going on from a shared prefix")
    parser.add_argument("--family", action="append", metavar="NAME", help="of the generated model; repeat for several")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"rounds per engine ({PAIRS})")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error("--pairs: at least 1")
    say = narrator()
    families = {}
    for name in dict.fromkeys(args.family or ["nemotron_h"]):
        families[name] = asyncio.run(measure_family(name, args.pairs, say))
        if not args.json:
            print(render(name, families[name]) + "\n", flush=True)
    print(json.dumps(report(families), indent=1) if args.json else WORDS)
    return 0 if all(engines[0].first_token.held for engines in families.values()) else 1
