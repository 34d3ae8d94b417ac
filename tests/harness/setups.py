"""How people run vLLM, and what `seamark setup` makes of it, both run: `python -m tests.harness.setups FOLDER...`.

A folder holds the user's files as they are, and `case.toml` how they are run, if that needs words: `input`, or a `line`;
`arguments`, `environment`, `programs` and `files` (by their paths) that have to be there. Everything runs in a layer
above this machine's files (as root, on Linux) with stand-ins for Docker, vLLM, systemctl and others, which note what they
are told (tests/harness/stand_ins.py). Compared are what vLLM is told, and all files that the user's way leaves behind
with those that are left after `run.sh` and `undo.sh`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.stand_ins import NOTES, PROGRAMS

ROOT = Path(__file__).parents[2]
HOME, OUT, SPARK, UNITS = "/home/me", "/home/me/seamark-setup", "/home/me/spark-vllm-docker", "/etc/systemd/system"

# A machine of its own: what is written goes into the upper folder, nothing is reached, and nobody else's process is seen.
_ENTER = """
mount -t overlay -o lowerdir=/,upperdir="$1",workdir="$2" none "$3" && mount --rbind /dev "$3/dev" &&
mount -t proc proc "$3/proc" && cd "$3" && shift 3 && exec chroot . "$@"
"""
_SETUP = "import sys; sys.executable = '/usr/bin/python3'; from proxy.cli import main; sys.exit(main())"

# What vLLM is given beside the user's words, or no longer: with a value, or without.
_VALUED, _SWITCHES = ("--middleware", "--mamba-cache-mode", "--host"), ("--enable-prefix-caching", "--enable-scale-out")
_LEFT_OUT = (*_SWITCHES, "--no-enable-prefix-caching", "--enable-prompt-tokens-details")


@dataclass
class Result:
    name: str
    status: int  # of `seamark setup`
    said: list[str]
    doctor: int = 0
    words: str = "-"
    trees: str = "-"
    notes: Mapping[str, Any] = field(default_factory=dict)

    def row(self) -> str:
        verdict = (self.said[1:2] if self.status < 2 else self.said[:1]) or [""]
        kind = self.said[0].partition(" for ")[0] if self.status < 2 else "refused"
        return " | ".join([self.name, kind, verdict[0][:110], f"{self.status}/{self.doctor}", self.words, self.trees])


class Machine:
    """A fresh one, with the case's files and the stand-ins."""

    def __init__(self, scratch: Path, case: Path, told: Mapping[str, Any]) -> None:
        self.upper, self.work, self.root = (scratch / each for each in ("upper", "work", "root"))
        for each in (self.upper, self.work, self.root):
            each.mkdir(parents=True)
        for program in PROGRAMS:
            self.program(f"/usr/bin/{program}")
            self.program(f"/usr/local/bin/{program}")
        for each in ("mods", "recipes"):
            (self.upper / SPARK[1:] / each).mkdir(parents=True)
        for each in ("run-recipe.sh", "launch-cluster.sh", "build-and-copy.sh"):
            self.program(f"{SPARK}/{each}")
        shutil.copytree(case, self.upper / HOME[1:] / "work", ignore=shutil.ignore_patterns("case.toml"))
        for each in told.get("programs", ()):
            self.program(self.place(each))
        for each, text in told.get("files", {}).items():
            self.file(self.place(each), text)
        for each, name in told.get("installed", {}).items():
            self.file(self.place(each), (case / name).read_text(), 0o755)
        self.environment = {"HOME": HOME, "USER": "me", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
        self.environment |= told.get("environment", {})

    def place(self, path: str) -> str:
        return os.path.normpath(os.path.join(HOME, "work", path.replace("~", HOME)))

    def file(self, path: str, text: str, mode: int = 0o644) -> None:
        target = self.upper / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(mode)

    def program(self, path: str) -> None:
        stand_in = ROOT / "tests" / "harness" / "stand_ins.py"
        self.file(path, f'#!/bin/sh\nexec {sys.executable} -I {stand_in} {Path(path).name} "$@"\n', 0o755)

    def run(self, *command: str, folder: str = f"{HOME}/work") -> tuple[int, str]:
        places = [str(each) for each in (self.upper, self.work, self.root)]
        enter = ["unshare", "--mount", "--pid", "--fork", "--net", "--kill-child", "sh", "-c", _ENTER, "sh", *places]
        inside = ["env", "-i", f"--chdir={folder}", *(f"{k}={v}" for k, v in self.environment.items()), *command]
        try:
            done = subprocess.run(
                [*enter, *inside], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired as error:
            return 124, f"{error.stdout}{error.stderr}"
        return done.returncode, done.stdout + done.stderr

    def notes(self) -> list[dict[str, Any]]:
        """What the stand-ins were told since the last call."""
        path = self.upper / NOTES[1:]
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return found

    def tree(self) -> dict[str, tuple[int, bytes]]:
        """Files by their paths: modes and contents. A folder counts where this machine has none."""
        found = {}
        for path in self.upper.rglob("*"):
            info, name = path.lstat(), f"/{path.relative_to(self.upper)}"
            if not name.startswith(("/var/stand-ins", "/tmp/")) and not (path.is_dir() and os.path.isdir(name)):
                found[name] = info.st_mode, path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        return found


def run_case(case: Path, scratch: Path, keep: Path | None = None) -> Result:
    told = tomllib.loads((case / "case.toml").read_text()) if (case / "case.toml").exists() else {}
    theirs, ours = (Machine(scratch / each, case, told) for each in ("theirs", "ours"))
    given, way = _way(case, told, (theirs, ours))
    arguments = told.get("arguments", ())
    alone = theirs.run(*way, *arguments) if way else (0, "")
    seamark = [sys.executable, "-B", "-c", _SETUP]
    ours.environment |= {"PYTHONPATH": str(ROOT)}
    doctor = ours.run(*seamark, "doctor", "--recipe", given)
    status, said = ours.run(*seamark, "setup", given, "--out", OUT)
    del ours.environment["PYTHONPATH"]
    written = ours.upper / OUT[1:]
    result = Result(case.name, status, said.splitlines() or ["nothing"], doctor[0])
    if keep:
        (keep / case.name).mkdir(parents=True, exist_ok=True)
        (keep / case.name / "said.txt").write_text(f"{doctor[0]}: {doctor[1]}\n{status}: {said}\nALONE {alone}\n")
        if written.exists():
            shutil.copytree(written, keep / case.name / "written", dirs_exist_ok=True)
    before = theirs.notes()
    ours.notes()
    if (written / "run.sh").exists() and way:
        started = ours.run("sh", f"{OUT}/run.sh", *arguments)
        after = ours.notes()
        undone = ours.run("sh", f"{OUT}/undo.sh", folder=HOME)
        result.words = "equal" if not (found := "; ".join(_differences(before, after))) else found
        left = {name for name, told in ours.tree().items() ^ theirs.tree().items()}
        kept = [each.name for each in (ours.upper / "var/stand-ins").rglob("*seamark*")]
        result.trees = (
            "equal" if not (left or kept) and undone[0] == 0 else f"{undone[0]}: {sorted([*left, *kept])[:6]}"
        )
        result.notes = {"alone": alone, "before": before, "started": started, "after": after, "undone": undone}
        if keep:
            (keep / case.name / "notes.json").write_text(json.dumps(result.notes, indent=1))
    elif status < 2:
        undone = ours.run("sh", f"{OUT}/undo.sh", folder=HOME)
        left = sorted(name for name in ours.tree() if "seamark" in name)
        result.words, result.trees = "no worker's files", "equal" if not left and undone[0] == 0 else f"{undone}: {left}"
    return result


def _way(case: Path, told: Mapping[str, Any], machines: Sequence[Machine]) -> tuple[str, list[str]]:
    """What `seamark setup` is given, and how its owner starts it; nothing for what nobody runs."""
    if "line" in told:
        return told["line"], ["bash", "-c", told["line"]]
    name = told.get("input") or next(each.name for each in sorted(case.iterdir()) if each.name != "case.toml")
    path, text = f"{HOME}/work/{name}", (case / name).read_text()
    match Path(name).suffix:
        case ".sh":
            return path, [path] if text.startswith("#!") else ["bash", path]
        case ".service":
            for machine in machines:
                machine.file(f"{UNITS}/{name}", text)
            return f"{UNITS}/{name}", ["systemctl", "start", name]
        case ".yaml" | ".yml" if "\nservices:" in f"\n{text}":
            return path, ["docker", "compose", "-f", path, "up", "-d", *told.get("services", ())]
        case ".yaml" if "\nrecipe_version:" in text or text.startswith("recipe_version:"):
            return path, ["sh", "-c", f'cd {SPARK} && exec ./run-recipe.sh {path} "$@"', "sh"]
        case ".yaml" if '\nmodel: "' in text:
            return path, ["vllm", "serve", "--config", path]
    return path, []


def _differences(theirs: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Between two lists of notes, as far as they are of vLLM and what holds it."""
    starts = [[each for each in notes if "vllm" in each] for notes in (theirs, ours)]
    if not starts[0] or len(starts[0]) != len(starts[1]):
        yield f"vLLM starts {len(starts[0])} times alone, {len(starts[1])} times with Seamark"
    for alone, ours_ in zip(*starts, strict=False):
        words = [_words(each["vllm"]) for each in (alone, ours_)]
        if words[0] != words[1]:
            yield f"words {_parting(*words)}"
        twice = {word for word in ours_["vllm"] if word.startswith("--") and ours_["vllm"].count(word) > 1}
        if twice := twice - {word for word in alone["vllm"] if alone["vllm"].count(word) > 1}:
            yield f"twice: {sorted(twice)}"
        for part in ("env", "options"):
            if (pair := [each.get(part) for each in (alone, ours_)])[0] != pair[1]:
                yield f"{part} {_parting(*(_flat(each) for each in pair))}"
        if ours_.get("image", "") != alone.get("image", ""):
            yield f"image {alone.get('image')} -> {ours_.get('image')}"


def _words(words: Sequence[str]) -> list[str]:
    left: list[str] = []
    skip = False
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if not skip and name not in (*_VALUED, *_LEFT_OUT):
            left.append(word)
        skip = not skip and word in _VALUED
    return left


def _flat(value: object) -> list[str]:
    return [f"{k}={v}" for k, v in sorted(value.items())] if isinstance(value, dict) else list(map(str, value or ()))


def _parting(alone: Sequence[str], ours: Sequence[str]) -> str:
    lost, new = [each for each in alone if each not in ours], [each for each in ours if each not in alone]
    return f"lost {lost[:5]} new {new[:5]}" if lost or new else "in another order"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.harness.setups", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for what was said, written and noted")
    args = parser.parse_args(argv)
    if "SETUPS_ALONE" not in os.environ:  # mounts of this process are seen by nobody else
        os.environ["SETUPS_ALONE"] = "1"
        os.execvp("unshare", ["unshare", "--mount", sys.executable, "-m", "tests.harness.setups", *argv])
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["mount", "-t", "tmpfs", "none", scratch], check=True)
        results = [run_case(each.resolve(), Path(scratch) / each.name, args.keep) for each in args.folders]
        print("\n".join(each.row() for each in results))
        subprocess.run(["umount", "--lazy", scratch], check=True)
    taken = [each for each in results if each.status < 2]
    fine = sum(each.trees == "equal" and each.words in ("equal", "no worker's files") for each in taken)
    print(f"{len(results)} ways: {len(results) - len(taken)} refused; of {len(taken)} taken {fine} as they were")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
