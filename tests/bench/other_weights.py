"""`python -m tests.bench.other_weights`: no state of old weights is found when a model's files are replaced in place.

Each change leaves sizes, headers and both ends of the files as they were, but for the one to another revision. A worker
with the directory that the old weights filled is compared with one that has an empty directory, answer by answer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transformers import AutoTokenizer

from proxy.bench.harness.servers import MATCH_UNITS, Servers, generated_model, narrator
from tests.harness.changed_weights import CHANGES, change
from tests.harness.restarts import KEEP_ALL, ask, kill, plugin, rounds_of, start, written

ANOTHER_REVISION = "another revision"

OTHER_SEED = 77


class Row(NamedTuple):
    """One change of one family's weights."""

    family: str
    change: str
    answers: int
    wrong: int  # other than those with an empty directory
    hits: int  # tokens
    control_hits: int  # with the empty directory
    changed: int  # answers that are not those of the old weights

    def in_words(self) -> str:
        """A line."""
        return (
            f"{self.family}: {self.change}: {self.wrong} of {self.answers} wrong, {self.changed} unlike the old "
            f"weights'; hits {self.hits} tokens, with an empty directory {self.control_hits}"
        )


def replace(own: Path, model: Path, family: str, name: str) -> None:
    """Put other weights into the files of `own`, which are those of `model` or were changed before."""
    if name != ANOTHER_REVISION:
        for path in model.glob("*.safetensors"):
            shutil.copyfile(path, own / path.name)
        change(own, CHANGES[name])
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "engine_patches", "model", "--seed", str(OTHER_SEED), "--out", f"{folder}/m"]
        subprocess.run([*command, "--family", family], check=True, capture_output=True)
        for path in Path(folder, "m").glob("*.safetensors"):
            shutil.copyfile(path, own / path.name)


def measure(family: str, folder: Path, say: Callable[[str], None]) -> list[Row]:
    """Every change of one family."""
    model = generated_model(say, family)
    prompts = [prompt for part in rounds_of(AutoTokenizer.from_pretrained(model)) for prompt in part]
    own, states = Path(shutil.copytree(model, folder / "model")), folder / "states"
    rows = []
    with Servers(folder) as fleet:
        loads = plugin(folder, "loads_always_pay")
        first = start(fleet, own, "first", states, *KEEP_ALL, **loads)
        before = ask(first, prompts)
        written(states)
        kill(first)
        for number, name in enumerate((*CHANGES, ANOTHER_REVISION)):
            say(f"{family}: {name}")
            replace(own, model, family, name)
            control = start(fleet, own, f"control-{number}", folder / f"empty-{number}", *KEEP_ALL, **loads)
            right = ask(control, prompts)
            control.stop()
            directory = Path(shutil.copytree(states, folder / f"states-{number}"))
            worker = start(fleet, own, f"worker-{number}", directory, *KEEP_ALL, **loads)
            after = ask(worker, prompts)
            worker.stop()
            counts = after.differing(right), after.hits, right.hits, before.differing(right)
            rows.append(Row(family, name, len(prompts), *counts))
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.other_weights", description="weights replaced in place, beside states on disk"
    )
    parser.add_argument("--family", action="append", choices=MATCH_UNITS, help="only this one (repeat); default: all")
    args = parser.parse_args(argv)
    say, rows = narrator(), []
    for family in dict.fromkeys(args.family or MATCH_UNITS):
        with tempfile.TemporaryDirectory(prefix="seamark-weights-") as folder:
            rows += measure(family, Path(folder), say)
    print("\n".join(row.in_words() for row in rows))
    wrong = sum(row.wrong for row in rows)
    print(f"{wrong} of {sum(row.answers for row in rows)} answers are of old weights")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
