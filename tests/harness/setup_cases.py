"""How somebody runs vLLM, as folders, and what `seamark setup` makes of each.

`tests/data/setup/CASE` holds the user's files as they are; `call`, the words that are typed (without it: the one file
that is there); `docker.json`, what Docker says of a container or an image; and `expected`, all that comes of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from proxy.commands import doctor, setup

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "data" / "setup"
OURS = ("call", "docker.json", "expected")

# The same for every recipe (tests/unit/commands/golden/recipe_files.txt has them).
ALIKE = ("gateway.sh", "gateway.log", "run.sh", "undo.sh", "seamark.sha256")


class Call(NamedTuple):
    environment: Mapping[str, str]
    words: list[str]  # behind `seamark setup`


def call_of(case: Path) -> Call:
    """As it is typed: `NAME=VALUE ... seamark setup RECIPE FLAGS`."""
    if not (case / "call").exists():
        return Call({}, [each.name for each in case.iterdir() if each.name not in OURS])
    words = shlex.split((case / "call").read_text())
    behind = words.index("setup") + 1
    return Call(dict(word.split("=", 1) for word in words[: behind - 2]), words[behind:])


@contextlib.contextmanager
def at_home(home: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """In a folder, as its user, with these variables and no others."""
    before, folder = dict(os.environ), Path.cwd()
    os.environ.clear()
    os.environ.update({"HOME": str(home), "PATH": before["PATH"], **environment})
    os.chdir(home)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def outcome(case: Path, home: Path) -> str:
    """What is said and written for a case, in a folder made for it."""
    shutil.copytree(case, home, ignore=lambda folder, names: [name for name in OURS if Path(folder) == case])
    for each in ("mods", "recipes"):
        (home / "spark-vllm-docker" / each).mkdir(parents=True, exist_ok=True)
    call, out = call_of(case), home / "out"
    with at_home(home, call.environment):
        _, verdict = _said(doctor.main, ["--recipe", call.words[0]])
        status, said = _said(setup.main, [*call.words, "--out", str(out)])
    parts = [f"exit status {status}\n{_without_what_is_always_said(said)}"]
    if out.is_dir():
        first = verdict.splitlines()[0]
        parts[0] += "" if first.lower() in said.lower() else f"doctor: {first}\n"
        parts += [f"=== {path.name}\n{_settings(path)}" for path in sorted(out.iterdir()) if path.name not in ALIKE]
    return normalised("".join(parts), home)


def _said(command: object, argv: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = command(argv)  # type: ignore[operator]
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, output.getvalue()


def _without_what_is_always_said(text: str) -> str:
    """Up to the commands to go on by, and where clients find it."""
    said, _, commands = text.partition("\nMore is said")
    return f"{said.rstrip()}\n" + "".join(re.findall(r"^Clients: .*\n", commands, re.M))


def _settings(path: Path) -> str:
    lines = path.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if path.suffix != ".toml" or not line.startswith("#"))


def normalised(text: str, home: Path) -> str:
    """Without what differs between machines and folders."""
    text = re.sub(r"(seamark-worker-[a-z0-9.-]*-)[0-9a-f]{8}\b", r"\1<FOLDER'S>", text)
    for word, place in {"OUT": home / "out", "HOME": home, "PYTHON": sys.executable, "SEAMARK": ROOT}.items():
        text = text.replace(str(place), f"<{word}>")
    return text
