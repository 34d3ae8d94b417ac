"""`seamark bench`: what Seamark gains and costs, measured side by side with vLLM alone, on real engines."""

from __future__ import annotations

import sys


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
        print(f"usage: seamark bench {{{','.join(benchmarks)}}} ...", file=sys.stderr)
        return 2
    return benchmarks[argv[0]](argv[1:])


def _panels(argv: list[str]) -> int:
    from proxy.bench import panels  # its PromQL parser is installed for tests only

    return panels.main(argv)
