"""Engines as recipes have them, as far as a CPU goes: a small model of the same kinds of states, its drafts, its flags.

Left away is what wants a GPU or several, or a model with more room: KV in 8 bits, kernels by name, loaders, ranks,
lengths. Heads that are models of their own (DFlash, DSpark) are in tests/engine/drafts, where they run in the
interpreter of a GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from shlex import split
from typing import Any, NamedTuple

import pytest

from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT, generated_model
from tests.harness import recipes
from tests.harness.draft_answers import differences, hits, owed
from tests.harness.draft_engines import Engine, wanted
from tests.harness.recipe_models import MODELS
from tests.harness.recipes import INSTALLED, NEWEST, Recipe
from tests.harness.scheduler_process import run_apart
from tests.harness.versions import engine_of

# Of vLLM, that a CPU takes as they are.
TAKEN = {
    "--block-size": int,
    "--mamba-ssm-cache-dtype": str,
    "--max-num-batched-tokens": int,
    "--max-num-seqs": int,
}

ALIGNMENT = {NEMOTRON_H: 16, QWEN3_NEXT: 64}  # tokens, on multiples of which states lie

RIGHT = Engine("right", mode="reference", caching=False, hints=False)


class OnACpu(NamedTuple):
    """What of a recipe an engine here is made of."""

    family: str  # of generated models
    drafts: int  # of an MTP head; 0: none
    flags: tuple[tuple[str, Any], ...]

    @property
    def engine(self) -> Engine:
        speculation = {"method": "mtp", "num_speculative_tokens": self.drafts} if self.drafts else None
        return Engine(
            str(self), speculation=speculation, oracle="right" if self.drafts else None, flags=dict(self.flags)
        )


def on_a_cpu(recipe: Recipe) -> OnACpu | None:
    """None for kinds of states and drafts that no engine on a CPU has."""
    model = MODELS[recipe.model]
    text = model.get("text_config", model)
    kind = str(text.get("model_type", ""))
    family = NEMOTRON_H if kind.startswith("nemotron_h") else QWEN3_NEXT if kind.startswith("qwen3") else None
    if family is None or recipe.connector or recipe.drafts.get("method", "mtp") != "mtp":
        return None
    words = split(recipe.flags)
    flags = {
        name[2:].replace("-", "_"): read(words[words.index(name) + 1]) for name, read in TAKEN.items() if name in words
    }
    return OnACpu(family, int(recipe.drafts.get("num_speculative_tokens", 0)), tuple(flags.items()))


def by_engine() -> dict[OnACpu, list[int]]:
    """The engines, each with the numbers of its recipes."""
    found: dict[OnACpu, list[int]] = {}
    for number, recipe in recipes.read().items():
        if (engine := on_a_cpu(recipe)) is not None:
            found.setdefault(engine, []).append(number)
    return found


ENGINES = by_engine()


def test_every_recipe_that_is_known_by_an_engine_is_one_here():
    known = {number for number, recipe in recipes.read().items() if recipe.expects(NEWEST).known == recipes.ENGINE}
    assert known - {number for numbers in ENGINES.values() for number in numbers} == {36}  # short convolutions


@cache
def answered(family: str, version: str) -> Mapping[str, Any]:
    """What the family's engines answer, by name; each has a process of its own."""
    engines = [RIGHT, *(each.engine for each in ENGINES if each.family == family)]
    source = None if version == INSTALLED else engine_of(version)
    found = run_apart("draft_engines", str(generated_model(print, family, mtp=True)), wanted(*engines), source=source)
    return {engine.name: each for engine, each in zip(engines, found, strict=True)}


@pytest.mark.on_request  # half a minute each
@pytest.mark.parametrize("version", [INSTALLED, NEWEST])
@pytest.mark.parametrize("asked", ENGINES, ids=lambda asked: "recipes " + " ".join(map(str, ENGINES[asked])))
def test_with_a_recipe_s_flags_request_2_hits_and_answers_are_exact(asked, version):
    found = answered(asked.family, version)
    engine, right = found[str(asked)], found[RIGHT.name]
    assert not differences(engine, right)
    ahead = 0 if not asked.drafts else 16 if version == INSTALLED else 1
    assert hits(engine) == owed("pairs", ahead, ALIGNMENT[asked.family])
    assert engine["writes_in_forward"] and (not asked.drafts or max(map(int, engine["accepted"])) == asked.drafts)
