"""What each damage to a checkpoint directory costs, on vLLM's own scheduler: a start on it, and one after that.

An engine stores the states of some prompts. Something happens to a file of the first one, or to the directory, before
another engine starts on it, or under one that runs. Then one more starts. What is under a key, and what a request
begins with, is checked at every step (`tests.harness.audit`); here also who lost what, and whether it came back.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from engine_patches import ledger
from engine_patches.disk import files
from engine_patches.disk.files import SUFFIX
from engine_patches.patches import PATCHES
from tests.harness import disk_audit, disk_defects
from tests.harness.audited_core import Core
from tests.harness.damaged_files import EVERYTHING, Damage, Lost, let_go, strangers_files

PROMPTS = 5

# Of `Core`, as the two families have it: a delta net's match unit is larger, and the next step is planned ahead.
FORMS: dict[str, dict[str, Any]] = {"Mamba2": {"unit": 16}, "gated delta net": {"unit": 32, "overlap": True}}

SPARE_FILES = 3  # that the directory may hold beside the states of all prompts

FILES_OF_FIRST = 4  # of the first prompt: states of two cache groups, two blocks of attention

ROWS = 60  # of host memory: all that the prompts need

START_SECONDS = 60.0  # nothing takes so long that does not hang


class Start(NamedTuple):
    """An engine's life on a directory."""

    first: Sequence[int]  # tokens that each prompt found when it was asked first
    seconds: float  # until the engine could be asked
    errors: list[str]
    told: list[str]  # of the directory, in its log: the lines' beginnings


class AtOnce(disk_audit.DiskWorker):
    """Of an engine whose disk does everything before the next step, and that nothing else happens to."""

    looks = False  # at what happened to the directory

    def before_step(self) -> None:
        self._steps += 1
        self.tier._next_refresh = 0.0 if self.looks else float("inf")
        for pool in (self._writer, self._readers):
            pool.do(1.0, self._draw)


def prompts() -> list[list[int]]:
    """Some blocks long, all different from the first token on."""
    draw = random.Random(5)
    return [[number, *(draw.randrange(1000) for _ in range(140 + 64 * number))] for number in range(PROMPTS)]


def live(model: str, form: Mapping[str, Any], root: Path, max_files: int, meanwhile: Damage | None = None) -> Start:
    """Ask each prompt three times, in an engine of its own; `meanwhile` happens after the first time."""
    began = time.monotonic()
    worker = AtOnce(root, random.Random(7))
    core = Core(model, worker=worker, connector=disk_audit.connector_of(root, ROWS, max_files), **form)
    seconds = time.monotonic() - began
    _ask(core, "first")
    if meanwhile is not None:
        happen(meanwhile, root)
        worker.looks = True
    for again in ("second", "third"):  # who comes back is what a state is kept for
        _ask(core, again)
    core.drain()
    worker.close()
    first = [core.hits[f"first-{number}"] for number in range(PROMPTS)]
    return Start(first, seconds, core.errors, sorted(worker.tier._warned))


def _ask(core: Core, name: str) -> None:
    for number, tokens in enumerate(prompts()):
        core.request(f"{name}-{number}", tokens, [len(tokens) - 3])
        core.run()


def happen(damage: Damage, root: Path, file: int = 0) -> None:
    """To a file of the first prompt, and the one before or behind it, or to the directory that they lie in."""
    paths = sorted(root.rglob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    damage.apply(random.Random(3), paths[file], paths[file - 1 if file else 1])


class Judge:
    """Of what damages to a directory cost."""

    def __init__(self, model: str, form: Mapping[str, Any], stored: Path) -> None:
        """`stored`: where an engine is going to store the states of all prompts."""
        self._model, self._form, self._stored = model, form, stored
        live(model, form, stored, 1000)
        self._max_files = len(list(stored.rglob(f"*{SUFFIX}"))) + SPARE_FILES
        self.undamaged = self._start(stored)

    def at_a_start(self, damage: Damage, file: int = 0) -> list[str]:
        """What is wrong where two engines start on a damaged directory, one after the other."""
        wrong = []
        with self._copy() as root:
            happen(damage, root, file)
            strangers, mode = strangers_files(root.parent), _mode(root)
            for name in ("next", "last"):
                found = self._start(root)
                wrong += [f"{name}: {error}" for error in found.errors]
                lost = self._lost(found)
                if lost != _expected(damage, name == "last"):
                    wrong.append(f"the {name} start lost prompts {lost}: {found.first} of {self.undamaged.first}")
                if bool(found.told) != damage.told:
                    wrong.append(f"the {name} start says {found.told}")
                if found.seconds > START_SECONDS:
                    wrong.append(f"the {name} start took {found.seconds} seconds")
            if strangers_files(root.parent) != strangers:
                wrong.append("a file that is not ours was touched")
            if mode not in (0, _mode(root)):
                wrong.append(f"the directory's mode is {_mode(root):o}, and was {mode:o}")
            let_go()
        return wrong

    def while_it_runs(self, damage: Damage) -> list[str]:
        """What is wrong where a directory is damaged under an engine, and another one starts after it."""
        with self._copy() as root:
            engine = self._start(root, damage)
            found = self._start(root)
            let_go()
        wrong = engine.errors + found.errors
        lost = self._lost(found)
        if lost - _expected(damage, damage.seen):
            wrong.append(f"lost prompts {lost}: {found.first} of {self.undamaged.first}")
        return wrong

    def _start(self, root: Path, meanwhile: Damage | None = None) -> Start:
        return live(self._model, self._form, root, self._max_files, meanwhile)

    def _lost(self, found: Start) -> set[int]:
        return {number for number in range(PROMPTS) if found.first[number] < self.undamaged.first[number]}

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="seamark-damage-") as name:
            yield Path(shutil.copytree(self._stored, Path(name, "states")))  # and the times of its files


def _mode(root: Path) -> int:
    return root.stat().st_mode if root.exists() else 0


def _expected(damage: Damage, healed: bool) -> set[int]:
    """The prompts that are computed again; `healed`: what can be kept again was."""
    if damage.lost is Lost.NOTHING or (healed and damage.kept_again):
        return set()
    return {0} if damage.lost is Lost.ITS_OWN else set(range(PROMPTS))


def main(model: str, form: str, when: str) -> None:
    """Print JSON: what is wrong after each damage, by its name. `when`: it happens at a start, to each file of a prompt
    at a start, or while an engine runs.
    """
    logging.disable(logging.INFO)
    init_none_hash(sha256)
    ledger.apply(PATCHES)
    disk_defects.loads_always_pay()
    files.START_LOCK_SECONDS = files.LOCK_SECONDS = 0.1
    found = {}
    with tempfile.TemporaryDirectory(prefix="seamark-damage-") as name:
        judge = Judge(model, FORMS[form], Path(name, "states"))
        for damage in EVERYTHING:
            if when == "at a start":
                found[damage.name] = judge.at_a_start(damage)
            elif when == "while it runs":
                found[damage.name] = judge.while_it_runs(damage)
            elif damage.lost is Lost.ITS_OWN and not damage.told:
                each = (judge.at_a_start(damage, file) for file in range(FILES_OF_FIRST))
                found[damage.name] = [wrong for of_file in each for wrong in of_file]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
