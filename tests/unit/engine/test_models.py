"""Which layers a model has, as its config tells, by what each family says of itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import families
from engine_patches.commands import model_layers
from engine_patches.commands.model_layers import CannotExplain, is_hybrid, layer_kinds, recurrent_layers

KIMI = {"model_type": "kimi_linear"}


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "qwen3_next"}, (families.QWEN_GDN,)),
        ({"model_type": "qwen4_exp_text"}, (families.QWEN_GDN, families.QWEN_NGRAM)),
        (KIMI, (families.KIMI_KDA,)),
        ({**KIMI, "linear_attn_config": {"use_full_rank_gate": False}}, (families.KIMI_KDA,)),
        ({**KIMI, "linear_attn_config": {"use_full_rank_gate": True}}, (families.K3_KDA,)),
        ({"model_type": "of_somebody", "linear_attn_config": {"kda_layers": [1]}}, (families.KIMI_KDA,)),
        ({"model_type": "bailing", "short_conv_kernel_size": 4, "layer_group_size": 4}, (families.LING_KDA,)),
        ({"model_type": "bailing", "layer_group_size": 4}, (families.LINEAR_ATTENTION,)),
        ({"linear_num_value_heads": 4}, (families.QWEN_GDN,)),
        ({"conv_L_cache": 3}, (families.SHORT_CONVOLUTION,)),
        ({"mamba_dt_rank": 3}, (families.MAMBA_MIXER,)),
        ({"mamba_num_heads": 3}, (families.MAMBA2_MIXER,)),
        ({"model_type": "llama", "mamba_num_heads": 0}, ()),
        ({}, ()),
    ],
)
def test_a_config_names_the_layers_by_its_type_or_by_what_only_their_kind_has(config, layers):
    assert families.layers_in(config) == layers == families.layers_in(SimpleNamespace(**config))
    assert families.kinds_in(config) == tuple(layer.kind for layer in layers) and families.compression_in(config) == 1


def config(model_type: str = "toy", **given: Any) -> SimpleNamespace:
    """A model's text config."""
    return SimpleNamespace(model_type=model_type, **given)


LINEAR, ATTENTION = "linear_attention", "attention"


@pytest.mark.parametrize(
    ("of_model", "kinds"),
    [
        (config(layers_block_type=["mamba", "attention", "mlp"], layer_types=["conv"]), ["mamba", "attention", "mlp"]),
        (config(layer_types=["conv", "full_attention"]), ["conv", "full_attention"]),
        (config(linear_attn_config={"kda_layers": [1, 3], "full_attn_layers": [2]}), [LINEAR, LINEAR, ATTENTION]),
        (config(linear_attn_config={}, layer_types=["kda"]), ["kda"]),
        (config(layer_group_size=3, num_hidden_layers=8), [LINEAR, LINEAR, ATTENTION] * 2 + [ATTENTION] * 2),
        (config(layer_group_size=3, num_hidden_layers=3, layer_types=["hybrid"]), ["hybrid"]),
        *(
            (config(layer_types=[kind]), [kind])
            for kind in sorted(model_layers.RECURRENT | model_layers.ATTENTION | model_layers.WITHOUT_CACHE)
        ),
    ],
)
def test_the_kind_of_each_layer_is_told_in_the_words_of_its_family(of_model, kinds):
    assert list(layer_kinds(of_model)) == kinds


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "the config of toy does not say which of its layers are recurrent"),
        ({"layer_types": []}, "does not say"),
        ({"layer_types": ["sliding_attention", "mamba", "a"]}, r"kind a, sliding_attention are not known here \(toy\)"),
        ({"layer_types": ["mamba", "attention"]}, "the recurrent layers of toy are of a kind that is not known here"),
    ],
)
def test_a_config_of_an_unknown_kind_is_refused_in_one_sentence(given, said):
    with pytest.raises(CannotExplain, match=said):
        recurrent_layers(config(), layer_kinds(config(**given)))


@pytest.mark.parametrize(
    ("of_model", "kinds", "layers"),
    [
        (config("kimi_linear"), [LINEAR] * 3 + [ATTENTION], {families.KIMI_KDA: 3}),
        (
            config("qwen4_exp_text", ple_layer_ids=[2]),
            [LINEAR, LINEAR, "moe"],
            {families.QWEN_GDN: 2, families.QWEN_NGRAM: 1},
        ),
        (config("qwen4_exp_text", ple_layer_ids=[]), [LINEAR, LINEAR], {families.QWEN_GDN: 2}),
        (config("falcon_h1", mamba_n_heads=4), ["hybrid"] * 3, {families.MAMBA2_MIXER: 3}),
    ],
)
def test_layers_are_counted_by_their_class(of_model, kinds, layers):
    assert recurrent_layers(of_model, kinds) == layers


DENSE = {"model_type": "granitemoehybrid", "mamba_n_heads": 48, "num_attention_heads": 16}

NEMOTRON = {"model_type": "nemotron_h"}


@pytest.mark.parametrize(
    ("told", "hybrid"),
    [
        ({**DENSE, "layer_types": ["attention"] * 4}, False),
        ({**DENSE, "layer_types": ["mamba", "attention"]}, True),
        ({**DENSE, "layers_block_type": ["mamba", "attention"], "layer_types": ["attention"]}, True),
        ({"model_type": "gemma3", "text_config": {"layer_types": ["sliding_attention", "full_attention"]}}, False),
        ({"model_type": "qwen3_next", "layer_types": ["full_attention"]}, True),  # of nothing else
        ({"model_type": "x", "text_config": {"model_type": "qwen3_next"}}, True),
        ({"model_type": "qwen3_next", "text_config": {"model_type": "llama"}}, False),
        ({**NEMOTRON, "hybrid_override_pattern": "M-M*"}, True),
        ({**NEMOTRON, "hybrid_override_pattern": "M-M-"}, False),
        ({"model_type": "x", "mamba_d_state": 16, "num_attention_heads": 16}, True),
        ({}, False),
    ],
)
def test_a_hybrid_has_recurrent_layers_beside_attention(told, hybrid):
    assert is_hybrid(told) is hybrid
