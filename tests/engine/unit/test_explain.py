"""What states cost in real models: computed here from the published figures, by vLLM, and by `--explain`."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Mapping

import pytest

from engine_patches import families
from engine_patches.commands import worker
from engine_patches.commands.explain import GIB, StateCost, advice, report
from engine_patches.commands.model_layers import CannotExplain, is_hybrid, layer_kinds, recurrent_layers
from engine_patches.kv_connectors import decide_by
from engine_patches.scheduler.refusals import Refusal
from tests.harness import published_models, recipe_models
from tests.harness.published_models import MODELS, Explained, worth_moving
from tests.harness.recipe_models import NOT_SERVED, RECIPES, Recipe


@pytest.fixture(scope="module")
def explained() -> dict[str, Explained]:
    return published_models.explained()


@pytest.mark.parametrize("name", MODELS)
def test_bytes_and_blocks_are_those_of_the_published_figures_and_of_vllm(explained, name):
    model, (cost, blocks, text, newest_runner) = MODELS[name], explained[name]
    assert newest_runner  # as on a GPU, which this machine has not
    page = 2 * model.convolution + model.state_bytes * model.state
    assert (cost.recurrent_layers, cost.attention_layers) == (model.recurrent, model.attention)
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


def cost(**changes: object) -> StateCost:
    figures = {
        "model": "toy",
        "architecture": "ToyForCausalLM",
        "layers": {families.MAMBA2_MIXER: 4},
        "attention_layers": 2,
        "state_types": ("bfloat16", "float32"),
        "kv_type": "bfloat16",
        "state_bytes": 100,
        "state_blocks": 2,
        "block_bytes": 60,
        "block_tokens": 32,
        "attention_groups": 1,
        "match_unit": 16,
    }
    return StateCost(**figures | changes)


def test_states_are_counted_in_whole_blocks_and_their_share_in_blocks_too():
    toy = cost()
    assert toy.bytes_in_cache == 120 and toy.displaced_tokens == 64
    assert toy.states_in(60 * 7 + 59) == 3 and toy.states_in(60 * 7, 0.5) == 1
    assert toy.tokens_in(60 * 7 + 59) == 7 * 32


def test_a_state_is_worth_moving_once_its_tokens_take_longer_than_its_bytes():
    toy = cost()  # 120 bytes of states, 60 a block of 32 tokens
    assert worth_moving(toy, 180.0, 1 / 20) == 32  # 20 tokens take a second, and whole match units are kept
    assert worth_moving(toy, 180.0, 1 / 16) == 16
    assert worth_moving(toy, 60.0, 1 / 20) == 128  # the states and four blocks: 6 s, of 6.4; with three 5 s, of 4.8
    assert worth_moving(toy, 1.0, 1e-3) is None  # a block takes longer to move than its tokens to compute


def test_the_documented_table_is_that_of_the_models(explained):
    text = published_models.DOCUMENT.read_text()
    assert published_models.BEGIN in text
    costs = {name: each.cost for name, each in explained.items()}
    assert text == published_models.with_table(text, costs), "run: python -m tests.harness.published_models"


def test_what_is_not_known_is_said():
    (line,) = [line for line in report(cost(), None, 0.5) if "  cache  " in line]
    assert "for example" in line and "--kv-cache-memory-bytes" in line
    (line,) = [line for line in report(cost(), (5 * GIB, "as configured"), 0.5) if "  cache  " in line]
    assert "5.0 GiB (as configured)" in line


def test_drafts_and_a_refusal_of_hints_are_told():
    lines = list(report(cost(), None, 0.5, drafts="mtp, 2 tokens", refusal=Refusal("speculative", "a window")))
    assert "  drafts            mtp, 2 tokens" in lines and "  hints             refused: a window" in lines
    assert not any("drafts" in line or "refused" in line for line in report(cost(), None, 0.5))


TWO_KINDS = {families.QWEN_GDN: 36, families.QWEN_NGRAM: 1}


@pytest.mark.parametrize(
    ("changes", "layers", "states"),
    [
        ({}, "4 recurrent (Mamba2), 2 attention", "inside the pass (shown on an engine)"),
        ({"inside": False}, "4 recurrent (Mamba2), 2 attention", "cut: a pass for each (shown on an engine)"),
        (
            {"layers": TWO_KINDS},
            "36 recurrent (gated delta net), 1 recurrent (convolution of n-grams), 2 attention",
            "inside the pass (shown in the interpreter of a GPU's kernels)",
        ),
        (
            {"layers": {families.MAMBA_MIXER: 28}, "inside": False},
            "28 recurrent (Mamba1), 2 attention",
            "cut: a pass for each (read, and nothing ran)",
        ),
    ],
)
def test_it_is_told_how_states_are_written_and_how_that_was_shown(changes, layers, states):
    lines = list(report(cost(**changes), None, 0.5))
    assert "  architecture      ToyForCausalLM" in lines
    assert f"  layers            {layers}" in lines and f"  states            {states}" in lines
    assert any("cost a pass each" in line for line in lines) == states.startswith("cut")


def test_beside_a_connector_that_has_to_leave_blocks_alone_states_are_cut():
    said = rows("\n".join(report(cost(), None, 0.5, decide_by({"kv_connector": "Unheard"}))))
    assert said["states"] == "cut: a pass for each (shown on an engine)"


def test_what_the_numbers_leave_out_is_said():
    assert "  * more than this" in list(report(cost(notes=("more than this",)), None, 0.5))


@pytest.mark.parametrize(
    ("changes", "kept", "said"),
    [
        ({}, 100, ""),
        ({"state_types": ("bfloat16", "bfloat16")}, 100, "--mamba-ssm-cache-dtype float32"),
        ({"layers": TWO_KINDS, "state_types": ("bfloat16", "bfloat16")}, 100, "--mamba-ssm-cache-dtype float32"),
        ({"layers": {families.SHORT_CONVOLUTION: 4}, "state_types": ("bfloat16",)}, 100, ""),  # inputs, not rounded
        ({"layers": {families.LINEAR_ATTENTION: 4}, "inside": False}, 100, "a pass each"),
        ({}, 3, "room for 3 states"),
    ],
)
def test_the_advice_fits_the_family_and_the_types(changes, kept, said):
    lines = list(advice(cost(**changes), kept))
    assert len(lines) == bool(said) and said in "".join(lines)


class Config:
    """A model's text config."""

    def __init__(self, model_type: str, **given: object) -> None:
        self.model_type = model_type
        vars(self).update(given)


def test_a_config_of_an_unknown_kind_is_refused_in_one_sentence():
    with pytest.raises(CannotExplain, match="does not say which of its layers"):
        layer_kinds(Config("toy"))
    with pytest.raises(CannotExplain, match="sliding_attention"):
        layer_kinds(Config("toy", layer_types=["sliding_attention", "mamba"]))
    with pytest.raises(CannotExplain, match="not known here"):
        recurrent_layers(Config("toy"), ["mamba", "attention"])


def test_layers_are_counted_by_what_the_configs_of_each_family_say():
    ling = Config("bailing_hybrid", layer_group_size=3, num_hidden_layers=8, short_conv_kernel_size=4)
    kinds = layer_kinds(ling)
    assert [number for number, kind in enumerate(kinds) if kind == "attention"] == [2, 5, 6, 7]
    assert recurrent_layers(ling, kinds) == {families.LING_KDA: 4}
    kimi = Config("kimi_linear", linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4]})
    assert recurrent_layers(kimi, layer_kinds(kimi)) == {families.KIMI_KDA: 3}
    indexed = ["linear_attention", "linear_attention", "indexed_attention"]
    flash = Config("qwen4_exp_text", layer_types=indexed, ple_layer_ids=[2])
    assert recurrent_layers(flash, layer_kinds(flash)) == {families.QWEN_GDN: 2, families.QWEN_NGRAM: 1}
    without = Config("qwen4_exp_text", layer_types=indexed, ple_layer_ids=[])
    assert recurrent_layers(without, indexed) == {families.QWEN_GDN: 2}
    assert not recurrent_layers(Config("llama"), ["full_attention"])


@pytest.mark.parametrize("name", recipe_models.MODELS)
def test_a_recipe_s_model_is_known_for_a_hybrid_by_its_config_alone(name):
    assert is_hybrid(recipe_models.MODELS[name])


def test_a_model_of_attention_alone_is_no_hybrid():
    dense = {"model_type": "granitemoehybrid", "mamba_n_heads": 48, "num_attention_heads": 16}
    assert not is_hybrid(dense | {"layer_types": ["attention"] * 4})
    assert is_hybrid(dense | {"layer_types": ["mamba", "attention"]})
    assert not is_hybrid({"model_type": "llama", "num_attention_heads": 16})


def rows(text: str) -> Mapping[str, str]:
    """What is said, by the name of its line."""
    return {line[2:20].strip(): line[20:] for line in text.splitlines() if line.startswith("  ")}


def check(recipe: Recipe, standing: str, at_once: str) -> None:
    """Whether what is said of a recipe, as it stands and without a trial, is what the table has."""
    if recipe.states == NOT_SERVED:
        assert standing.startswith("cannot: ") and "lmcache" in standing
        return
    trial = "on trial at first" if recipe.drafts else ""
    for text, words in ((standing, recipe.refused or trial), (at_once, recipe.refused)):
        said = rows(text)
        assert said["states"] == recipe.states, text
        assert said["architecture"] in recipe_models.MODELS[recipe.model]["architectures"]
        assert said.get("hints", "").startswith("refused: " if recipe.refused else ""), text
        assert words in said.get("hints", "") and ("hints" in said) == bool(words)
        assert ("packs a token's row" in text) == any("_ds_mla" in flag for flag in recipe.flags)
    chunk = 64 if "KDA" in rows(at_once)["layers"] else 16
    if not recipe.refused:  # matched as finely as the recipe's blocks admit
        assert int(rows(at_once)["match unit"].split()[0].replace(",", "")) % chunk == 0


SHORT = (16, 17, 36)  # the models of the documented table, whose classes are loaded there, too


def test_what_is_said_of_two_recipes_models_is_what_their_layers_can():
    recipes = [*(RECIPES[number] for number in SHORT), recipe_models.NOT_TRIED]
    for recipe, said in zip(recipes, recipe_models.explained(recipes), strict=True):
        check(recipe, *said)


@pytest.fixture(scope="module")
def of_recipes() -> Mapping[int, tuple[str, str]]:
    return dict(zip(RECIPES, recipe_models.explained(list(RECIPES.values())), strict=True))


@pytest.mark.thorough  # vLLM inspects the class of each model in a process
@pytest.mark.parametrize("number", RECIPES)
def test_what_is_said_of_a_recipe_s_model_is_what_its_layers_can(of_recipes, number):
    check(RECIPES[number], *of_recipes[number])


@pytest.mark.parametrize("number", [number for number, recipe in RECIPES.items() if recipe.states == NOT_SERVED])
def test_a_recipe_that_vllm_cannot_serve_is_told_before_vllm_is_asked(tmp_path, number):
    recipe = RECIPES[number]
    recipe_models.write_models(tmp_path, [recipe.model])
    refusal = worker.refusal(str(tmp_path / recipe.model), recipe.flags_in(tmp_path))
    assert refusal is not None and recipe.connector in refusal


def test_a_model_that_vllm_does_not_know_gets_one_sentence_and_nothing_is_started(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of", "architectures": ["Nobody"]}))
    command = [sys.executable, "-m", "engine_patches", "worker", "--explain", "--model", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("seamark worker: vLLM cannot configure") and "unheard_of" in line


@pytest.mark.thorough  # vLLM inspects the class in a process
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="nothing is missing here")
def test_a_library_that_a_model_s_class_lacks_is_named_in_one_sentence(tmp_path):
    recipe_models.write_models(tmp_path, ["Qwen3.6-27B"])
    command = [sys.executable, "-m", "engine_patches", "worker", "--explain", "gpu", str(tmp_path / "Qwen3.6-27B")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    line = done.stderr.splitlines()[-1]
    assert line.startswith("seamark worker: vLLM cannot configure")
    assert line.endswith("its class Qwen3_5ForConditionalGeneration needs torchvision, which is not installed here")
