"""`seamark bench cost`: CPU time that the plugin adds to prompts that nobody shares, where it can gain nothing.

Seamark's engine, with hints and without, and vLLM alone run side by side and take turns. Exit status 1 if the median
ratio over all lengths is above `MOST`.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from proxy.bench.harness.client import fresh_tokens, open_client, request, three_boundaries
from proxy.bench.harness.counters import CpuTime
from proxy.bench.harness.ratios import Comparison, Pair, Spread, in_words, pooled, spread
from proxy.bench.harness.servers import Server, Servers, generated_model, narrator
from proxy.bench.passes import BASELINE, FLAGS
from proxy.commands.parser import Parser

MOST = 1.02  # CPU time over that of vLLM alone

BATCHES = {100: 10, 300: 6, 1000: 3, 3000: 2, 8000: 1}  # prompt tokens -> requests that make one sample

ANSWER_TOKENS = 4

PAIRS = 24

STARTS = 4  # of both engines, which share the pairs: two starts of one engine differ by up to a millisecond a request

WARM_UP = (300, 8000)  # prompt tokens; a process's first requests pay for set-up

KINDS = NO_HINTS, THREE_HINTS = ("no hints", "three hints, never shared")

WORDS = (
    "ratio: CPU time (user and system, all processes of the server) over that of vLLM alone, median of the pairs and\n"
    "quartiles; calm: the lower quartile of each side over the other's, when the machine was least disturbed;\n"
    "extra: CPU milliseconds that a request takes more. No two prompts share a beginning. vLLM alone has the cures\n"
    "of upstream defects (SEAMARK_ENGINE=reference), caches prefixes, and chooses its match unit itself."
)


@dataclass
class Metered:
    """A running engine and its CPU clock."""

    server: Server
    cpu: CpuTime

    async def seconds_each(
        self, client: httpx.AsyncClient, prompts: Sequence[Sequence[int]], boundaries: Sequence[int] = ()
    ) -> float:
        """CPU seconds for each of some requests, sent one after the other."""
        before = await self.cpu.settled()
        for prompt in prompts:
            reply = await request(client, self.server.url, prompt, ANSWER_TOKENS, boundaries)
            if reply.cached_tokens:
                raise RuntimeError(f"{self.server.name}: a prompt that nobody sent before hit the cache")
        return (await self.cpu.settled() - before) / len(prompts)


@dataclass(frozen=True)
class CostOfPrompts:
    """What one family's engine pays."""

    family: str
    by_length: dict[int, dict[str, Comparison]]  # prompt tokens -> with hints and without

    def over_all(self, kind: str) -> Comparison:
        """All pairs of one kind."""
        return pooled(kind, [kinds[kind] for kinds in self.by_length.values()])

    @property
    def held(self) -> bool:
        """Whether neither kind costs more than it may."""
        return all(self.over_all(kind).held for kind in (NO_HINTS, THREE_HINTS))


async def compare(
    client: httpx.AsyncClient,
    ours: Metered,
    baseline: Metered,
    batches: dict[int, int],
    pairs: int,
    order: random.Random,
    say: Callable[[str], None],
) -> dict[int, dict[str, Comparison]]:
    """Pairs of every length, each time in another order, so that nothing that comes at intervals meets one side alone.

    One sample of the baseline stands against two of ours, taken with it.
    """
    for engine in (ours, baseline):
        for length in WARM_UP:
            await engine.seconds_each(client, [fresh_tokens(length, "first", length)])
    found: dict[tuple[int, str], list[Pair]] = {(length, kind): [] for length in batches for kind in KINDS}
    for number in range(pairs):
        say(f"pair {number + 1} of {pairs}")
        for length, batch in batches.items():
            hinted = three_boundaries(length // 3, length)
            turns = [(NO_HINTS, ours, []), (BASELINE, baseline, []), (THREE_HINTS, ours, hinted)]
            seconds = {}
            for kind, engine, boundaries in order.sample(turns, len(turns)):
                prompts = [fresh_tokens(length, number, length, kind, part) for part in range(batch)]
                seconds[kind] = await engine.seconds_each(client, prompts, boundaries)
            for kind in KINDS:
                found[length, kind].append(Pair(seconds[kind], seconds[BASELINE]))
    return {length: {kind: Comparison(kind, tuple(found[length, kind]), MOST) for kind in KINDS} for length in batches}


async def measure_family(name: str, pairs: int, say: Callable[[str], None]) -> CostOfPrompts:
    """Both engines on the generated model of family `name`, at the same time, started `STARTS` times."""
    model = generated_model(say, name)
    starts = min(STARTS, pairs)
    found = []
    for start in range(starts):
        share = pairs // starts + (start < pairs % starts)
        say(f"{name}: starting Seamark and vLLM alone, {start + 1} of {starts}")
        found.append(await measure_start(model, share, random.Random(start), say))
    return CostOfPrompts(
        name,
        {length: {kind: pooled(kind, [each[length][kind] for each in found]) for kind in KINDS} for length in BATCHES},
    )


async def measure_start(
    model: Path, pairs: int, order: random.Random, say: Callable[[str], None]
) -> dict[int, dict[str, Comparison]]:
    """What `compare` finds with both engines, started for it."""
    with tempfile.TemporaryDirectory(prefix="seamark-cost-") as folder, Servers(Path(folder)) as servers:
        async with open_client(300) as client:
            modes = {"seamark": "1", "baseline": "reference"}
            started = [servers.engine(name, model, mode, FLAGS) for name, mode in modes.items()]
            for server in started:
                server.wait_until_ready()
            ours, baseline = (Metered(server, CpuTime(server.process.pid)) for server in started)
            return await compare(client, ours, baseline, BATCHES, pairs, order, say)


def render(cost: CostOfPrompts) -> str:
    """One line per length and kind."""
    head = f"  {'kind':<27}{'tokens':>6}  {'ratio':<22}{'calm':<7}{'extra ms':<26}vLLM alone ms"
    lines = [f"{cost.family}: CPU time of never-shared prompts, {ANSWER_TOKENS} tokens answered", head]
    for kind in KINDS:
        for length, kinds in cost.by_length.items():
            lines.append(_line(kinds[kind], str(length)))
        lines.append(_line(cost.over_all(kind), "all"))
    for kind in KINDS:
        over_all = cost.over_all(kind)
        verdict = "held" if over_all.held else "NOT HELD"
        lines.append(f"  {verdict}: {kind}, {over_all.ratio.median:.3f} over all, at most {MOST} wanted")
    return "\n".join(lines)


def _line(comparison: Comparison, length: str) -> str:
    extra = Spread(*(1000 * seconds for seconds in comparison.extra))
    # Over all lengths only ratios can be put together.
    theirs = calm = ""
    if length != "all":
        calm = f"{comparison.calm:.3f}"
        theirs = f"{1000 * spread([pair.theirs for pair in comparison.pairs]).median:.1f}"
    mark = "" if comparison.held else "  above"
    ratio = f"{in_words(comparison.ratio):<22}{calm:<7}"
    return f"  {comparison.name:<27}{length:>6}  {ratio}{_milliseconds(extra):<26}{theirs}{mark}"


def _milliseconds(extra: Spread) -> str:
    return f"{extra.median:+.2f} ({extra.lower:+.2f}..{extra.upper:+.2f})"


def report(costs: Sequence[CostOfPrompts]) -> list[dict[str, Any]]:
    """Everything measured, for machines; seconds of CPU time."""

    def described(comparison: Comparison) -> dict[str, Any]:
        return {
            "ratio": comparison.ratio._asdict(),
            "calm": comparison.calm,
            "extra_seconds": comparison.extra._asdict(),
            "held": comparison.held,
            "pairs": [pair._asdict() for pair in comparison.pairs],
        }

    return [
        {
            "family": cost.family,
            "limit": MOST,
            "held": cost.held,
            "over_all": {kind: described(cost.over_all(kind)) for kind in KINDS},
            "by_length": {
                length: {kind: described(comparison) for kind, comparison in kinds.items()}
                for length, kinds in cost.by_length.items()
            },
        }
        for cost in costs
    ]


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark bench cost", description="CPU time the plugin adds where nothing is shared")
    parser.add_argument("--family", action="append", metavar="NAME", help="of the generated model; repeat for several")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"of samples per length ({PAIRS})")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.pairs < 1:
        parser.error("--pairs: at least 1")
    say = narrator()
    costs = []
    for name in dict.fromkeys(args.family or ["nemotron_h"]):
        costs.append(asyncio.run(measure_family(name, args.pairs, say)))
        if not args.json:
            print(render(costs[-1]) + "\n", flush=True)
    print(json.dumps(report(costs), indent=1) if args.json else WORDS)
    return 0 if all(cost.held for cost in costs) else 1
