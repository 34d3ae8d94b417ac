"""`python -m tests.bench.second_sight_serve`: `vllm bench serve` with repeated prefixes, expected junctions on and off.

Two real engines behind a gateway each, the same prompts for both, in turns; only one of them keeps states where it
expects prompts to be left, before anybody has. Hits, states written by kind, and how many of them nobody resumed from.
Exit status 1 if expecting them costs hits, or no state was ever expected.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from proxy.bench.harness.client import open_client
from proxy.bench.harness.counters import CpuTime, samples_of
from proxy.bench.harness.servers import Servers, generated_model, narrator
from tests.bench.serve_client import ServeClient
from tests.bench.vllm_serve import Case, Contestant, repeated
from tests.harness.state_uses import Uses, environment, uses_in

ROUNDS = 3

# Many prefixes with few prompts each, where the second sight counts, and few with many.
CASES = (repeated(40, 163, 40, 120), repeated(30, 1000, 60, 90), repeated(5, 1000, 60, 60))

PROMPT_TOKENS = "vllm:prefix_cache_queries_total"

ON, OFF = "expected", "not expected"


class Row(NamedTuple):
    """One case on one engine, all rounds; tokens."""

    case: str
    engine: str
    prompt: int
    hits: int
    first_tokens: tuple[float, ...]  # seconds, p50 of each round
    states: dict[str, Uses]  # by kind

    def in_words(self) -> str:
        """In the table."""
        written, unused = (sum(part) for part in zip(*self.states.values(), strict=True)) if self.states else (0, 0)
        kinds = ", ".join(f"{kind} {uses.written}/{uses.unused}" for kind, uses in sorted(self.states.items()))
        share = self.hits / self.prompt if self.prompt else 0.0
        waits = f"{1000 * statistics.median(self.first_tokens):>8.0f}"
        counts = f"{share:>8.1%}{waits}{written:>9}{unused:>8}   {kinds}"
        return f"{self.case:<16}{self.engine:<14}{self.prompt:>9}{counts}"


HEAD = (
    f"{'case':<16}{'junctions':<14}{'tokens':>9}{'hits':>8}{'p50 ms':>8}{'written':>9}{'unused':>8}"
    "   by kind, written/unused"
)


async def measure(
    contestants: dict[str, Contestant],
    folders: dict[str, Path],
    cases: Sequence[Case],
    model: Path,
    rounds: int,
    say: Callable[[str], None],
) -> list[Row]:
    """Every case in `rounds` rounds with prompts of their own, the first engine another one from round to round."""
    rows = []
    async with open_client() as http, ServeClient() as client:
        for case in cases:
            before = {name: uses_in(folders[name]) for name in contestants}
            prompts = dict.fromkeys(contestants, 0)
            for number in range(rounds):
                say(f"{case.name}: round {number + 1} of {rounds}")
                for name in list(contestants)[:: (-1) ** number]:
                    contestant = contestants[name]
                    tokens = (await samples_of(http, contestant.engine))[PROMPT_TOKENS]
                    run = await contestant.run(http, client, case, model, number)
                    contestant.runs.setdefault(case, []).append(run)
                    prompts[name] += int((await samples_of(http, contestant.engine))[PROMPT_TOKENS] - tokens)
            for name, contestant in contestants.items():
                runs = contestant.runs[case]
                grown = _grown(before[name], uses_in(folders[name]))
                hits = sum(run.hits for run in runs)
                rows.append(Row(case.name, name, prompts[name], hits, tuple(run.first_token for run in runs), grown))
                print(rows[-1].in_words(), flush=True)
    return rows


def _grown(before: dict[str, Uses], after: dict[str, Uses]) -> dict[str, Uses]:
    none = Uses(0, 0)
    return {
        kind: Uses(uses.written - before.get(kind, none).written, uses.unused - before.get(kind, none).unused)
        for kind, uses in after.items()
    }


def complaints(rows: Sequence[Row]) -> list[str]:
    """What does not hold."""
    found = []
    for on, off in zip(rows[::2], rows[1::2], strict=True):
        if on.hits < off.hits:
            found.append(f"{on.case}: {on.hits} tokens hit with expected junctions, {off.hits} without")
    if not any(row.states.get("expected") for row in rows if row.engine == ON):
        found.append("no state was written because it was expected")
    if any(row.states.get("expected") for row in rows if row.engine == OFF):
        found.append("the engine that expects no junctions wrote states there")
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.second_sight_serve", description=__doc__.split("\n")[0]
    )
    names = {case.name: case for case in CASES}
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"of every case ({ROUNDS})")
    parser.add_argument("--case", action="append", choices=names, help="only this one (repeat); default: all")
    args = parser.parse_args(argv)
    say = narrator()
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-sight-") as scratch, Servers(Path(scratch)) as servers:
        folders = {name: Path(scratch, name.replace(" ", "-")) for name in (ON, OFF)}
        say("starting two engines")
        engines = {
            name: servers.engine(name.replace(" ", "-"), model, environment=environment(folder, expected=name == ON))
            for name, folder in folders.items()
        }
        for engine in engines.values():
            engine.wait_until_ready()
        contestants = {}
        for name, engine in engines.items():
            gateway = servers.gateway(engine)
            gateway.wait_until_ready("/ready", seconds=60)
            contestants[name] = Contestant(name, gateway.url, engine, CpuTime(engine.process.pid, alone=True))
        print(HEAD, flush=True)
        cases = [names[name] for name in dict.fromkeys(args.case or names)]
        rows = asyncio.run(measure(contestants, folders, cases, model, args.rounds, say))
    wrong = complaints(rows)
    for each in wrong:
        print(f"NOT SO: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
