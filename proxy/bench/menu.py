"""`seamark bench`: what Seamark gains and costs, measured side by side with vLLM alone, on real engines."""

from __future__ import annotations

import sys
from collections.abc import Callable


def main(argv: list[str]) -> int:
    from proxy.bench import agents, cost, demo, fan_out, grid, passes, resume

    benchmarks = {
        "demo": demo.main,
        "grid": grid.main,
        "passes": passes.main,
        "cost": cost.main,
        "resume": resume.main,
        "fan-out": fan_out.main,
        "agents": agents.main,
    }
    if not argv or argv[0] not in benchmarks:
        asked = bool(argv) and argv[0] in ("-h", "--help")
        lines = (f"  {name:<11} {_what(main)}" for name, main in benchmarks.items())
        print("usage: seamark bench NAME ...\n", *lines, sep="\n", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return benchmarks[argv[0]](argv[1:])


def _what(main: Callable[[list[str]], int]) -> str:
    """What a benchmark measures: the first sentence of its module, or its own."""
    text = main.__doc__ or sys.modules[main.__module__].__doc__ or ""
    return text.partition("\n\n")[0].replace("\n", " ").partition(": ")[2]
