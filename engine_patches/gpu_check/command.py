"""`seamark gpu-check`: tiny hybrid models show whether this machine's vLLM has right states, answers and passes.

The command needs no gateway and no network. It is the same on a GPU and on a CPU: a CPU answers for the logic, only a
GPU for its kernels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine_patches.commands.model import why_not, write_model
from engine_patches.commands.worker import INSTALL, is_cpu_build
from engine_patches.gpu_check.lanes import Engines, Lane, lanes_of, run_lane
from engine_patches.gpu_check.verdicts import EXACTNESS, NOT_RUN, OK, WRONG, Check

SECONDS = 280.0  # for the whole check

SIDE_BY_SIDE = 2  # lanes

INDENT = 9  # columns before the text under a verdict


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="seamark gpu-check",
        description="tiny hybrid models on this machine's vLLM: are answers exact, hits found, passes no more than one",
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: the one vLLM is built for"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, no second model runner")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the whole check (%(default)g)")
    parser.add_argument("--attention-backend", metavar="NAME", help="for qwen3_next, as in `vllm serve`")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file too")
    args = parser.parse_args(argv)
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        parser.error(f"--json: {args.json} cannot be written: a file in an existing folder is needed")
    began = time.monotonic()
    try:
        device = "cpu" if is_cpu_build() else "cuda"
    except ModuleNotFoundError as error:
        print(f"seamark gpu-check: {error.name} is not installed here: {INSTALL}", file=sys.stderr)
        return 1
    if args.device not in ("auto", device):
        parser.error(f"--device {args.device}: the vLLM installed here is built for {device}")
    # `kill` ends the engines too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="seamark-gpu-check-"))
    try:
        engines = Engines(folder, device == "cpu", args.seconds)
        checks = run(lanes_of(device, args.quick, args.attention_backend), engines, folder)
    except ModuleNotFoundError as error:  # while the models were written
        shutil.rmtree(folder)
        print(f"seamark gpu-check: {why_not(error)}", file=sys.stderr)
        return 1
    except BaseException:
        shutil.rmtree(folder)
        raise
    if device == "cpu":
        checks.append(
            Check("model runner V2", NOT_RUN, "model runner V2 needs Triton, which a vLLM for CPUs does not have")
        )
    seconds = time.monotonic() - began
    wrong = sum(check.verdict == WRONG for check in checks)
    unproved = not any(check.verdict == OK and check.name.startswith(EXACTNESS) for check in checks)
    print(report(checks, seconds))
    if args.json is not None:
        content = {"seconds": seconds, "wrong": wrong, "device": device}
        args.json.write_text(json.dumps({**content, "checks": [check._asdict() for check in checks]}, indent=1) + "\n")
    if wrong or unproved:
        print(f"the engines' logs: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def run(lanes: tuple[Sequence[Lane], Sequence[Lane]], engines: Engines, folder: Path) -> list[Check]:
    """The checks of all lanes: the first sequence runs side by side, then the second one by one."""
    together, alone = lanes
    models = {lane.family: write_model(folder / lane.family, lane.family) for lane in (*together, *alone)}

    def checks_of(lane: Lane) -> list[Check]:
        print(f"{lane.name}: running", file=sys.stderr, flush=True)
        return run_lane(lane, engines, models[lane.family])

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            checks = [check for found in pool.map(checks_of, together) for check in found]
        except BaseException:
            engines.end()
            raise
    return checks + [check for lane in alone for check in checks_of(lane)]


def report(checks: Sequence[Check], seconds: float) -> str:
    """The report as text: a paragraph for each check, and a line that sums up."""
    lines = []
    for check in checks:
        lines.append(f"{check.verdict:<{INDENT}}{check.name}")
        lines += textwrap.wrap(check.says, 110, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)
    wrong = sum(check.verdict == WRONG for check in checks)
    not_run = sum(check.verdict == NOT_RUN for check in checks)
    return "\n".join([*lines, "", f"{len(checks)} checks: {wrong} WRONG, {not_run} not run ({seconds:.0f} s)"])
