"""`python -m tests.bench.eviction`: chats of 128 clients beside room for 512 states, kept in four ways, side by side.

SGLang's test of its own cure: 12 rounds, 512 tokens a question and 64 an answer, and no room for the states of all
rounds. vLLM's scheduler and cache are real, and so is what Seamark decides; no model runs and no time passes. Each line
is a way to keep states: vLLM's own; SGLang's before its cure, where a hit refreshes all states on its path; after it,
where it refreshes the one that is used; Seamark's. All get the same requests in the same order.

The hit rate is SGLang's: tokens that hit of all tokens of prompts. It published .55 before and .80 after the cure. Not
known here are its lengths, its rate and how many of the 512 running requests held: the lengths are the defaults of its
benchmark. The 512 states are apart from attention's blocks, which are ample, as with SGLang; and in one pool with
them, as with vLLM, with room for each chat once. Exit status 1 if Seamark's median is below `LEAST`, or below another's
by more than `SLACK`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from proxy.bench.harness.servers import generated_model, narrator
from tests.harness.multi_turn import ALONE, BLOCK, OURS, USED, WHOLE_PATH, Found, Pattern, Pool
from tests.harness.scheduler_process import run_apart

LEAST = 0.80  # SGLang's hit rate after its cure

SLACK = 0.005  # the end of a turn lies up to a match unit before that of the prompt, which is SGLang's place

WAYS = (ALONE, WHOLE_PATH, USED, OURS)


def pools(pattern: Pattern) -> dict[str, Pool]:
    """The pools that a pattern is measured with."""
    once = pattern.clients * -(-pattern.longest // BLOCK)  # attention of each chat
    return {
        "512 states apart": Pool(512, 4 * once, parted=True),
        "512 states in one pool": Pool(512, once, parted=False),
    }


def measure(model: str, way: str, pool: Pool, patterns: Sequence[Pattern]) -> list[Found]:
    """What the patterns' requests find (`tests.harness.simulated_eviction`)."""
    wanted = {"pool": asdict(pool), "patterns": [asdict(pattern) for pattern in patterns]}
    return [Found(*found) for found in run_apart("simulated_eviction", model, way, json.dumps(wanted))]


def line(way: str, found: Sequence[Found]) -> str:
    """Of the table: medians, and the hit rate of each seed."""
    median = [
        statistics.median(rates)
        for rates in (
            [each.hit_rate for each in found],
            [each.delivered for each in found],
            [each.whole_rate for each in found],
        )
    ]
    seeds = " ".join(f"{each.hit_rate:.3f}" for each in found)
    return f"  {way:<12}{median[0]:>9.3f}{median[1]:>14.3f}{median[2]:>15.3f}   {seeds}"


def missed(found: Mapping[str, Sequence[Found]]) -> list[str]:
    """What Seamark's median hit rate falls short of, with one pool."""
    rates = {way: statistics.median(each.hit_rate for each in runs) for way, runs in found.items()}
    ours = rates.pop(OURS)
    below = [f"{way} ({rate:.3f})" for way, rate in rates.items() if ours < rate - SLACK]
    return below if ours >= LEAST else [*below, f"{LEAST:.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.eviction", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each line")
    parser.add_argument("--rate", type=float, default=Pattern.rate, help="arrivals a second")
    parser.add_argument("--free", action="store_true", help="clients go on without waiting for the others' round")
    args = parser.parse_args()
    pattern = Pattern(rate=args.rate, together=not args.free)
    patterns = [replace(pattern, seed=seed) for seed in range(1, args.seeds + 1)]
    model, short = str(generated_model(narrator())), False
    for name, pool in pools(pattern).items():
        print(f"\n  {name:<12}\n  {'':<12}{'hit rate':>9}{'of shareable':>14}{'whole rounds':>15}   hit rate by seed")
        found = {}
        for way in WAYS:
            found[way] = measure(model, way, pool, patterns)
            print(line(way, found[way]), flush=True)
        if lacks := missed(found):
            print(f"  Seamark is below {', '.join(lacks)}")
            short = True
    return int(short)


if __name__ == "__main__":
    raise SystemExit(main())
