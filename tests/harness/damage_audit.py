"""What each damage to a checkpoint directory costs, on vLLM's own scheduler: a start on it, and one after that.

An engine stores the states of some prompts. Something happens to a file of the first one, or to the directory, before
another engine starts on it, and one more. What is under a key, and what a request begins with, is checked at every step
(`tests.harness.audit`), and files that change under a running engine by `disk_audit`; here also who lost what, and
whether it came back.

Run as `damage_audit MODEL`. Prints JSON: what is wrong after each damage, by its name.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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

# Of `Core`, as gated delta nets have it.
FORM = {"unit": 32, "overlap": True}

SPARE_FILES = 3  # that the directory may hold beside the states of all prompts

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

    def before_step(self) -> None:
        self._steps += 1
        self.tier._next_refresh = float("inf")
        for pool in (self._writer, self._readers):
            pool.do(1.0, self._draw)


def prompts() -> list[list[int]]:
    """Some blocks long, all different from the first token on."""
    draw = random.Random(5)
    return [[number, *(draw.randrange(1000) for _ in range(140 + 64 * number))] for number in range(PROMPTS)]


def live(model: str, root: Path, max_files: int) -> Start:
    """Ask each prompt three times, in an engine of its own: who comes back is what a state is kept for."""
    began = time.monotonic()
    worker = AtOnce(root, random.Random(7))
    core = Core(model, worker=worker, connector=disk_audit.connector_of(root, ROWS, max_files), **FORM)
    seconds = time.monotonic() - began
    for name in ("first", "second", "third"):
        for number, tokens in enumerate(prompts()):
            core.request(f"{name}-{number}", tokens, [len(tokens) - 3])
            core.run()
    core.drain()
    worker.close()
    first = [core.hits[f"first-{number}"] for number in range(PROMPTS)]
    return Start(first, seconds, core.errors, sorted(worker.tier._warned))


def wrong_after(damage: Damage, model: str, stored: Path, max_files: int, undamaged: Sequence[int]) -> list[str]:
    """What is wrong where two engines start on a damaged copy of what is `stored`, one after the other.

    `undamaged`: tokens that each prompt finds if nothing has happened.
    """
    wrong = []
    with tempfile.TemporaryDirectory(prefix="seamark-damage-") as name:
        root = Path(shutil.copytree(stored, Path(name, "states")))  # and the times of its files
        one, other, *_ = sorted(root.rglob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        damage.apply(random.Random(3), one, other)
        strangers, mode = strangers_files(root.parent), _mode(root)
        for start in ("next", "last"):
            found = live(model, root, max_files)
            wrong += [f"{start}: {error}" for error in found.errors]
            lost = {number for number in range(PROMPTS) if found.first[number] < undamaged[number]}
            if lost != _expected(damage, start == "last"):
                wrong.append(f"the {start} start lost prompts {lost}: {found.first} of {undamaged}")
            if bool(found.told) != damage.told:
                wrong.append(f"the {start} start says {found.told}")
            if found.seconds > START_SECONDS:
                wrong.append(f"the {start} start took {found.seconds} seconds")
        if strangers_files(root.parent) != strangers:
            wrong.append("a file that is not ours was touched")
        if mode not in (0, _mode(root)):
            wrong.append(f"the directory's mode is {_mode(root):o}, and was {mode:o}")
        let_go()
    return wrong


def _mode(root: Path) -> int:
    return root.stat().st_mode if root.exists() else 0


def _expected(damage: Damage, healed: bool) -> set[int]:
    """The prompts that are computed again; `healed`: what can be kept again was."""
    if damage.lost is Lost.NOTHING or (healed and damage.kept_again):
        return set()
    return {0} if damage.lost is Lost.ITS_OWN else set(range(PROMPTS))


def main(model: str) -> None:
    logging.disable(logging.INFO)
    init_none_hash(sha256)
    ledger.apply(PATCHES)
    disk_defects.loads_always_pay()
    files.START_LOCK_SECONDS = files.LOCK_SECONDS = 0.1
    with tempfile.TemporaryDirectory(prefix="seamark-damage-") as name:
        stored = Path(name, "states")
        live(model, stored, 1000)
        most = len(list(stored.rglob(f"*{SUFFIX}"))) + SPARE_FILES
        undamaged = live(model, stored, most).first
        print(json.dumps({each.name: wrong_after(each, model, stored, most, undamaged) for each in EVERYTHING}))


if __name__ == "__main__":
    main(*sys.argv[1:2])
