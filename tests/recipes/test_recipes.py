"""Each recipe that people run, on vLLM as it is released: what Seamark does with it is what its file expects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from shlex import split
from typing import Any, NamedTuple

import pytest

from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT, generated_model
from tests.harness import draft_cores, flags_parser, recipes, versions
from tests.harness.draft_answers import differences, hits, owed
from tests.harness.draft_cores import ANSWERS, SHARED
from tests.harness.draft_engines import Engine, wanted
from tests.harness.draft_heads import mtp_model
from tests.harness.recipe_models import MODELS
from tests.harness.recipes import INSTALLED, NEWEST, ROOT, Recipe, Said
from tests.harness.scheduler_process import audit, run_apart
from tests.harness.versions import engine_of

RECIPES = recipes.read()

SHORT = (16, 17, 33, 36)  # drafts, none, a refusal; the classes of their models are quickly loaded

VERSIONS = [INSTALLED, pytest.param(NEWEST, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("number", RECIPES)
@pytest.mark.parametrize("version", [INSTALLED, NEWEST])
def test_a_recipe_that_does_not_hit_says_what_to_change(number, version):
    assert RECIPES[number].expects(version).hits != bool(RECIPES[number].without)


def test_the_readme_says_how_many_hit():
    many = sum(recipe.expects(NEWEST).hits for recipe in RECIPES.values())
    assert recipes.count(many, len(RECIPES), NEWEST) in " ".join((ROOT / "README.md").read_text().split())


def test_flags_that_were_left_out_are_unknown_to_vllm():
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as LOADERS

    known = flags_parser.parser()._option_string_actions
    for flag in {flag for recipe in RECIPES.values() for flag in recipe.of_forks}:
        name, _, value = flag.partition(" ")
        assert name not in known or (name == "--load-format" and value not in LOADERS), flag


def check(recipe: Recipe, said: Said, version: str) -> None:
    """Whether what is said of a recipe is what its file expects, and fits its model and flags."""
    assert recipes.verdict(recipe, said, version) == recipe.expects(version)
    if not said.refused:
        assert said.rows["architecture"] in MODELS[recipe.model]["architectures"]
        assert ("packs a token's row" in said.text) == ("_ds_mla" in recipe.flags)


@pytest.mark.parametrize("version", VERSIONS)
def test_some_recipes_get_the_verdicts_of_their_files(version):
    asked = [RECIPES[number] for number in SHORT]
    for recipe, said in zip(asked, recipes.explained(asked, version), strict=True):
        check(recipe, said, version)


@pytest.mark.thorough
def test_hints_that_are_asked_for_at_once_are_on_no_trial():
    (said,) = recipes.explained([RECIPES[16]], SEAMARK_DRAFTS="1")
    assert "drafts" in said.rows and "hints" not in said.rows


@pytest.fixture(scope="module", params=[INSTALLED, NEWEST])
def all_said(request) -> tuple[str, Mapping[int, Said], Mapping[int, Said]]:
    """A version of vLLM; what is said of each recipe on it, and of those with a change with that."""
    changed = {number: recipe.changed for number, recipe in RECIPES.items() if recipe.without}
    said = recipes.explained([*RECIPES.values(), *changed.values()], request.param)
    return (
        request.param,
        dict(zip(RECIPES, said[: len(RECIPES)], strict=True)),
        dict(zip(changed, said[len(RECIPES) :], strict=True)),
    )


@pytest.mark.thorough  # vLLM inspects the class of each model in a process
@pytest.mark.parametrize("number", RECIPES)
def test_every_recipe_gets_the_verdict_of_its_file(all_said, number):
    version, said, changed = all_said
    check(RECIPES[number], said[number], version)
    if number in changed:
        assert recipes.verdict(RECIPES[number].changed, changed[number], version).hits, changed[number]


def cores() -> dict[str, list[dict[str, Any]]]:
    """Cores with the cache groups of recipes that hit, each once, by the audit."""
    found: dict[str, list[dict[str, Any]]] = {"scheduler": [], "draft": []}
    for recipe in RECIPES.values():
        if recipe.audited is not None and recipe.expects(NEWEST).hits:
            name, core = recipe.audited
            if core not in found[name]:
                found[name].append(core)
    return found


CORES = cores()


@pytest.mark.parametrize(
    ("version", "share"),
    [
        pytest.param(INSTALLED, slice(1), id="a core"),
        pytest.param(INSTALLED, slice(None), id="all cores", marks=pytest.mark.thorough),
        pytest.param(NEWEST, slice(None), id="all cores, the newest vLLM", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("name", CORES)
def test_with_the_recipes_cache_groups_every_key_leads_to_what_it_promises(name, version, share):
    asked = {"seeds": [1], "chats": 40, "cores": CORES[name][share], "answers": ANSWERS, "shared": SHARED}
    model = mtp_model() if name == "draft" else generated_model(print)
    if version == INSTALLED:
        found = audit(name, model, **asked)
    else:
        found = versions.run(versions.source_of(version), "audit", name, str(model), json.dumps(asked))
    for audited in found:
        assert name != "draft" or draft_cores.faults(audited) == []
        assert audited["errors"] == [] and audited["hit_tokens"] > 400


# Engines as recipes have them, as far as a CPU goes: a small model of the same kinds of states, its drafts, its flags.
# Left away is what wants a GPU or several, or a model with more room: KV in 8 bits, kernels by name, loaders, ranks,
# lengths. Heads that are models of their own (DFlash, DSpark) are in tests/engine/drafts.

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


ENGINES: dict[OnACpu, list[int]] = {}  # each with the numbers of its recipes
for _number, _recipe in RECIPES.items():
    if (_engine := on_a_cpu(_recipe)) is not None:
        ENGINES.setdefault(_engine, []).append(_number)


def test_every_recipe_that_is_known_by_an_engine_is_one_here():
    known = {number for number, recipe in RECIPES.items() if recipe.expects(NEWEST).known == recipes.ENGINE}
    assert known - {number for numbers in ENGINES.values() for number in numbers} == {36}  # short convolutions


@cache
def answered(family: str, version: str) -> Mapping[str, Any]:
    """What the family's engines answer, by name; each has a process of its own."""
    engines = [RIGHT, *(each.engine for each in ENGINES if each.family == family)]
    source = None if version == INSTALLED else engine_of(version)
    found = run_apart("draft_engines", str(mtp_model(family)), wanted(*engines), source=source)
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
