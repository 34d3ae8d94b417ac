"""What `seamark setup` says of a recipe by its name is what the plugin has for that family, and says of that recipe."""

from __future__ import annotations

import inspect
import math
import shlex

import pytest

from engine_patches import families, kv_connectors, settings, speculation
from engine_patches.kv_connectors import ConnectorLane
from engine_patches.scheduler import match_unit
from proxy.commands import outlook
from proxy.commands.recipe import read_recipe
from tests.harness import recipes
from tests.harness.recipe_models import MODELS

# Text configs by a part of a name, for families that no recipe of `recipe_models` has.
OTHERS = {
    "qwen3-next": {"model_type": "qwen3_next"},
    "olmo-hybrid": {"model_type": "olmo_hybrid"},
    "kimi-k3": {"model_type": "kimi_k3"},
    "granite-4": {"mamba_n_heads": 1},
    "jamba": {"mamba_dt_rank": 1},
    "ling-2.5": {"layer_group_size": 8},
}

RECIPES = recipes.read()

CONFIGS = {**{name: config.get("text_config", config) for name, config in MODELS.items()}, **OTHERS}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_is_said_to_do_what_its_layers_do(name):
    family, layers = outlook.family_of(f"some/{name}-NVFP4"), families.layers_in(CONFIGS[name])
    assert family is not None and layers
    assert family.inside == all(layer.core for layer in layers)
    assert family.beside_drafts == all(layer.beside_drafts for layer in layers)
    chunks = (layer.kind.chunk for layer in layers)
    assert family.unit == math.lcm(match_unit.DEFAULT, families.compression_in(CONFIGS[name]), *chunks)


def test_a_family_that_is_not_looked_at_here_is_none():
    looked_at = {outlook.family_of(name) for name in CONFIGS}
    assert looked_at == set(outlook.FAMILIES)


@pytest.mark.parametrize("number", RECIPES)
def test_a_recipe_is_judged_as_by_the_plugin_that_is_given_its_configuration(number, tmp_path):
    recipe = RECIPES[number]
    line = shlex.join(["vllm", "serve", recipe.model, *recipe.flags_in(tmp_path)])
    seen = outlook.outlook(read_recipe(line, lambda name: None))
    told = recipe.expects(recipes.NEWEST).words
    if told.startswith("does not start"):
        assert seen.hits is False and "serves no hybrid" in seen.verdict
    else:
        assert seen.hits == told.startswith("hits"), seen
        assert not seen.hits or "inside the pass" in seen.verdict


def test_methods_connectors_and_versions_are_the_plugins():
    assert outlook.METHODS == speculation.METHODS
    lanes = kv_connectors.CONNECTORS.items()
    assert set(outlook.NOT_SERVED) == {name for name, lane in lanes if lane is ConnectorLane.NOT_SERVED}
    assert (outlook.SUPPORTED, outlook.IMAGE) == (settings.SUPPORTED, settings.IMAGE)
    versions = [f"{major}.{minor}" for major, minor in (outlook.FIRST, outlook.LAST)]
    assert " to ".join(versions) == outlook.SUPPORTED


def test_a_flag_that_is_taken_away_is_one_that_vllm_has_dropped_or_is_about_to():
    from vllm.engine.arg_utils import EngineArgs

    known = inspect.getsource(EngineArgs)
    assert all(flag in known for flag in outlook.DROPPED)  # of 0.32, which has them still: no other's are misspelt
