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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from engine_patches.commands.model import why_not, write_model
from engine_patches.commands.worker import INSTALL, config_of, cpu_flags, is_cpu_build, model_type_of
from engine_patches.gpu_check import report
from engine_patches.gpu_check.lanes import MTP, NUMBERS_OF_DRAFTS, Lane, Runner, lanes_of
from engine_patches.gpu_check.processes import Engines
from engine_patches.gpu_check.report import UNPROVEN, LaneReport
from engine_patches.gpu_check.verdicts import NOT_RUN, OK, WRONG, Check

MINUTES, OWN_MINUTES = 40.0, 60.0  # a model of real size is loaded three times

SIDE_BY_SIDE = 2  # lanes on a GPU whose speed nobody asks for

# In a model's configuration: the layers of its own head for multi-token prediction, by family.
HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")

REPORT = Path("seamark-gpu-check.json")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EPILOG = """\
Lanes run in the order of their value: first what `seamark worker` runs (compiled, CUDA graphs, vLLM's own choice of
model runner and kernels; Mamba2, then gated delta nets), then the other model runner, eager, float32, other backends,
and last drafts (MTP): vLLM alone with them beside vLLM alone without, then Seamark with SEAMARK_DRAFTS=1 beside it.
Each is printed as soon as it is known. Everything after -- are flags of vLLM for --model.

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
    parser.add_argument("--attention-backend", metavar="NAME", help="for qwen3_next, as in `vllm serve`")
    parser.add_argument(
        "--report", type=Path, default=REPORT, metavar="FILE", help="to attach to a bug report: %(default)s"
    )
    args = parser.parse_args(own)
    if args.minutes is None:
        args.minutes = MINUTES if args.model is None else OWN_MINUTES
    if flags and args.model is None:
        parser.error("flags of vLLM (after --) are for --model")
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
    if args.model is not None and args.attention_backend is not None:
        parser.error("--attention-backend is for the tiny models; with --model it is a flag of vLLM, after --")
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
    began = time.monotonic()
    lanes = lanes_of(device, args.quick, args.attention_backend)
    if args.model is not None:
        lanes = own_lanes(args.model, flags, device, args.quick, args.speculative_config)
    options = {
        "model": None if args.model is None else lanes[0].family,
        "minutes": args.minutes,
        "quick": args.quick,
        "flags": report.without_secrets(flags),
    }
    found: dict[Lane, LaneReport] = {}
    so_far: dict[Lane, list[Check]] = {}

    def write(signal_number: int | None = None) -> tuple[int, str]:
        every = [found.get(lane) or _unfinished(lane, so_far.get(lane, [])) for lane in lanes]
        status = report.exit_status(every, signal_number)
        verdict = report.sentence(every, device, status)
        seconds = time.monotonic() - began
        report.write(args.report, report.content(every, device, seconds, verdict, status, options))
        return status, verdict

    def came(lane: Lane, lane_report: LaneReport) -> None:
        found[lane] = lane_report
        print(report.lane_text(lane_report, len(found), len(lanes)), flush=True)
        write()

    number = None
    with _signals_raise():
        try:
            engines = Engines(folder, device == "cpu", args.minutes * 60, offline=args.model is None)
            side_by_side = 1 if device == "cpu" else SIDE_BY_SIDE
            run(lanes, engines, lambda lane: _model_of(lane, args.model, folder), so_far, came, side_by_side)
        except Interrupted as interrupted:
            number = interrupted.number
            print(f"ended by {signal.Signals(number).name}\n", flush=True)
        for lane in lanes:
            if lane not in found and so_far.get(lane):
                print(report.lane_text(_unfinished(lane, so_far[lane])), flush=True)
        status, verdict = write(number)
    verdicts = [lane_report.verdict for lane_report in found.values()]
    right, wrong = verdicts.count(OK), verdicts.count(WRONG)
    lanes_word = "1 lane" if len(lanes) == 1 else f"{len(lanes)} lanes"
    counts = f"{right} ok, {wrong} WRONG, {len(lanes) - right - wrong} not run"
    print(f"{lanes_word}: {counts} ({time.monotonic() - began:.0f} s); report: {args.report}")
    print(verdict, flush=True)
    return status


def own_lane(model: str, flags: Sequence[str], device: str, quick: bool) -> Lane:
    """The lane of a user's own model, with the flags that `seamark worker` would add."""
    needed = cpu_flags(model_type_of(model)) if device == "cpu" else {}
    added = [part for flag, value in needed.items() for part in ((flag,) if value is None else (flag, value))]
    name = Path(model).resolve().name if Path(model).is_dir() else model
    return Lane(name, timed=True, few=quick, on_cpu=device == "cpu", own_model=True, flags=(*added, *flags))


def own_lanes(model: str, flags: Sequence[str], device: str, quick: bool, speculation: str | None) -> list[Lane]:
    """A user's own model without drafts, and with them if they are asked for or the model has a head that drafts."""
    lane = own_lane(model, flags, device, quick)
    if speculation is None and has_draft_head(model):
        speculation = MTP % NUMBERS_OF_DRAFTS[0]
    return [lane] if speculation is None else [lane, lane._replace(drafts=speculation)]


def has_draft_head(model: str) -> bool:
    """Whether the configuration of a model's folder or name has a head for multi-token prediction."""
    config = config_of(model)
    text = config.get("text_config")
    parts = [config, text if isinstance(text, dict) else {}]
    return any(part.get(name) for part in parts for name in HEADS)


def _model_of(lane: Lane, model: str | None, folder: Path) -> Path | str:
    """The user's model, or a tiny one, which is written when it is first needed."""
    if model is not None:
        return model
    if lane.drafts is not None:
        target = folder / f"{lane.family}-mtp"
        return target if target.is_dir() else write_model(target, lane.family, mtp=True)
    target = folder / lane.family
    return target if target.is_dir() else write_model(target, lane.family)


def run(
    lanes: Sequence[Lane],
    engines: Any,
    model_of: Callable[[Lane], Path | str],
    so_far: dict[Lane, list[Check]],
    came: Callable[[Lane, LaneReport], None],
    side_by_side: int,
) -> None:
    """Run the lanes and hand each one's report on as soon as it is known; `engines` are ended on every way out.

    `so_far` takes the checks of each lane while it runs. Lanes that are timed have the machine to themselves; the rest
    runs `side_by_side`. Lanes with drafts come after all others, so that they take no time from them.
    """
    runner = Runner(engines)

    def report_of(lane: Lane, model: Path | str) -> LaneReport:
        print(f"{lane.name}: running", file=sys.stderr, flush=True)
        began = time.monotonic()
        checks = so_far.setdefault(lane, [])
        try:
            checks.extend(runner.run(lane, model))  # one by one: a signal may come between
        except Exception as error:  # a fault of this check proves nothing about vLLM, and must not hide other lanes
            checks.append(Check(f"the check itself, {lane.name}", NOT_RUN, f"failed: {type(error).__name__}: {error}"))
        job = lane.job(model, True)
        arguments = {**job.arguments, "flags": report.without_secrets(job.flags)}
        return LaneReport(lane.name, checks, time.monotonic() - began, arguments)

    def run_group(group: Sequence[Lane]) -> None:
        for lane in (lane for lane in group if lane.timed):
            came(lane, report_of(lane, model_of(lane)))
        rest = [lane for lane in group if not lane.timed]
        models = [model_of(lane) for lane in rest]
        with ThreadPoolExecutor(side_by_side) as pool:
            try:
                futures = {pool.submit(report_of, *pair): pair[0] for pair in zip(rest, models, strict=True)}
                for future in as_completed(futures):
                    came(futures[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                engines.end()
                raise

    try:
        run_group([lane for lane in lanes if lane.drafts is None])
        run_group([lane for lane in lanes if lane.drafts is not None])
    finally:
        engines.end()


def _unfinished(lane: Lane, checks: Sequence[Check]) -> LaneReport:
    return LaneReport(lane.name, [*checks, Check(lane.name, NOT_RUN, "not run, or not to its end")], 0.0)


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
