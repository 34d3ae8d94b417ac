"""`python -m tests.bench.vllm_serve`: vLLM's own load generator on vLLM alone and on Seamark, in alternating pairs.

`vllm bench serve --backend openai-chat`, four at once: prompts that share much, little and nothing. Every round has
prompts of its own, the same for all. Two engines are plain vLLM: what two equal ones differ by is the measure for what
ours does, and as one engine they would have had twice the prompts, of which even random ones meet again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import open_client
from proxy.bench.harness.counters import CpuTime, samples_of
from proxy.bench.harness.ratios import Comparison, Pair, in_words
from proxy.bench.harness.servers import Server, Servers, generated_model, narrator
from proxy.chat.chat import CHAT
from tests.bench.serve_client import ServeClient, arguments_of

PAIRS = 8

AT_ONCE = 4

WARM_UP = 10  # requests; `vllm bench serve` wants as many as there are prefixes

ANSWER_TOKENS = 16

LIMIT = 1.05  # of first token and duration, over plain vLLM's, unless two runs of that differ by more

CPU_LIMIT = 1.0  # of the API process, the same way

PLAIN, AGAIN, OURS, WORKER = "vLLM alone", "vLLM alone again", "Seamark", "our worker without gateway"

HITS = "vllm:prefix_cache_hits_total"

RENDERS = f'http_requests_total{{handler="{CHAT}/render"}}'

FIGURES = {"first_token": "first token p50", "duration": "duration", "cpu": "CPU of the API process"}

WORDS = (
    "ratio: over the run of vLLM alone of the same round, median of the rounds and quartiles. vLLM alone has the\n"
    "cures of upstream defects (SEAMARK_ENGINE=reference) and caches prefixes; again: an equal engine with the same\n"
    "prompts. held: at most the limit, or at most the upper quartile that vLLM alone has over itself. CPU: the\n"
    "worker's API process without its engine process, and without the gateway. hits: tokens, sum of all rounds."
)


class Case(NamedTuple):
    """Arguments of `vllm bench serve`."""

    name: str
    prompts: int
    flags: tuple[str, ...]
    shares: bool = True


def repeated(prefixes: int, shared: int, own: int, prompts: int) -> Case:
    """So many prompts, each one of the prefixes and words of its own; tokens."""
    lengths = {"prefix-len": shared, "suffix-len": own, "num-prefixes": prefixes, "output-len": ANSWER_TOKENS}
    flags = [part for name, value in lengths.items() for part in (f"--prefix-repetition-{name}", str(value))]
    return Case(f"{prefixes} x {shared} + {own}", prompts, ("--dataset-name", "prefix_repetition", *flags))


def _random(shared: int, own: int, prompts: int) -> Case:
    lengths = {"prefix-len": shared, "input-len": own, "output-len": ANSWER_TOKENS}
    flags = [part for name, value in lengths.items() for part in (f"--random-{name}", str(value))]
    return Case(f"random {shared} + {own}", prompts, ("--dataset-name", "random", *flags), shared > 0)


CASES = (repeated(5, 1000, 60, 60), repeated(10, 163, 40, 80), _random(0, 400, 40), _random(3000, 200, 40))


class Run(NamedTuple):
    """One run on one contestant; seconds, tokens."""

    first_token: float
    duration: float
    cpu: float  # of the worker's API process
    hits: int
    renders: int


@dataclass
class Contestant:
    """What requests are sent to."""

    name: str
    url: str
    engine: Server
    api: CpuTime
    runs: dict[Case, list[Run]] = field(default_factory=dict)

    async def run(self, http: httpx.AsyncClient, client: ServeClient, case: Case, model: Path, seed: int) -> Run:
        """One run with the prompts that `seed` gives."""
        flags = arguments_of(self.url, model, case.prompts, AT_ONCE, seed)
        before, used = await samples_of(http, self.engine), self.api.seconds()
        served = await client.run([*flags, *case.flags])
        used, after = self.api.seconds() - used, await samples_of(http, self.engine)
        hits, renders = (int(after[name] - before[name]) for name in (HITS, RENDERS))
        return Run(served.first_token, served.duration, used, hits, renders)


@dataclass(frozen=True)
class Row:
    """One case on one contestant, beside vLLM alone in the same rounds."""

    case: str
    name: str
    runs: tuple[Run, ...]
    plain: tuple[Run, ...]
    again: tuple[Run, ...]
    shares: bool = True  # prompts that share nothing hit by chance

    def ratio(self, figure: str, runs: Sequence[Run] | None = None) -> Comparison:
        """Of one figure; the limit is the greater of what is wanted and what vLLM alone takes over itself."""
        own = self.runs if runs is None else runs
        pairs = tuple(Pair(getattr(a, figure), getattr(b, figure)) for a, b in zip(own, self.plain, strict=True))
        wanted = CPU_LIMIT if figure == "cpu" else LIMIT
        if runs is None:
            wanted = max(wanted, self.ratio(figure, self.again).ratio.upper)
        return Comparison(figure, pairs, wanted)

    @property
    def hits(self) -> int:
        """Tokens of all rounds."""
        return sum(run.hits for run in self.runs)

    @property
    def renders(self) -> int:
        """Asked of the worker in all rounds."""
        return sum(run.renders for run in self.runs)

    @property
    def complaints(self) -> list[str]:
        """What does not hold."""
        found = [words for figure, words in FIGURES.items() if not self.ratio(figure).held]
        found += ["renders"] if self.renders else []
        fewer = self.shares and self.hits < sum(run.hits for run in self.plain)
        return found + (["hits"] if fewer else [])


async def compare(
    contestants: Sequence[Contestant], cases: Sequence[Case], model: Path, pairs: int, say: Callable[[str], None]
) -> list[Row]:
    """`pairs` rounds of every case, the order turned on from round to round."""
    async with open_client() as http, ServeClient() as client:
        for case in cases:  # what processes do once, for each kind of prompt
            for contestant in contestants:
                await contestant.run(http, client, case._replace(prompts=min(case.prompts, WARM_UP)), model, 10**6)
        for number in range(pairs):
            for case in cases:
                say(f"pair {number + 1} of {pairs}: {case.name}")
                turn = number % len(contestants)
                for contestant in [*contestants[turn:], *contestants[:turn]]:
                    run = await contestant.run(http, client, case, model, number)
                    contestant.runs.setdefault(case, []).append(run)
    by_name = {contestant.name: contestant for contestant in contestants}
    return [
        Row(case.name, name, *(tuple(by_name[each].runs[case]) for each in (name, PLAIN, AGAIN)), shares=case.shares)
        for case in cases
        for name in by_name
        if name != PLAIN
    ]


async def measure(cases: Sequence[Case], pairs: int, worker_too: bool, say: Callable[[str], None]) -> list[Row]:
    """Start everything, and compare; `worker_too`: our worker without the gateway as well."""
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-serve-") as folder, Servers(Path(folder)) as servers:
        say("starting vLLM alone and Seamark")
        engines = {PLAIN: servers.engine("plain", model, "reference"), OURS: servers.engine("seamark", model)}
        engines[AGAIN] = servers.engine("again", model, "reference")
        if worker_too:
            engines[WORKER] = servers.engine("worker", model)
        for engine in engines.values():
            engine.wait_until_ready()
        gateway = servers.gateway(engines[OURS])
        gateway.wait_until_ready("/ready", seconds=60)
        contestants = [
            Contestant(name, (gateway if name == OURS else engine).url, engine, CpuTime(engine.process.pid, alone=True))
            for name, engine in engines.items()
        ]
        return await compare(contestants, cases, model, pairs, say)


def render(rows: Sequence[Row]) -> str:
    """A line for each case and contestant, then the verdicts."""
    head = f"{'case':<18}{'over vLLM alone':<28}" + "".join(f"{words:<26}" for words in FIGURES.values())
    lines = [head + f"{'hits':>9}{'plain':>9}{'renders':>9}"]
    for row in rows:
        ratios = "".join(f"{in_words(row.ratio(figure).ratio):<26}" for figure in FIGURES)
        plain = sum(run.hits for run in row.plain)
        lines.append(f"{row.case:<18}{row.name:<28}{ratios}{row.hits:>9}{plain:>9}{row.renders:>9}")
    for row in rows:
        if row.name == OURS:
            seconds = [statistics.median(run.first_token for run in runs) for runs in (row.runs, row.plain)]
            cpu = [statistics.median(run.cpu for run in runs) for runs in (row.runs, row.plain)]
            figures = "first token {:.0f} ms, plain {:.0f}".format(*(1e3 * each for each in seconds))
            figures += "; CPU {:.2f} s, plain {:.2f}".format(*cpu)
            verdict = f"NOT HELD ({', '.join(row.complaints)})" if row.complaints else "held"
            lines.append(f"{verdict}: {row.case}: {figures}")
    return "\n".join(lines)


def report(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Everything measured, for machines; seconds, tokens."""
    return [
        {
            "case": row.case,
            "contestant": row.name,
            "ratios": {figure: row.ratio(figure).ratio._asdict() for figure in FIGURES},
            "limits": {figure: row.ratio(figure).limit for figure in FIGURES},
            "hits": row.hits,
            "renders": row.renders,
            "complaints": row.complaints,
            "runs": [run._asdict() for run in row.runs],
            "plain": [run._asdict() for run in row.plain],
        }
        for row in rows
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.vllm_serve", description="vllm bench serve on vLLM alone and on Seamark"
    )
    names = {case.name: case for case in CASES}
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"rounds of every case ({PAIRS})")
    parser.add_argument("--case", action="append", choices=names, help="only this one (repeat); default: all")
    parser.add_argument("--worker-too", action="store_true", help="our worker without the gateway as well")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error("--pairs: at least 1")
    cases = [names[name] for name in dict.fromkeys(args.case or names)]
    rows = asyncio.run(measure(cases, args.pairs, args.worker_too, narrator()))
    print(json.dumps(report(rows), indent=1) if args.json else f"{render(rows)}\n\n{WORDS}")
    return 1 if any(row.complaints for row in rows if row.name == OURS) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
