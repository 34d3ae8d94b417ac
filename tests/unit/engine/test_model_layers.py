"""Which layers a model has, by what the configs of each family say."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine_patches import families
from engine_patches.commands import model_layers
from engine_patches.commands.model_layers import (
    CannotExplain,
    StateOf,
    is_hybrid,
    layer_kinds,
    recurrent_layers,
    why_not_imported,
)


class Config:
    """A model's text config."""

    def __init__(self, model_type: str = "toy", **given: object) -> None:
        self.model_type = model_type
        vars(self).update(given)


LINEAR, ATTENTION = "linear_attention", "attention"


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (Config(layers_block_type=["mamba", "attention", "mlp"]), ["mamba", "attention", "mlp"]),
        (Config(layer_types=["conv", "full_attention"]), ["conv", "full_attention"]),
        (Config(layers_block_type=["mamba"], layer_types=["conv"]), ["mamba"]),
        (Config(linear_attn_config={"kda_layers": [1, 3], "full_attn_layers": [2]}), [LINEAR, LINEAR, ATTENTION]),
        (Config(linear_attn_config={}, layer_types=["kda"]), ["kda"]),
        (Config(layer_group_size=3, num_hidden_layers=6), [LINEAR, LINEAR, ATTENTION] * 2),
        (Config(layer_group_size=3, num_hidden_layers=8), [LINEAR, LINEAR, ATTENTION] * 2 + [ATTENTION] * 2),
        (Config(layer_group_size=3, num_hidden_layers=2), [ATTENTION] * 2),
        (Config(layer_group_size=3, num_hidden_layers=3, layer_types=["hybrid"]), ["hybrid"]),
    ],
)
def test_the_kind_of_each_layer_is_told_in_the_words_of_its_family(config, kinds):
    assert list(layer_kinds(config)) == kinds


@pytest.mark.parametrize("kind", sorted(model_layers.RECURRENT | model_layers.ATTENTION | model_layers.WITHOUT_CACHE))
def test_each_kind_that_is_known_is_taken(kind):
    assert layer_kinds(Config(layer_types=[kind])) == [kind]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config(), "the config of toy does not say which of its layers are recurrent"),
        (Config(layer_types=[]), "does not say"),
        (
            Config(layer_types=["sliding_attention", "mamba", "a"]),
            r"kind a, sliding_attention are not known here \(toy\)",
        ),
    ],
)
def test_a_config_of_an_unknown_kind_is_refused_in_one_sentence(config, said):
    with pytest.raises(CannotExplain, match=said):
        layer_kinds(config)


INDEXED = [LINEAR, LINEAR, "indexed_attention"]


@pytest.mark.parametrize(
    ("config", "kinds", "layers"),
    [
        (
            Config("bailing_hybrid", layer_group_size=3, num_hidden_layers=8, short_conv_kernel_size=4),
            None,
            {families.LING_KDA: 4},
        ),
        (
            Config("kimi_linear", linear_attn_config={"kda_layers": [1, 2, 3], "full_attn_layers": [4]}),
            None,
            {families.KIMI_KDA: 3},
        ),
        (Config("qwen4_exp_text", ple_layer_ids=[2]), INDEXED, {families.QWEN_GDN: 2, families.QWEN_NGRAM: 1}),
        (Config("qwen4_exp_text", ple_layer_ids=[]), INDEXED, {families.QWEN_GDN: 2}),
        (Config("falcon_h1", mamba_n_heads=4), ["hybrid"] * 3, {families.MAMBA2_MIXER: 3}),
        (Config("llama"), ["full_attention"], {}),
        (Config("qwen3_next"), ["full_attention", "moe"], {}),
    ],
)
def test_layers_are_counted_by_their_class(config, kinds, layers):
    assert recurrent_layers(config, layer_kinds(config) if kinds is None else kinds) == layers


def test_recurrent_layers_of_no_known_class_are_refused():
    with pytest.raises(CannotExplain, match="the recurrent layers of toy are of a kind that is not known here"):
        recurrent_layers(Config(), ["mamba", "attention"])


DENSE = {"model_type": "granitemoehybrid", "mamba_n_heads": 48, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        ({**DENSE, "layer_types": ["attention"] * 4}, False),
        ({**DENSE, "layer_types": ["mamba"] * 4}, False),
        ({**DENSE, "layer_types": ["mamba", "attention"]}, True),
        ({**DENSE, "layers_block_type": ["mamba", "attention"], "layer_types": ["attention"]}, True),
        ({"model_type": "llama", "num_attention_heads": 16}, False),
        ({"model_type": "qwen3_next", "layer_types": ["full_attention"]}, True),  # of nothing else
        ({"model_type": "kimi_linear"}, True),
        ({"model_type": "x", "text_config": {"model_type": "qwen3_next"}}, True),
        ({"model_type": "qwen3_next", "text_config": {"model_type": "llama"}}, False),
        ({"model_type": "qwen3_next", "text_config": None}, True),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, True),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M-"}, False),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "**"}, False),
        ({"model_type": "x", "conv_L_cache": 3}, True),
        ({"model_type": "x", "mamba_d_state": 16, "num_attention_heads": 16}, True),
        ({"model_type": "x", "mamba_d_state": 16}, False),
        ({"model_type": "x", "mamba": 16, "num_attention_heads": 16}, False),
        ({}, False),
    ],
)
def test_a_hybrid_has_recurrent_layers_beside_attention(config, hybrid):
    assert is_hybrid(config) is hybrid


def test_the_state_of_each_kind_of_layer_is_what_the_models_class_says():
    class Older:
        get_mamba_state_shape_from_config = staticmethod(lambda config: ("shapes", config))
        get_mamba_state_dtype_from_config = staticmethod(lambda config: ("types", config))

    assert model_layers._states_of(Older, 1) == [StateOf(("shapes", 1), ("types", 1), False)]
    specs = [SimpleNamespace(shapes=n, dtypes=-n, tp_replicated=n == 2) for n in (1, 2)]
    newer = SimpleNamespace(get_mamba_specs_from_config=lambda config: specs)
    assert model_layers._states_of(newer, 1) == [StateOf(1, -1, False), StateOf(2, -2, True)]


def test_what_is_missing_for_a_models_class_is_named(monkeypatch):
    def fails(error: Exception) -> SimpleNamespace:
        def load() -> Any:
            raise error

        return SimpleNamespace(load_model_cls=load)

    module: Any = ModuleType("vllm.model_executor.models")
    found = {
        "Fine": SimpleNamespace(load_model_cls=lambda: object),
        "Lacking": fails(ModuleNotFoundError("x", name="torchvision")),
        "Odd": fails(RuntimeError(" no device\nmore")),
    }
    module.ModelRegistry = SimpleNamespace(models=found)
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models", module)
    assert why_not_imported("Model architectures ['Fine', 'Nobody'] failed") == ""
    said = why_not_imported("Model architectures ['Fine', 'Nobody', 'Lacking', 'Odd'] failed")
    assert said == "its class Lacking needs torchvision, which is not installed here"
    assert why_not_imported("['Odd']") == "its class Odd cannot be imported: no device"
