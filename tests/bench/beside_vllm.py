"""`python -m tests.bench.beside_vllm`: the first token through Seamark over vLLM's alone, in four workloads.

vLLM's own client sends them, to vLLM alone (with the cures of its own defects, without which it dies of such prompts on
a CPU), to an engine with the plugin, and through the gateway to that one, in turns whose order changes; rounds are
pooled. Both engines are on one core, and only one is asked at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from proxy.bench.harness.servers import generated_model, narrator
from tests.bench.first_tokens import DIRECT, Load, Setup, Way, figures, measure, report

ROUNDS, WARM_UP, PROMPTS = 8, 3, 60

ALONE = "vLLM alone"

LIMITS = {0.5: 1.02, 0.95: 1.05, 0.99: 1.10}  # over vLLM alone, by percentile

OWN, SHARED, OUTPUT = 512, 512, 16  # tokens


def workloads(prompts: int) -> dict[str, Load]:
    """By name."""
    return {
        "random, nothing shared": Load(prompts, OWN, OUTPUT, at_once=4),
        "random, lengths spread": Load(prompts, OWN, OUTPUT, at_once=8, spread=0.5),
        "one prefix for all": Load(prompts, OWN // 4, OUTPUT, at_once=4, prefix_tokens=SHARED),
        "six prefixes": Load(prompts, OWN // 4, OUTPUT, at_once=4, prefix_tokens=SHARED, prefixes=6),
    }


def complaints(ours: Way, alone: Way) -> list[str]:
    """Where ours is beyond what it may have."""
    own, theirs = figures(ours), figures(alone)
    found = [f"p{share * 100:g}" for share, limit in LIMITS.items() if own[share] > limit * theirs[share]]
    return [*found, "hits"] if sum(ours.hits) < sum(alone.hits) else found


def render(name: str, ways: Sequence[Way]) -> str:
    """A block for one workload."""
    alone, ours = ways[0], ways[-1]
    theirs = figures(alone)
    shares = tuple(LIMITS)
    lines = [f"{name:<24}" + "".join(f"{f'p{share * 100:g}, ms':>10}" for share in shares) + f"{'over':>20}{'hits':>8}"]
    for way in ways:
        own = figures(way)
        over = " ".join(f"{own[share] / theirs[share]:.3f}" for share in shares)
        line = f"  {way.name:<22}" + "".join(f"{1e3 * own[share]:>10.1f}" for share in shares)
        lines.append(f"{line}{over:>20}{sum(way.hits) / len(way.hits):>8.0f}")
    beyond = complaints(ours, alone)
    lines.append(f"  {'NOT HELD: ' + ', '.join(beyond) if beyond else 'held'}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.beside_vllm")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"that count ({ROUNDS})")
    parser.add_argument("--prompts", type=int, default=PROMPTS, metavar="N", help=f"of a round ({PROMPTS})")
    parser.add_argument("--only", metavar="TEXT", default="", help="workloads whose name has this in it")
    parser.add_argument("--json", action="store_true", help="print the report instead of the tables")
    args = parser.parse_args(argv)
    if min(args.rounds, args.prompts) < 1:
        parser.error("all numbers: at least 1")
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two cores at least")
    say = narrator()
    model = generated_model(say)
    found: dict[str, list[Way]] = {}
    with tempfile.TemporaryDirectory(prefix="seamark-beside-") as folder, Setup(Path(folder), say) as setup:
        say("starting everything")
        engines = setup.engines(model, 1, ALONE, "reference")
        patched = setup.engines(model, 1, DIRECT)
        setup.gateway(patched)
        for name, load in workloads(args.prompts).items():
            if args.only in name:
                say(name)
                ways = [Way(way.name, way.url, way.headers) for way in setup.ways]
                asyncio.run(measure(ways, [*engines, *patched], load, args.rounds, model, say, WARM_UP))
                found[name] = ways
    if args.json:
        print(json.dumps({name: report(ways) for name, ways in found.items()}))
    else:
        print("\n\n".join(render(name, ways) for name, ways in found.items()))
        print(
            f"\nfirst tokens in ms, {args.rounds} rounds pooled; over: of {ALONE}; hits: prompt tokens in a round, mean"
        )
    return 1 if any(complaints(ways[-1], ways[0]) for ways in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
