"""`seamark bench`: what Seamark gains and costs, measured side by side with vLLM alone, on real engines."""

from __future__ import annotations

import sys
from collections.abc import Callable


def main(argv: list[str]) -> int:
    from proxy.bench import (
        aborts,
        agents,
        boundary_cost,
        cost,
        demo,
        fan_out,
        fuzz,
        gateway_cost,
        grid,
        pass_rows,
        redis_cost,
        resume,
        self_check,
        shadow,
        soak,
        streams,
        table_memory,
        templates,
        tenants,
    )

    benchmarks = {
        "demo": demo.main,
        "grid": grid.main,
        "passes": pass_rows.main,
        "cost": cost.main,
        "resume": resume.main,
        "soak": soak.main,
        "shadow": shadow.main,
        "self-check": self_check.main,
        "fan-out": fan_out.main,
        "boundaries": boundary_cost.main,
        "templates": templates.main,
        "agents": agents.main,
        "redis": redis_cost.main,
        "tenants": tenants.main,
        "gateway": gateway_cost.main,
        "streams": streams.main,
        "tables": table_memory.main,
        "aborts": aborts.main,
        "fuzz": fuzz.main,
        "panels": _panels,
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


def _panels(argv: list[str]) -> int:
    """`seamark bench panels`: every query of the dashboards, asked of a real Prometheus that scraped a real run."""
    from proxy.bench import panels  # its PromQL parser is installed for tests only

    return panels.main(argv)
