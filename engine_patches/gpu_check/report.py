"""The report of `seamark gpu-check`: on the screen lane by lane, and one file that can go into a bug report.

The file names no host, no user and no folder, and holds no prompt. It is written again after each check,
so that it says what is known even if the command is killed.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import platform
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_patches.gpu_check.judge import LEFT_OUT, NOT_RUN, OK, WRONG, Check

RIGHT, FAILED, UNPROVEN = 0, 1, 3  # exit statuses
SECRET = re.compile(r"token|key|secret|password", re.IGNORECASE)  # in the name of a flag
URL = re.compile(r"\b\w+://[^\s'\",;]+")
HOME = re.compile(r"/(?:home|Users)/[^\s/'\",:;()]+")
FOLDER = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",:;()\[\]]+[/\\])+")
ADDRESS = re.compile(r"\b(?:\d{1,3}\.){3}\d{1,3}\b(?=:\d|/)|\b[\w.-]+@[\w.-]+\b")

UNFINISHED = Check("the lane", NOT_RUN, "not run, or not to its end")


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


def check_text(check: Check) -> str:
    says = textwrap.indent(textwrap.fill(check.says, 110), " " * 11)
    return f"  {check.verdict:<9}{check.name}\n{says}"


def exit_status(lanes: Sequence[LaneReport], signal: int | None) -> int:
    """1 if anything is wrong, 128 + the signal that ended the check, 3 if a lane did not run, 0 if all are right."""
    verdicts = {lane.verdict for lane in lanes} - {LEFT_OUT}
    if WRONG in verdicts:
        return FAILED
    if signal is not None:
        return 128 + signal
    return RIGHT if verdicts == {OK} else UNPROVEN


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


def content(
    lanes: Sequence[LaneReport], device: str, seconds: float, verdict: str, status: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The report for the file, without what could name a person or a machine."""
    counts = {word: sum(lane.verdict == word for lane in lanes) for word in (OK, WRONG, NOT_RUN)}
    left_out = [f"{c.name}: {c.says}" for lane in lanes for c in lane.checks if c.verdict == LEFT_OUT]
    results = [{**vars(lane), "verdict": lane.verdict, "checks": [c._asdict() for c in lane.checks]} for lane in lanes]
    told = {"verdict": verdict, "exit": status, "device": device, "seconds": round(seconds, 1), "options": options}
    told |= {"lanes": {**counts, "left out": left_out}, "results": results}
    return dict(anonymous(told))


def write(file: Path, report: Mapping[str, Any]) -> None:
    unfinished = file.with_name(file.name + ".new")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(file)


def anonymous(value: Any) -> Any:
    """JSON without folders (of a path its last part stays), addresses, this host's name and this user's."""
    if isinstance(value, Mapping):
        return {anonymous(key): anonymous(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [anonymous(each) for each in value]
    if not isinstance(value, str):
        return value
    text = ADDRESS.sub("ADDRESS", FOLDER.sub("", HOME.sub("~", URL.sub("URL", value))))
    for word, stands_for in ((platform.node(), "HOST"), (_user(), "USER")):
        if len(word) > 1 and word not in ("root", "localhost"):
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", stands_for, text)
    return text


def _user() -> str:
    with contextlib.suppress(KeyError, OSError):  # no entry for this id, as in many containers
        return getpass.getuser()
    return ""


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
