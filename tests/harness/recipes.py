"""The recipes in tests/recipes, and what Seamark does with each: said by `seamark worker --explain` itself.

A recipe's file has its flags as they were published, and what is expected of it. What is said is never written here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from shlex import split
from typing import Any, NamedTuple

import yaml

from proxy.bench.harness.servers import CACHE
from tests.harness.draft_cores import BESIDE_THE_TARGET, OWN_SHAPE, OWN_WINDOW
from tests.harness.recipe_models import HEADS, MODELS, SLIDING, write_models
from tests.harness.versions import engine_of

ROOT = Path(__file__).parents[2]

FOLDER = ROOT / "tests" / "recipes"

IMAGE_LIBRARIES = Path(__file__).parent / "image_libraries"

INSTALLED, NEWEST = "0.32.0", "0.33.0"  # of vLLM

TRIAL = "on trial at first"

HITS, BESIDE_DRAFTS = "hits", "hits beside its drafts, on trial first"

ENGINE, INTERPRETER, SCHEDULER, READ = KNOWN = "engine", "interpreter", "scheduler", "read"  # the surest first

# What `--explain` says of the layers, in a column's width.
LAYERS_SHOWN = {"shown on an engine": ENGINE, "a GPU's kernels": INTERPRETER, "nothing ran": READ}

# How it is known that hints are right beside drafts of a method, on either vLLM (tests/engine/drafts).
DRAFTS_SHOWN = {
    "mtp": {INSTALLED: ENGINE, NEWEST: ENGINE},
    "dflash": {INSTALLED: SCHEDULER, NEWEST: INTERPRETER},
    "dspark": {INSTALLED: SCHEDULER, NEWEST: INTERPRETER},
}

# What a recipe goes without where it says so, by the flag that brings it in.
FLAG_OF = {"drafts": "--speculative-config", "connector": "--kv-transfer-config"}

# Flags with a value that no cache depends on, and that want what is not here: Ray, a model's tokenizer.
NOT_ASKED = {"--distributed-executor-backend", "--reasoning-parser"}


class Verdict(NamedTuple):
    """What Seamark does with a recipe by default on one vLLM."""

    states: str  # inside the pass, or cut; empty if vLLM does not start
    unit: str  # tokens, of matches; and where a kernel that only a GPU has decides
    known: str  # the weakest of what shows that it is right
    words: str  # whether request 2 hits, or the exact words of the refusal

    @property
    def hits(self) -> bool:
        return self.words in (HITS, BESIDE_DRAFTS)


@dataclass(frozen=True)
class Recipe:
    """A file of tests/recipes."""

    number: int
    where: str
    model: str  # of `recipe_models.MODELS`
    image: str
    expected: Mapping[str, Any]  # of `Verdict`; a mapping instead: by vLLM's version
    flags: str = ""  # of `vllm serve`
    drafts: Mapping[str, Any] = field(default_factory=dict)  # `--speculative-config`
    connector: str = ""
    of_forks: Sequence[str] = ()  # flags that vLLM itself does not have: left out
    note: str = ""
    without: Sequence[str] = ()  # of `FLAG_OF`: left away, request 2 hits

    def flags_in(self, folder: Path) -> list[str]:
        """The arguments of `vllm serve` behind the model, as they are asked. `folder`: of the models' folders."""
        flags = split(self.flags)
        for flag in NOT_ASKED & {*flags}:
            at = flags.index(flag)
            del flags[at : at + 2]
        if self.drafts:
            head = {"model": str(folder / self.drafts["model"])} if "model" in self.drafts else {}
            flags += ["--speculative-config", json.dumps({**self.drafts, **head})]
        if self.connector:
            flags += ["--kv-transfer-config", json.dumps({"kv_connector": self.connector, "kv_role": "kv_both"})]
        return flags

    @cached_property
    def changed(self) -> Recipe:
        """As it hits."""
        return replace(self, **{name: type(getattr(self, name))() for name in self.without})

    @property
    def change(self) -> str:
        """What to do so that it hits, in words; empty if nothing is."""
        return f"leave {' and '.join(FLAG_OF[name] for name in self.without)} away" if self.without else ""

    def expects(self, version: str) -> Verdict:
        of_version = {
            name: value[version] if isinstance(value, Mapping) else value for name, value in self.expected.items()
        }
        return Verdict(**of_version)

    @property
    def audited(self) -> tuple[str, dict[str, Any]] | None:
        """The audit of vLLM's scheduler with its kinds of cache groups, and the core's arguments; None if it has none.

        An audit's windows are as much smaller than a head's as its blocks are.
        """
        if "indexer_n_heads" in MODELS[self.model].get("text_config", {}) or "index_kpool" in str(MODELS[self.model]):
            return None  # their heads have an index and a ring of their own, which no audit has
        words = split(self.flags)
        core: dict[str, Any] = {"overlap": True}  # model runner V2, a GPU's default
        for flag, argument in (
            ("--pipeline-parallel-size", "stages"),
            ("--decode-context-parallel-size", "context_ranks"),
        ):
            if flag in words:
                core[argument] = int(words[words.index(flag) + 1])
        if not self.drafts:
            return "scheduler", core
        core |= {"drafts": min(int(self.drafts["num_speculative_tokens"]), MOST_DRAFTS)}
        if head := HEADS.get(self.drafts.get("model", "")):
            slides = SLIDING in head["layer_types"]
            core |= {"head": OWN_WINDOW if slides else OWN_SHAPE, "fills_in": True} | (
                {"window": 100} if slides else {}
            )
        else:
            core["head"] = BESIDE_THE_TARGET
        return "draft", core


MOST_DRAFTS = 8  # for a token, in an audit whose blocks have 64


def read() -> dict[int, Recipe]:
    """The recipes by their numbers, which their files' names begin with."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        number, content = int(path.name.partition("-")[0]), yaml.safe_load(path.read_text())
        unknown = content.keys() - {each.name for each in fields(Recipe)}
        if unknown or number in found:
            raise ValueError(f"{path.name}: {', '.join(sorted(unknown)) or 'another file has this number'}")
        found[number] = Recipe(number=number, **content)
    return found


# Each command line in turn, as on a GPU.
IN_A_PROCESS = """
import json, sys
from engine_patches import plugin
from engine_patches.commands import explain, worker
plugin.register()
said = []
for model, flags in json.load(sys.stdin):
    try:
        refused = worker.refusal(model, worker.flags_of(flags))
        said.append(["", refused] if refused else [
            "\\n".join(explain.explained(worker.vllm_arguments(model, flags), explain.GPU)), ""])
    except explain.CannotExplain as error:
        said.append(["", str(error)])
print(json.dumps(said))
"""


class Said(NamedTuple):
    """What `seamark worker --explain gpu` says of a command line."""

    text: str  # empty if vLLM does not start
    refused: str  # why it does not

    @property
    def rows(self) -> Mapping[str, str]:
        """What is said, by the name of its line."""
        return {line[2:20].strip(): line[20:] for line in self.text.splitlines() if line.startswith("  ")}


def explained(recipes: Sequence[Recipe], version: str = INSTALLED, **variables: str) -> list[Said]:
    """What is said of each, on a vLLM of this version. Raises `subprocess.CalledProcessError`."""
    paths = [str(IMAGE_LIBRARIES), *([] if version == INSTALLED else [str(engine_of(version))]), str(ROOT)]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("SEAMARK_")},
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_LOGGING_LEVEL": "CRITICAL",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "seamark",
        # What is found of models' classes with these libraries is not for other runs, nor for another vLLM.
        "VLLM_CACHE_ROOT": str((CACHE / f"recipe-models-{version}").resolve()),
        **variables,
    }
    with tempfile.TemporaryDirectory(prefix="seamark-recipes-") as given:
        folder = Path(given)
        write_models(folder, {recipe.model for recipe in recipes} | {recipe.drafts.get("model") for recipe in recipes})
        done = subprocess.run(
            [sys.executable, "-c", IN_A_PROCESS],
            input=json.dumps([(str(folder / each.model), each.flags_in(folder)) for each in recipes]),
            env={**environment, "HF_MODULES_CACHE": str(folder / "modules")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [
            Said(*(part.replace(f"{folder}/", "") for part in each))
            for each in json.loads(done.stdout.splitlines()[-1])
        ]


def verdict(recipe: Recipe, said: Said, version: str) -> Verdict:
    """What is said of a recipe on a vLLM of this version, as the table has it."""
    if said.refused:
        return Verdict("", "", READ, f"does not start: {said.refused}")
    rows = said.rows
    shown = next(known for words, known in LAYERS_SHOWN.items() if f"{words})" in rows["states"])
    if recipe.drafts:
        shown = max(shown, DRAFTS_SHOWN[recipe.drafts["method"]][version], key=KNOWN.index)
    unit = rows["match unit"].removesuffix(" tokens")
    if "where FlashInfer computes prompts" in said.text:
        unit += ", with FlashInfer 64"
    hints = rows.get("hints", "")
    words = HITS if not hints else BESIDE_DRAFTS if hints.startswith(TRIAL) else f"hints {hints}"
    return Verdict("inside" if rows["states"].startswith("inside") else "cut", unit, shown, words)


HEAD = "|  | recipe | model | drafts | states | unit | known by | verdict |\n|" + " --- |" * 8


def row(recipe: Recipe, told: Verdict) -> str:
    """Of the table in Markdown."""
    drafts = f"{recipe.drafts['method']} {recipe.drafts['num_speculative_tokens']}" if recipe.drafts else ""
    *known, words = told
    done = f"{words}; {recipe.change}, and it hits" if recipe.change and not told.hits else words
    return f"| {' | '.join((str(recipe.number), recipe.where, recipe.model, drafts, *known, done))} |"


def count(many: int, recipes: int, version: str) -> str:
    """The table's last line."""
    return f"{many} of {recipes} hit at request 2 by default on stock vLLM {version.removesuffix('.0')}"
