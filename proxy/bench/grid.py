"""`seamark bench grid`: how much of what two prompts share the second one hits, over a grid of lengths.

Four modes on real engines, one engine at a time. Exit status 1 if Seamark gives less than `cells.WANTED` of it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proxy.bench import picture
from proxy.bench.cells import (
    FULL,
    QUICK,
    WANTED,
    Cell,
    CellFamily,
    CellPlan,
    Lengths,
    Mode,
    measure_baseline,
    measure_seamark,
)
from proxy.bench.harness.client import open_client
from proxy.bench.harness.servers import Servers, generated_model, narrator
from proxy.bench.stories import UNIT
from proxy.commands.parser import Parser

CONTEXT_FLAGS = ("--max-model-len", "12288")

# Rows that verify drafts under model runner V1 do not mix with asynchronous scheduling.
DRAFTS = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
DRAFT_FLAGS = ("--speculative-config", DRAFTS, "--no-async-scheduling")
DRAFT_ENVIRONMENT = {"SEAMARK_DRAFTS": "1"}

BASELINES = {"vLLM alone": (), "vLLM, unit 16": ("--prefix-match-unit", "16")}


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="seamark bench grid", description="hit efficiency of a second request over shared and own lengths"
    )
    parser.add_argument("--family", action="append", metavar="NAME", help="of the generated model; repeat for several")
    parser.add_argument("--drafts", action="store_true", help="MTP drafts three tokens on every engine; on a GPU")
    parser.add_argument("--quick", action="store_true", help="a small grid, no curve")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw curve and grids")
    args = parser.parse_args(argv)
    for path in filter(None, (args.json, args.picture)):
        if not path.parent.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}")
    say = narrator()
    families = []
    for name in dict.fromkeys(args.family or ["nemotron_h"]):
        family = asyncio.run(measure_family(name, QUICK if args.quick else FULL, say, args.drafts))
        families.append(family)
        print(render(family), flush=True)
    if args.json:
        args.json.write_text(json.dumps(report(families), indent=1) + "\n")
    if args.picture:
        args.picture.write_text(picture.draw(families))
    failures = [complaint for family in families for complaint in complaints(family)]
    print("\n".join(failures) or f"Seamark gives at least {WANTED:.0%} in every mode")
    return 1 if failures else 0


async def measure_family(name: str, plan: CellPlan, say: Callable[[str], None], drafts: bool = False) -> CellFamily:
    """All modes on the generated model of family `name`, one engine after another; `drafts`: each of them drafts."""
    began = time.monotonic()
    model = generated_model(say, name, mtp=drafts)
    own_flags, environment = (DRAFT_FLAGS, DRAFT_ENVIRONMENT) if drafts else ((), {})
    with tempfile.TemporaryDirectory(prefix="seamark-grid-") as folder, Servers(Path(folder)) as servers:
        async with open_client(300) as client:
            say(f"{name}: Seamark, through the gateway and by hand")
            engine = servers.engine("seamark", model, "1", (*CONTEXT_FLAGS, *own_flags), environment)
            engine.wait_until_ready()
            gateway = servers.gateway(engine)
            gateway.wait_until_ready("/ready", seconds=30)
            info, modes = await measure_seamark(client, gateway.url, engine.url, plan)
            gateway.stop()
            engine.stop()
            for baseline, flags in BASELINES.items():
                say(f"{name}: {baseline}")
                engine = servers.engine("baseline", model, "reference", (*CONTEXT_FLAGS, *own_flags, *flags))
                engine.wait_until_ready()
                modes.append(await measure_baseline(client, baseline, engine.url, plan, plan.sweep(info.block_size)))
                engine.stop()
    title = f"{name} with MTP" if drafts else name
    return CellFamily(title, info.block_size, plan, tuple(modes), time.monotonic() - began, info.match_unit, info.ahead)


def render(family: CellFamily) -> str:
    """A table per mode: percent, rounded down, of the shareable tokens that the second request hit."""
    lines = [f"{family.name}, cache block {family.block_size} tokens, {family.seconds:.0f} s"]
    for mode in family.modes:
        lines += ["", f"{mode.name}: {mode.efficiency:.2%} of {sum(cell.oracle for cell in mode.cells)} tokens"]
        if mode.ours and (family.unit, family.ahead) != (UNIT, 0):
            drafts = f" and drafts that need {family.ahead} more" if family.ahead else ""
            lines[-1] += f", {family.allowed(mode):.2%} of what its unit of {family.unit}{drafts} allows"
        lines[-1] += f", worst {_in_words(mode.worst)}, {mode.seconds:.0f} s"
        lines.append("  shared \\ own" + "".join(f"{own:>6}" for own in family.plan.own))
        by_place = {cell.wanted: cell for cell in mode.cells}
        for shared in family.plan.shared:
            percents = (int(100 * by_place[Lengths(shared, own)].efficiency) for own in family.plan.own)
            lines.append(f"  {shared:>12}" + "".join(f"{percent:>6}" for percent in percents))
    return "\n".join(lines)


def _in_words(cell: Cell) -> str:
    """A cell and its hit."""
    return f"{cell.delivered} of {cell.oracle} at {cell.shared} shared, {cell.own} own"


def complaints(family: CellFamily) -> list[str]:
    """What is not as good as it has to be, with the worst cell."""
    return [
        f"{family.name}, {mode.name}: {family.allowed(mode):.2%} is less than {WANTED:.0%};"
        f" worst {_in_words(mode.worst)}"
        for mode in family.short
    ]


def report(families: Sequence[CellFamily]) -> list[dict[str, Any]]:
    """Everything measured, for machines; lengths in tokens."""

    def cells(mode: Mode) -> list[dict[str, Any]]:
        return [{**asdict(cell), "oracle": cell.oracle} for cell in mode.cells]

    def modes(family: CellFamily) -> list[dict[str, Any]]:
        return [
            {**asdict(mode), "efficiency": mode.efficiency, "worst": asdict(mode.worst), "cells": cells(mode)}
            for mode in family.modes
        ]

    return [{**asdict(family), "modes": modes(family)} for family in families]
