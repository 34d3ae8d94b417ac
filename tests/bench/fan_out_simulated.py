"""`python -m tests.bench.fan_out_simulated`: cold fan-outs, gate on and off, on the real scheduler with a set pace.

No model runs and no time passes: a step takes the floor and the time for each token of a Spark or of an H200. Every
line is one fan-out: prompt tokens computed over those that have to be, mean seconds to the first token, and the ratio.
Exit status 1 if the gate makes a mean first token worse by more than `MOST_WORSE`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from proxy.bench.harness.servers import generated_model, narrator
from tests.harness.fan_out_cells import Cell, mixed, table
from tests.harness.scheduler_process import run_apart

MOST_WORSE = 1.02

HEAD = f"  {'pace':<7}{'arrive':<11}{'shared':>7}{'own':>6}{'followers':>10}{'others':>8}"


def measure(cells: Sequence[Cell], model: str) -> list[Mapping[str, Any]]:
    """Each cell with what its requests computed and waited, gate on and off (`tests.harness.simulated_fan_out`)."""
    return run_apart("simulated_fan_out", model, json.dumps({"cells": [asdict(cell) for cell in cells]}))


def render(cells: Sequence[Cell], found: Sequence[Mapping[str, Any]]) -> str:
    """A line for each cell."""
    lines = [
        f"{HEAD}    computed/ideal      mean first token",
        f"{'':{len(HEAD)}}      on     off        on       off  on/off",
    ]
    for cell, sides in zip(cells, found, strict=True):
        on, off = sides["on"], sides["off"]
        lines.append(
            f"  {cell.pace:<7}{'staggered' if cell.staggered else 'at once':<11}{cell.shared:>7}{cell.own:>6}"
            f"{cell.followers:>10}{cell.strangers:>8}"
            f"{on['computed'] / cell.ideal:>8.2f}{off['computed'] / cell.ideal:>8.2f}"
            f"{on['first_token']:>9.3f}s{off['first_token']:>9.3f}s{ratio(sides):>8.2f}"
        )
    return "\n".join(lines)


def ratio(sides: Mapping[str, Any]) -> float:
    """Mean first token with the gate over that without."""
    return float(sides["on"]["first_token"] / sides["off"]["first_token"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fan_out_simulated", description=__doc__)
    parser.add_argument("--mixed", action="store_true", help="other requests, long tails and narrow engines too")
    parser.add_argument("--json", action="store_true", help="print the figures instead of the table")
    args = parser.parse_args()
    cells = table() + (mixed() if args.mixed else [])
    found = measure(cells, str(generated_model(narrator())))
    print(json.dumps(found, indent=1) if args.json else render(cells, found))
    return int(any(ratio(sides) > MOST_WORSE for sides in found))


if __name__ == "__main__":
    raise SystemExit(main())
