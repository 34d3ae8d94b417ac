"""`seamark gpu-check`: whether this machine's vLLM has right states, answers and passes, and whether hits save time.

The command needs no gateway and no network. It is the same on a GPU and on a CPU: a CPU answers for the logic, only a
GPU for its kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine_patches.commands.model import why_not, write_model
from engine_patches.commands.worker import INSTALL, config_of, cpu_flags, is_cpu_build, model_type_of
from engine_patches.gpu_check import drawn_models, report
from engine_patches.gpu_check.judge import NOT_RUN, OK, WRONG, Check
from engine_patches.gpu_check.lanes import MTP, Lane, lanes_of
from engine_patches.gpu_check.processes import Engines
from engine_patches.gpu_check.report import UNPROVEN, LaneReport
from engine_patches.gpu_check.runner import Runner

MINUTES, OWN_MINUTES = 40.0, 60.0  # a model of real size is loaded three times

# In a model's configuration: the layers of its own head for multi-token prediction, by family.
HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

REPORT = Path("seamark-gpu-check.json")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EPILOG = """\
On a GPU nine lanes run one by one, in the order of their value: first what `seamark worker` runs (compiled, CUDA
graphs, vLLM's own choice of model runner and kernels), Mamba2, then gated delta nets, both timed beside vLLM alone;
then the other model runner; eager, with vLLM's own copy of a partial block; layers of Qwen3.8-Flash-Next and of
Kimi-Linear; and last drafts (MTP) on the first two families, on the other model runner, too: vLLM alone with them
beside vLLM alone without, then Seamark with SEAMARK_DRAFTS=1 beside it. Each is printed when it is known.
Everything after -- are flags of vLLM, as --attention-backend FLASHINFER.

exit status: 0 all lanes ran and are right; 1 something is WRONG; 3 a lane did not run (no time, no GPU, no vLLM), so
nothing is proven by it; 2 wrong usage. Ctrl-C, SIGTERM and SIGHUP end the engines, print and write what is known so
far, and exit with 130, 143 and 129, or 1 if something was WRONG already. Speed is told and never WRONG; the engines
are timed one after the other, so it means something only on a machine that does nothing else meanwhile.
"""


class Interrupted(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main(argv: list[str]) -> int:
    own, flags = argv, []
    if "--" in argv:
        split = argv.index("--")
        own, flags = argv[:split], argv[split + 1 :]
    args = _parsed(own, flags)
    try:
        device = "cpu" if is_cpu_build() else "cuda"
    except ModuleNotFoundError as error:
        return _nothing_ran(f"{error.name} is not installed here: {INSTALL}")
    if args.device not in ("auto", device):
        print(f"seamark gpu-check: --device {args.device}: the vLLM here is built for {device}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="seamark-gpu-check-"))
    status = UNPROVEN
    try:
        if device == "cuda" and not _sees_gpu():
            return _nothing_ran(
                "vLLM is built for CUDA, but torch sees no GPU here: look at nvidia-smi, and in a container at --gpus"
            )
        status = _check(args, flags, device, folder)
    except ModuleNotFoundError as error:  # while the models were written
        return _nothing_ran(why_not(error))
    finally:
        if status in (UNPROVEN, report.FAILED) and list(folder.glob("*.log")):
            print(f"the engines' logs, with this machine's names in them: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status


def _parsed(own: list[str], flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="seamark gpu-check",
        description="on this machine's vLLM: are answers exact, hits found, passes no more than needed, and do hits "
        "save time",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", metavar="NAME", help="this model (a folder or a name) instead of the tiny ones")
    parser.add_argument(
        "--minutes", type=float, help=f"for the whole check ({MINUTES:g}, with --model {OWN_MINUTES:g})"
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, and only the first lanes")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: the one vLLM is built for"
    )
    parser.add_argument(
        "--speculative-config", metavar="JSON", help="with --model: a lane with these drafts, too, as in `vllm serve`"
    )
    parser.add_argument(
        "--report", type=Path, default=REPORT, metavar="FILE", help="to attach to a bug report: %(default)s"
    )
    args = parser.parse_args(own)
    if args.minutes is None:
        args.minutes = MINUTES if args.model is None else OWN_MINUTES
    if any(flag.partition("=")[0] == "--speculative-config" for flag in flags):
        parser.error("--speculative-config goes before the --: the model is checked without drafts, then with them")
    if args.speculative_config is not None:
        if args.model is None:
            parser.error("--speculative-config is for --model; the tiny models have lanes with drafts of their own")
        try:
            drafts = json.loads(args.speculative_config)
        except ValueError as error:
            parser.error(f"--speculative-config: no JSON: {error}")
        if not isinstance(drafts, dict):
            parser.error('--speculative-config: a JSON object is needed, as {"method": "mtp", ...}')
    parent = args.report.parent
    if args.report.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        parser.error(f"--report: {args.report} cannot be written: a file in a folder that can be written is needed")
    return args


def _nothing_ran(why: str) -> int:
    print(f"seamark gpu-check: not proven: {why}", file=sys.stderr)
    return UNPROVEN


def _sees_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _check(args: argparse.Namespace, flags: Sequence[str], device: str, folder: Path) -> int:
    """Run the lanes, print and write what they show; the exit status."""
    began, number = time.monotonic(), None
    lanes = lanes_of(device, args.quick, flags)
    if args.model is not None:
        lanes = own_lanes(args.model, flags, device, args.quick, args.speculative_config)
    options = {
        "model": None if args.model is None else lanes[0].family,
        "minutes": args.minutes,
        "quick": args.quick,
        "flags": report.without_secrets(flags),
    }
    ended: dict[Lane, LaneReport] = {}
    so_far: dict[Lane, list[Check]] = {lane: [] for lane in lanes}

    def write() -> tuple[int, str]:
        every = [ended.get(lane) or _unfinished(lane, so_far[lane]) for lane in lanes]
        status = report.exit_status(every, number)
        verdict = report.sentence(every, device, status)
        seconds = time.monotonic() - began
        report.write(args.report, report.content(every, device, seconds, verdict, status, options))
        return status, verdict

    with _signals_raise():
        try:
            runner = Runner(Engines(folder, device == "cpu", args.minutes * 60, offline=args.model is None))
            for lane in lanes:
                model = args.model or _tiny_model(lane, folder)
                print(f"{lane.name}: running", file=sys.stderr, flush=True)
                ended[lane] = run(runner, lane, model, so_far[lane])
                print(report.lane_text(ended[lane], f"lane {len(ended)} of {len(lanes)}"), flush=True)
                write()
        except Interrupted as interrupted:
            number = interrupted.number
            print(f"ended by {signal.Signals(number).name}\n", flush=True)
        for lane in lanes:
            if lane not in ended and so_far[lane]:
                print(report.lane_text(_unfinished(lane, so_far[lane]), "unfinished lane"), flush=True)
        status, verdict = write()
    verdicts = [lane_report.verdict for lane_report in ended.values()]
    right, wrong = verdicts.count(OK), verdicts.count(WRONG)
    lanes_word = "1 lane" if len(lanes) == 1 else f"{len(lanes)} lanes"
    counts = f"{right} ok, {wrong} WRONG, {len(lanes) - right - wrong} not run"
    print(f"{lanes_word}: {counts} ({time.monotonic() - began:.0f} s); report: {args.report}")
    print(verdict, flush=True)
    return status


def run(runner: Runner, lane: Lane, model: Path | str, checks: list[Check]) -> LaneReport:
    """Run one lane; `checks` takes what it shows one by one, so that a signal may come between."""
    began = time.monotonic()
    try:
        checks.extend(runner.run(lane, model))
    except Exception as error:  # a fault of this check proves nothing about vLLM, and must not hide other lanes
        checks.append(Check(f"the check itself, {lane.name}", NOT_RUN, f"failed: {type(error).__name__}: {error}"))
    job = lane.job(model, True)
    arguments = {**job.arguments, "flags": report.without_secrets(job.flags)}
    return LaneReport(lane.name, checks, time.monotonic() - began, arguments)


def _unfinished(lane: Lane, checks: Sequence[Check]) -> LaneReport:
    return LaneReport(lane.name, [*checks, Check(lane.name, NOT_RUN, "not run, or not to its end")], 0.0)


def own_lanes(model: str, flags: Sequence[str], device: str, quick: bool, speculation: str | None) -> list[Lane]:
    """A user's own model without drafts, and with them if they are asked for or the model has a head that drafts.

    With the flags that `seamark worker` would add.
    """
    needed = cpu_flags(model_type_of(model)) if device == "cpu" else {}
    added = [part for flag, value in needed.items() for part in ((flag,) if value is None else (flag, value))]
    name = Path(model).resolve().name if Path(model).is_dir() else model
    lane = Lane(name, timed=True, few=quick, on_cpu=device == "cpu", own_model=True, flags=(*added, *flags))
    config = config_of(model)
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    if speculation is None and any(part.get(head) for part in parts for head in HEADS):
        speculation = MTP
    return [lane] if speculation is None else [lane, lane._replace(drafts=speculation)]


def _tiny_model(lane: Lane, folder: Path) -> Path:
    """A model of the lane's family, which is written when it is first needed."""
    target = folder / (lane.family if lane.drafts is None else f"{lane.family}-mtp")
    if target.is_dir():
        return target
    if lane.family in drawn_models.CONFIGS:
        return drawn_models.write_config(target, lane.family)
    return write_model(target, lane.family, mtp=lane.drafts is not None)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Inside this context the first signal raises `Interrupted`; later ones do not disturb the end."""

    def stop(number: int, frame: Any) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    before = {each: signal.signal(each, stop) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
