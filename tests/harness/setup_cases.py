"""How somebody runs vLLM, as folders, and what `seamark setup` makes of each: said, written, run and undone.

`tests/data/setup/CASE` holds the user's files as they are; `call`, the words that are typed (without it: the one file
that is there); `docker.json`, what Docker says of a container; and `expected`, all that comes of it. What is run calls
programs that note their words and what is exported, and do nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from proxy.commands import doctor, setup, unit_files
from proxy.commands.recipe_unit import DROP_IN

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "data" / "setup"
OURS = ("call", "docker.json", "expected")

# The same for every recipe (tests/unit/commands/golden/recipe_files.txt has them).
ALIKE = ("gateway.sh", "gateway.log", "run.sh", "undo.sh", "seamark.sha256")

PROGRAMS = "docker podman vllm systemctl uv uvx conda python python3 pip tmux curl sleep nvidia-smi launch-cluster.sh"
NOTES = """#!/bin/sh
name=${0##*/}
case "$name $*" in
    "python3 -m pip wheel"*) : > "$7/vllm_seamark-1-py3-none-any.whl"; exit ;;
    "docker inspect"*) cat "$HOME/docker.json" 2> /dev/null; exit ;;
    "docker ps -aq"*seamark* | "podman ps -aq"*seamark*) echo c0ffee ;;
    "curl "* | "sleep "* | "nvidia-smi"*) exit ;;
esac
for variable in $(env |
    sed -n 's/^\\([A-Z][A-Z0-9_]*\\)=.*/\\1/p' |
    grep -vxE 'HOME|PATH|.*PWD|SHLVL|NOTES|COLUMNS|LINES|SEAMARK_UNITS' | sort)
do eval "printf '%s=%s\\t' $variable \\"\\$$variable\\"" >> "$NOTES"; done
{ printf '%s' "$name"; [ $# = 0 ] || printf '\\t%s' "$@"; printf '\\036'; } >> "$NOTES"
"""
SUDO = '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nAS_ROOT=yes exec "$@"\n'


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


class Home:
    """Of a user with a case's files, and with programs that note what they are told."""

    def __init__(self, folder: Path, case: Path) -> None:
        self.folder, self.out, self.bin, self.call = folder, folder / "out", folder.parent / "bin", call_of(case)
        self._notes = folder.parent / "notes"
        shutil.copytree(case, folder, ignore=lambda where, _: ("call", "expected") if Path(where) == case else ())
        for each in ("spark-vllm-docker/mods", "spark-vllm-docker/recipes", "units"):
            (folder / each).mkdir(parents=True, exist_ok=True)
        self.bin.mkdir(exist_ok=True)
        for name in PROGRAMS.split():
            self._program(self.bin / name, NOTES)
        self._program(self.bin / "sudo", SUDO)
        for name in ("run-recipe.sh", "launch-cluster.sh"):
            self._program(folder / "spark-vllm-docker" / name, NOTES)
        own = {"HOME": str(folder), "PATH": f"{self.bin}:/usr/bin:/bin", "SEAMARK_UNITS": str(folder / "units")}
        self.environment = {**own, **self.call.environment}

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This process is in it, with its variables and no others."""
        before, folder = dict(os.environ), Path.cwd()
        os.environ.clear()
        os.environ.update({**self.environment, "NOTES": str(self._notes)})
        os.chdir(self.folder)
        try:
            yield
        finally:
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(before)

    def run(self, *command: str) -> str:
        """What the programs are told meanwhile, a line each."""
        self._notes.unlink(missing_ok=True)
        ended, open_while_it_runs = os.pipe()  # by what it leaves in the background, too
        with self.entered(), open(ended, "rb") as reading:
            null = subprocess.DEVNULL
            subprocess.run(command, check=False, stdin=null, stdout=null, stderr=null, pass_fds=[open_while_it_runs])
            os.close(open_while_it_runs)
            reading.read()
        told = self._notes.read_text().split("\036")[:-1] if self._notes.exists() else []
        return "".join(shlex.join(each.split("\t")) + "\n" for each in told)

    def tree(self) -> list[str]:
        """Its files and folders, each with a digest."""
        files = ((path.relative_to(self.folder), path) for path in self.folder.rglob("*"))
        return [f"{name} {hash(path.read_bytes()) if path.is_file() else ''}".strip() for name, path in files]


def outcome(case: Path, folder: Path) -> str:
    """What is said, written and run for a case."""
    home = Home(folder / "home", case)
    given = home.call.words[0]
    with home.entered(), mock.patch.object(unit_files, "gateway_user", lambda unit: unit.user):
        _, verdict = _said(doctor.main, ["--recipe", given])
        status, said = _said(setup.main, [*home.call.words, "--out", str(home.out)])
    parts = [f"exit status {status}\n{_without_what_is_always_said(said)}"]
    if home.out.is_dir():
        first = verdict.splitlines()[0]
        is_unit = (home.out / DROP_IN).exists()
        alike = {*ALIKE} - ({"run.sh", "undo.sh"} if is_unit else set())
        parts[0] += "" if first.lower() in said.lower() else f"doctor: {first}\n"
        parts += [
            f"=== {path.name}\n{_settings(path)}" for path in sorted(home.out.iterdir()) if path.name not in alike
        ]
        alone = Home(folder / "alone" / "home", case)
        script = alone.folder / given
        way = ["bash", str(script)] if script.is_file() else ["bash", "-c", given]
        if script.suffix == ".sh" or " " in given:
            parts.append(f"--- ran by its owner\n{alone.run(*way)}")
        for name in ("run.sh" if is_unit else "start.sh", "worker.sh", "undo.sh"):
            if (script := home.out / name).exists():
                parts.append(f"--- ran by {name}\n{home.run(str(script))}")
        parts += [f"--- {each} differs afterwards\n" for each in sorted({*home.tree()} ^ {*alone.tree()})]
    return normalised("".join(parts), home)


def _said(command: Callable[[list[str]], int], argv: list[str]) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = command(argv)
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


def normalised(text: str, home: Home) -> str:
    """Without what differs between machines and folders."""
    text = re.sub(r"(seamark-worker-[a-z0-9.-]*-)[0-9a-f]{8}\b", r"\1<FOLDER'S>", text)
    alone = home.folder.parent / "alone" / "home"
    places = {"OUT": home.out, "HOME": home.folder, "PYTHON": sys.executable, "SEAMARK": ROOT}
    for word, place in {"ALONE": alone, **places}.items():
        text = text.replace(str(place), f"<{word.replace('ALONE', 'HOME')}>")
    return text
