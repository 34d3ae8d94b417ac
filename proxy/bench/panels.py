"""`seamark bench panels`: every query of every dashboard panel, asked of a real Prometheus that scraped a real run.

An engine, two gateways in front of it, and traffic that gives every panel something to show. Exit status 1 where a
query yields nothing but zeros, or what it yields does not fit the unit of its panel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from proxy.bench.dashboards import Query, queries
from proxy.bench.dimensions import UNITS, dimension
from proxy.bench.engines import Fleet
from proxy.bench.models import generated_model
from proxy.bench.panel_traffic import CAREFUL, IN_SHADOW, IN_TURN, TIGHT, Rig, one_round
from proxy.bench.progress import narrator
from proxy.bench.prometheus_server import SCRAPE_SECONDS, Prometheus, prometheus

# What a value of that unit can be in a run like this one; seconds shown as milliseconds would not be.
PLAUSIBLE = {"s": (1e-6, 600.0), "percentunit": (1e-3, 1.05), "bytes": (1024.0, 2.0**36), "suffix: s/s": (1e-7, 60.0)}
ANYTHING = (1e-3, 1e6)
# Lines that a legend has to stand for: hit, partial, miss.
LINES = {"{{cache}}": 3}
MOST_ROUNDS = 6  # of traffic; on a machine with nothing else to do two are enough


class Row(NamedTuple):
    """One query, evaluated."""

    query: Query
    series: int
    peak: float  # the largest value of any series at any time
    problem: str | None  # why it is not proved


def evaluated(server: Prometheus) -> list[Row]:
    """All queries, as they are at this moment."""
    return [_row(server, query) for query in queries()]


def _row(server: Prometheus, query: Query) -> Row:
    asked = query.filled_in(time.time() - server.started, SCRAPE_SECONDS)
    found = server.over_time(asked) if query.over_time else server.at(asked)
    peak = max((value for each in found for value in each.values if math.isfinite(value)), default=0.0)
    return Row(query, len(found), peak, _problem(query, len(found), peak))


def _problem(query: Query, series: int, peak: float) -> str | None:
    if peak <= 0:
        return "nothing but zero"
    if series < LINES.get(query.legend.partition(" ")[0], 1):
        return "a line is missing"
    if dimension(query.tree) != UNITS.get(query.unit):
        return f"measures {dict(dimension(query.tree))}"
    least, most = PLAUSIBLE.get(query.unit, ANYTHING)
    return None if least <= peak <= most else f"not a plausible value of {query.unit}"


def proved(server: Prometheus, rig: Rig, say: Callable[[str], None]) -> list[Row]:
    """Send traffic until every query has something to show, or it is clear that some never will."""
    rows: list[Row] = []
    for number in range(MOST_ROUNDS):
        asyncio.run(one_round(rig, number))
        rows = evaluated(server)
        open_rows = sum(row.problem is not None for row in rows)
        say(f"round {number + 1}: {len(rows) - open_rows} of {len(rows)} queries proved")
        if not open_rows:
            break
    return rows


def table(rows: Sequence[Row]) -> str:
    """For people."""
    lines = [("dashboard", "panel", "line", "series", "largest", "unit", "")]
    lines += [
        (
            row.query.dashboard,
            row.query.panel,
            row.query.legend,
            str(row.series),
            f"{row.peak:.4g}",
            row.query.unit.removeprefix("suffix: "),
            row.problem or "ok",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="seamark bench panels", description="the dashboards' queries on a real run")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    args = parser.parse_args(argv)
    say = narrator()
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-panels-") as name, Fleet(Path(name)) as fleet:
        say("starting an engine")
        engine = fleet.engine("tight", model, flags=TIGHT)
        engine.wait_until_ready()
        rig = Rig(engine, *(fleet.gateway(engine, flags=flags) for flags in (IN_TURN, (), IN_SHADOW, CAREFUL)))
        _, *gateways = rig
        for gateway in gateways:
            gateway.wait_until_ready("/ready", seconds=30)
        jobs = {"seamark": gateways, "vllm": (engine,)}
        rows = proved(prometheus(fleet, Path(name), jobs), rig, say)
    if args.json:
        print(json.dumps([{**row.query._asdict(), **row._asdict(), "query": row.query.expression} for row in rows]))
    else:
        print(table(rows))
    return 0 if all(row.problem is None for row in rows) else 1
