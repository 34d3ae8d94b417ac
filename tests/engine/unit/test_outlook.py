"""What `seamark setup` says of a recipe by its name is what the plugin has for that family, and says of that recipe."""

from __future__ import annotations

import shlex

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from engine_patches import kv_connectors, settings, speculation
from engine_patches.kv_connectors import ConnectorLane
from proxy.commands import outlook
from proxy.commands.recipe import read_recipe
from tests.harness import recipes

RECIPES = recipes.read()


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
    assert kv_connectors.CONNECTORS.keys() <= KVConnectorFactory._registry.keys(), "vLLM has them"
    assert outlook.METHODS == speculation.METHODS
    lanes = kv_connectors.CONNECTORS.items()
    assert set(outlook.NOT_SERVED) == {name for name, lane in lanes if lane is ConnectorLane.NOT_SERVED}
    assert (outlook.SUPPORTED, outlook.IMAGE) == (settings.SUPPORTED, settings.IMAGE)
    versions = [f"{major}.{minor}" for major, minor in (outlook.FIRST, outlook.LAST)]
    assert " to ".join(versions) == outlook.SUPPORTED
