"""What `seamark setup`, `--explain` and the table of families say of models is what vLLM makes of them."""

from __future__ import annotations

import importlib.util
import json
import math
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.envs import environment_variables

from engine_patches import kv_connectors, settings, speculation
from engine_patches.commands.explain import GIB, unserved_stages
from engine_patches.families import layers_in
from engine_patches.kv_connectors import ConnectorLane
from proxy.bench.harness.servers import NEMOTRON_H, QWEN3_NEXT, generated_model
from proxy.commands import families as known
from proxy.commands import outlook, versions
from proxy.commands.recipe_reader import read_recipe
from tests.harness import families, flags_parser, pools, recipe_models, recipes
from tests.harness.families import CHOSEN, DOCUMENT, VERSION, Source
from tests.harness.recipe_models import CONFIGS, MODELS, PUBLISHED, Explained, write_models
from tests.harness.scheduler_process import run_apart
from tests.harness.versions import source_of

RECIPES = recipes.read()


@pytest.mark.parametrize("number", RECIPES)
def test_a_recipe_is_judged_as_by_the_plugin_that_is_given_its_configuration(number, tmp_path):
    recipe = RECIPES[number]
    line = shlex.join(["vllm", "serve", recipe.model, *recipe.flags_in(tmp_path)])
    seen = outlook.outlook(read_recipe(line, lambda name: None), recipes.NEWEST)
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
    assert (versions.SUPPORTED, versions.IMAGE) == (settings.SUPPORTED, settings.IMAGE)
    first_and_last = [f"{major}.{minor}" for major, minor in (versions.FIRST, versions.LAST)]
    assert " to ".join(first_and_last) == versions.SUPPORTED


def test_flags_and_variables_that_went_or_are_a_fork_s_are_unknown_to_vllm_and_those_in_their_place_are_not():
    known_flags = flags_parser.parser()._option_string_actions
    taken_away = {*outlook.DROPPED} - {"--mamba-cache-mode", "--no-enable-prefix-caching"}  # which vLLM still has
    flags = [sign for sign in versions.FORK_SIGNS if sign.startswith("--") and " " not in sign]
    went = [*taken_away, *flags, *(name for name in outlook.REPLACED if name.startswith("--"))]
    assert not [flag for flag in went if flag in known_flags]
    assert not [name for name in outlook.REPLACED if name in environment_variables]
    assert {flag.partition(".")[0] for flag in outlook.REPLACED.values()} <= known_flags.keys()


@pytest.mark.parametrize("name", [*MODELS, *(f"published {name}" for name in CONFIGS)])
def test_a_family_is_that_of_the_layers_which_the_plugin_finds_in_the_config(name, tmp_path):
    config = CONFIGS[name.partition(" ")[2]] if " " in name else MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, layers = known.family_of(str(tmp_path)).family, layers_in(config.get("text_config", config))
    assert found is not None and found.inside == bool(layers[0].core)
    by_name = known.family_of(name).family
    assert by_name in (None, found)
    kinds = {"gated delta nets": "gated delta net", "short convolutions": "short convolution"}
    assert kinds.get(found.states.partition(" and ")[0], found.states) == layers[0].kind.name


@pytest.fixture(scope="module")
def explained() -> dict[str, Explained]:
    return recipe_models.explained()


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_and_blocks_are_those_of_the_published_figures_and_of_vllm(explained, name):
    model, (cost, blocks, text, newest_runner) = PUBLISHED[name], explained[name]
    assert newest_runner  # as on a GPU, which this machine has not
    page = 2 * model.convolution + model.state_bytes * model.state
    assert (sum(cost.layers.values()), cost.attention_layers) == (model.recurrent, model.attention)
    assert cost.state_bytes == model.recurrent * page
    # A block is as long as its KV needs to be as large as a layer's state, and cache groups are as large as the smaller
    # kind has layers.
    tokens = math.ceil(page / (model.step * model.kv)) * model.step
    layers = min(model.recurrent, model.attention)
    assert cost.block_tokens == tokens and cost.block_bytes == layers * tokens * model.kv
    assert cost.state_blocks == math.ceil(model.recurrent / layers) and cost.attention_groups == 1
    assert cost.displaced_tokens == cost.state_blocks * tokens
    assert blocks == 64 * GIB // cost.block_bytes
    assert cost.states_in(64 * GIB) == blocks // cost.state_blocks
    assert f"{cost.displaced_tokens:,} tokens of KV" in text


def test_the_documented_pools_of_a_spark_are_those_that_are_reckoned(explained):
    text = pools.DOCUMENT.read_text()
    assert text == pools.with_table(text, pools.table(explained)), "run: python -m tests.harness.pools"


STAGES = [("6,2", "1 (layers 6 to 7) has no recurrent"), ("3,5", "0 (layers 0 to 2) has no attention"), ("5,3", "")]


@pytest.mark.parametrize(("dealt", "told"), STAGES)
def test_a_pipeline_stage_without_one_of_both_kinds_of_layers_is_told(dealt, told, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", dealt)
    cache, parallel = SimpleNamespace(mamba_cache_mode="align"), SimpleNamespace(pipeline_parallel_size=2)
    kinds = ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "attention", "mlp"]
    said = [*unserved_stages(SimpleNamespace(cache_config=cache, parallel_config=parallel), kinds)]
    assert len(said) == bool(told) and told in "".join(said)


POOLS = [
    *((NEMOTRON_H, "--max-model-len 8192"), (QWEN3_NEXT, "--max-model-len 8192")),
    *((family, "--no-enable-prefix-caching --max-model-len 8192") for family in (NEMOTRON_H, QWEN3_NEXT)),
    (NEMOTRON_H, "--block-size 512 --mamba-ssm-cache-dtype float16 --max-model-len 8192"),
    (NEMOTRON_H, "--tensor-parallel-size 2 --max-model-len 8192"),
    (NEMOTRON_H, "--max-model-len -1 --num-gpu-blocks-override 40"),
    (QWEN3_NEXT, "--num-gpu-blocks-override 29 --max-model-len 8192"),  # for just one request
    (QWEN3_NEXT, "--num-gpu-blocks-override 28 --max-model-len 8192"),
    (NEMOTRON_H, "--num-gpu-blocks-override 60"),
]


@pytest.mark.thorough  # starts cores
def test_a_pool_that_is_reckoned_is_that_of_a_core_with_the_model_s_own_layers():
    given = [[str(generated_model(print, family)), *flags.split()] for family, flags in POOLS]
    told = run_apart("measured_pools", json.dumps(given), "start")
    for flags, (reckoned, fits, measured) in zip(POOLS, told, strict=True):
        print(*flags, reckoned, fits, measured)
        assert f"maximum model length is {fits}." in measured if fits else measured == reckoned
    assert [bool(fits) for _, fits, _ in told] == [False] * 8 + [True] * 2


@pytest.mark.thorough  # vLLM inspects the class in a process
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="nothing is missing here")
def test_a_library_that_a_model_s_class_lacks_is_named_in_one_sentence(tmp_path):
    write_models(tmp_path, ["Qwen3.6-27B"])
    command = [sys.executable, "-m", "engine_patches", "worker", "--explain", "gpu", str(tmp_path / "Qwen3.6-27B")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("seamark worker: vLLM cannot configure")
    assert line.endswith("its class Qwen3_5ForConditionalGeneration needs torchvision, which is not installed here")


@pytest.mark.thorough  # reads the Python source of another vLLM
def test_the_documented_table_is_that_of_the_source():
    text = DOCUMENT.read_text()
    assert text == families.with_table(text, families.generated()), "run: python -m tests.harness.families"


@pytest.mark.thorough  # reads the Python source of another vLLM
def test_the_layers_that_a_recipe_s_config_tells_are_those_that_vllm_makes_of_it():
    source = Source(source_of(VERSION))
    registered = source.models()
    for name, config in MODELS.items():
        (architecture,) = config["architectures"]
        chosen = CHOSEN.get(architecture)
        made = {source.named(layer) for layer in source.recurrent_layers(registered[architecture])}
        told = set(layers_in(config.get("text_config", config)))
        assert told == ({chosen} if chosen is not None else made), name
