"""`seamark gpu-check`: whether this machine's vLLM has right states, answers and passes, and whether hits save time.

The command needs no gateway and no network. It is the same on a GPU and on a CPU: a CPU answers for the logic, only a
GPU for its kernels. Its report names no host, no user and no folder, and holds no prompt; it is written again after
each check, so that it says what is known even if the command is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_patches.commands.model import why_not
from engine_patches.commands.worker import config_of, cpu_flags, is_cpu_build
from engine_patches.gpu_check.judge import LEFT_OUT, NOT_RUN, OK, WRONG, Check
from engine_patches.gpu_check.lanes import MTP, Lane, lanes_of, write_config
from engine_patches.gpu_check.runner import Engines, Runner

MINUTES, OWN_MINUTES = 40.0, 60.0  # a model of real size takes long to load
HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # in a configuration: layers that draft tokens, by family
REPORT, SIGNALS = Path("seamark-gpu-check.json"), (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RIGHT, FAILED, UNPROVEN = 0, 1, 3  # exit statuses

SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)  # in the name of a flag
URL = re.compile(r"\b\w+://[^\s'\",;]+")
HOME = re.compile(r"/(?:home|Users)/[^\s/'\",:;()]+")
FOLDER = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",:;()\[\]]+[/\\])+")
ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?=:\d|/)|\b[\w.-]+@[\w.-]+\b")

EPILOG = """\
A lane starts two engines: vLLM alone, whose answers without its cache are the reference, and which is asked twice, so
that it is known how much it differs from itself; then the same with the patches. On a GPU seven lanes run one by one,
the most valuable first. Each check is printed and written when it is known; what there is no time for is named.
Everything after -- are flags of vLLM, as --attention-backend FLASHINFER.

exit status: 0 all lanes ran and are right; 1 something is WRONG; 3 a lane did not run (no time, no GPU, no vLLM) or
proves nothing (vLLM alone is no steadier); 2 wrong usage. Ctrl-C, SIGTERM and SIGHUP end it with 130, 143 and 129, or 1
if something was WRONG already; what is known is printed and written. Speed is told, and never WRONG: engines are timed
one after the other, so it means something only on a machine that does nothing else meanwhile.
"""


UNFINISHED = Check("the lane", NOT_RUN, "not run, or not to its end")


class Interrupted(BaseException):
    """A signal asks for the end; its number is the argument."""


@dataclass
class LaneReport:
    """What one lane showed; until its end it has a check that says so."""

    lane: str
    checks: list[Check] = field(default_factory=lambda: [UNFINISHED])
    seconds: float = 0.0
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of vLLM

    @property
    def verdict(self) -> str:
        """The worst of its checks; a lane without any did not run."""
        verdicts = [check.verdict for check in self.checks]
        return next((each for each in (WRONG, NOT_RUN, OK, LEFT_OUT) if each in verdicts), NOT_RUN)


def main(argv: list[str]) -> int:
    split = argv.index("--") if "--" in argv else len(argv)
    flags = argv[split + 1 :]
    args = _parsed(argv[:split], flags)
    folder = Path(tempfile.mkdtemp(prefix="seamark-gpu-check-"))
    status = UNPROVEN
    try:
        device = "cpu" if is_cpu_build() else "cuda"
        why = "vLLM is built for CUDA, but torch sees no GPU here: look at nvidia-smi, and in a container at --gpus"
        if device == "cpu" or _sees_gpu():
            why, status = "", _check(args, flags, device, folder)
    except ModuleNotFoundError as error:
        why = why_not(error)
    finally:
        if status in (UNPROVEN, FAILED) and list(folder.glob("*.log")):
            print(f"the engines' logs, with this machine's names in them: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if why:
        print(f"seamark gpu-check: not proven: {why}", file=sys.stderr)
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
    add = parser.add_argument
    add("--model", metavar="NAME", help="this model (a folder or a name) instead of the tiny ones")
    add("--minutes", type=float, help=f"for the whole check ({MINUTES:g}, with --model {OWN_MINUTES:g})")
    add("--speculative-config", metavar="JSON", help="with --model: a lane with these drafts, too, as in `vllm serve`")
    add("--report", type=Path, default=REPORT, metavar="FILE", help="to attach to a bug report: %(default)s")
    args = parser.parse_args(own)
    args.minutes = args.minutes if args.minutes is not None else MINUTES if args.model is None else OWN_MINUTES
    if any(flag.partition("=")[0] == "--speculative-config" for flag in flags):
        parser.error("--speculative-config goes before the --: the model is checked without drafts, then with them")
    try:
        drafts = json.loads(args.speculative_config or "{}")
    except ValueError as error:
        parser.error(f"--speculative-config: no JSON: {error}")
    if not isinstance(drafts, dict) or (drafts and args.model is None):
        parser.error('--speculative-config: for --model, a JSON object as {"method": "mtp", ...}')
    parent = args.report.parent
    if args.report.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        parser.error(f"--report: {args.report} cannot be written: a file in a folder that can be written is needed")
    return args


def _sees_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _check(args: argparse.Namespace, flags: Sequence[str], device: str, folder: Path) -> int:
    """Run the lanes, print and write what they show; the exit status."""
    began, number = time.monotonic(), None
    lanes = lanes_of(device, flags)
    if args.model is not None:
        lanes = own_lanes(args.model, flags, device, args.speculative_config)
    options = {"model": args.model and lanes[0].family, "minutes": args.minutes, "flags": without_secrets(flags)}
    reports = [LaneReport(lane.name) for lane in lanes]

    def write() -> tuple[int, str]:
        """The exit status and the last line, of what is known so far."""
        verdicts = [lane.verdict for lane in reports]
        status = FAILED if WRONG in verdicts else RIGHT if {*verdicts} - {LEFT_OUT} == {OK} else UNPROVEN
        if status != FAILED and number is not None:
            status = 128 + number
        verdict, seconds = sentence(reports, device, status), round(time.monotonic() - began, 1)
        told = {"verdict": verdict, "exit": status, "device": device, "seconds": seconds, "options": options}
        left_out = [f"{c.name}: {c.says}" for lane in reports for c in lane.checks if c.verdict == LEFT_OUT]
        told["lanes"] = {**{word: verdicts.count(word) for word in (OK, WRONG, NOT_RUN)}, "left out": left_out}
        told["results"] = [
            {**vars(lane), "verdict": lane.verdict, "checks": [c._asdict() for c in lane.checks]} for lane in reports
        ]
        unfinished = args.report.with_name(args.report.name + ".new")
        unfinished.write_text(json.dumps(anonymous(told), indent=1) + "\n")
        unfinished.replace(args.report)
        return status, verdict

    with _signals_raise():
        try:
            started = sum(not lane.wants_gpu for lane in lanes)
            seconds, offline = args.minutes * 60, args.model is None
            runner = Runner(Engines(folder, device == "cpu", seconds, offline=offline, lanes=started))
            for place, (lane, told) in enumerate(zip(lanes, reports, strict=True), 1):
                title, lane_began = f"lane {place} of {len(lanes)}: {lane.name}", time.monotonic()
                print(title, flush=True)
                model = args.model or write_config(folder / lane.family, lane.family)
                told.arguments = {**lane.arguments(model), "flags": without_secrets(lane.flags)}
                with contextlib.closing(runner.run(lane, model)) as checks:
                    for check in checks:
                        told.checks.insert(-1, check)
                        says = textwrap.indent(textwrap.fill(check.says, 110), " " * 11)
                        print(f"  {check.verdict:<9}{check.name}\n{says}", flush=True)
                        write()
                told.checks.remove(UNFINISHED)
                told.seconds = time.monotonic() - lane_began
                print(f"{title}: {told.verdict} ({told.seconds:.0f} s)\n", flush=True)
        except Interrupted as interrupted:
            (number,) = interrupted.args
            print(f"ended by {signal.Signals(number).name}\n", flush=True)
        status, verdict = write()
    verdicts = [each.verdict for each in reports]
    counts = ", ".join(f"{verdicts.count(each)} {each}" for each in (OK, WRONG, NOT_RUN, LEFT_OUT))
    print(f"lanes: {counts} ({time.monotonic() - began:.0f} s); report: {args.report}\n{verdict}", flush=True)
    return status


def own_lanes(model: str, flags: Sequence[str], device: str, speculation: str | None) -> list[Lane]:
    """A user's own model with the flags of `seamark worker`: without drafts, then with given ones or its head's."""
    config = config_of(model)
    needed = cpu_flags(str(config.get("model_type", ""))) if device == "cpu" else {}
    added = [part for flag, value in needed.items() for part in ((flag,) if value is None else (flag, value))]
    name = Path(model).resolve().name if Path(model).is_dir() else model
    lane = Lane(name, timed=True, on_cpu=device == "cpu", own_model=True, flags=(*added, *flags))
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    if speculation is None and any(part.get(head) for part in parts for head in HEADS):
        speculation = MTP
    return [lane] if speculation is None else [lane, lane._replace(drafts=speculation)]


def sentence(lanes: Sequence[LaneReport], device: str, status: int) -> str:
    wrong = [lane.lane for lane in lanes if lane.verdict == WRONG]
    if wrong:
        return f"WRONG: {'; '.join(wrong)}; do not use Seamark here, and please report it with the file above."
    speed = "speed was not compared"
    for numbers in (check.numbers or {} for lane in lanes for check in lane.checks if speed.startswith("speed")):
        if "hits_save_time" in numbers:
            warm = f"a first token behind {numbers['warm_shared']:,} shared tokens comes {numbers['warm_ratio']:.2f}x"
            verb = "save" if numbers["hits_save_time"] else "do not save"
            speed = f"hits {verb} time here ({warm} as fast as with vLLM alone)"
    right = sum(lane.verdict == OK for lane in lanes)
    if status == RIGHT:
        where = "on this CPU, which says nothing about a GPU's kernels" if device == "cpu" else "on this GPU"
        lanes_word = "the lane" if right == 1 else f"all {right} lanes"
        return f"right: {lanes_word} ran and found exact answers {where}; {speed}."
    causes = {lane.lane: [c.says for c in lane.checks if c.verdict == NOT_RUN] for lane in lanes}
    unproven = [f"{lane.lane} ({(*causes[lane.lane], 'did not run')[0]})" for lane in lanes if lane.verdict == NOT_RUN]
    so_far = f"{right} of {len(lanes)} lanes are right" if right else "no lane ran to its end"
    return f"not proven: {'; '.join(unproven) or 'no lane was started'}; {so_far}; {speed}."


def anonymous(value: Any) -> Any:
    """JSON without folders (of a path its last part stays), addresses, this host's name and this user's."""
    if isinstance(value, Mapping):
        return {anonymous(key): anonymous(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [anonymous(each) for each in value]
    if not isinstance(value, str):
        return value
    text = ADDRESS.sub("ADDRESS", FOLDER.sub("", HOME.sub("~", URL.sub("URL", value))))
    user = ""
    with contextlib.suppress(KeyError, OSError):  # no entry for this id, as in many containers
        user = getpass.getuser()
    for word, stands_for in ((platform.node(), "HOST"), (user, "USER")):
        if len(word) > 1 and word not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", stands_for, text)
    return text


def without_secrets(flags: Sequence[str]) -> list[str]:
    """vLLM's flags as the report shows them: what a flag for tokens, keys or passwords is given becomes `...`."""
    shown, hide = [], False
    for flag in flags:
        name, equals, _ = flag.partition("=")
        if flag.startswith("--"):
            hide = SECRET.search(name) is not None
            shown.append(f"{name}=..." if hide and equals else flag)
        else:
            shown.append("..." if hide else flag)
    return shown


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Inside this context the first signal raises `Interrupted`; later ones do not disturb the end."""

    def stop(number: int, frame: Any) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    with contextlib.ExitStack() as stack:
        for each in SIGNALS:
            stack.callback(signal.signal, each, signal.signal(each, stop))
        yield
