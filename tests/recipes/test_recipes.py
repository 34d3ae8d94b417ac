"""Each recipe that people run, on vLLM as it is released: what Seamark does with it is what its file expects."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.bench.harness.servers import generated_model
from tests.harness import draft_cores, flags_parser, recipes, versions
from tests.harness.draft_cores import ANSWERS, SHARED
from tests.harness.recipe_models import MODELS
from tests.harness.recipes import INSTALLED, NEWEST, ROOT, Recipe, Said
from tests.harness.scheduler_process import audit

RECIPES = recipes.read()

SHORT = (16, 17, 33, 36)  # drafts, none, a refusal; the classes of their models are quickly loaded

VERSIONS = [INSTALLED, pytest.param(NEWEST, marks=pytest.mark.thorough)]


def test_every_recipe_has_a_file():
    assert list(RECIPES) == list(range(1, 37))


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


def check_changed(recipe: Recipe, said: Said, version: str) -> None:
    assert recipes.verdict(recipe.changed, said, version).hits, f"{recipe.change}, and it does not hit: {said}"


@pytest.mark.parametrize("version", VERSIONS)
def test_some_recipes_get_the_verdicts_of_their_files(version):
    wanted = [RECIPES[number] for number in SHORT]
    for recipe, said in zip(wanted, recipes.explained(wanted, version), strict=True):
        check(recipe, said, version)


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
    if RECIPES[number].without:
        check_changed(RECIPES[number], changed[number], version)


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
    wanted = {"seeds": [1], "chats": 40, "cores": CORES[name][share], "answers": ANSWERS, "shared": SHARED}
    model = generated_model(print, mtp=name == "draft")
    if version == INSTALLED:
        found = audit(name, model, **wanted)
    else:
        found = versions.run(versions.source_of(version), "audit", name, str(model), json.dumps(wanted))
    for audited in found:
        assert name != "draft" or draft_cores.faults(audited) == []
        assert audited["errors"] == [] and audited["hit_tokens"] > 400
