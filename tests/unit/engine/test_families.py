"""Which recurrent layers a model has, as its config tells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import families
from engine_patches.families import (
    GLM_KDA,
    INSIDE,
    K3_KDA,
    KIMI_KDA,
    LINEAR_ATTENTION,
    LING_KDA,
    MAMBA2_MIXER,
    MAMBA_MIXER,
    OLMO_GDN,
    QWEN_GDN,
    QWEN_NGRAM,
    SHORT_CONVOLUTION,
)

MODELS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"model_type": "qwen3_next"}, (QWEN_GDN,)),
    ({"model_type": "qwen3_5_moe_text"}, (QWEN_GDN,)),
    ({"model_type": "qwen4_exp_text"}, (QWEN_GDN, QWEN_NGRAM)),
    ({"model_type": "olmo_hybrid"}, (OLMO_GDN,)),
    ({"model_type": "kimi_linear"}, (KIMI_KDA,)),
    ({"model_type": "kimi_linear", "linear_attn_config": None}, (KIMI_KDA,)),
    ({"model_type": "kimi_linear", "linear_attn_config": {"use_full_rank_gate": False}}, (KIMI_KDA,)),
    ({"model_type": "kimi_linear", "linear_attn_config": {"use_full_rank_gate": True}}, (K3_KDA,)),
    ({"model_type": "glm5_next"}, (GLM_KDA,)),
    ({"model_type": "of_somebody", "linear_attn_config": {"kda_layers": [1]}}, (KIMI_KDA,)),
    ({"model_type": "bailing", "short_conv_kernel_size": 4, "layer_group_size": 4}, (LING_KDA,)),
    ({"model_type": "bailing", "layer_group_size": 4}, (LINEAR_ATTENTION,)),
    ({"linear_num_value_heads": 4}, (QWEN_GDN,)),
    ({"conv_L_cache": 3}, (SHORT_CONVOLUTION,)),
    ({"mamba_dt_rank": 3}, (MAMBA_MIXER,)),
    ({"mamba_num_heads": 3}, (MAMBA2_MIXER,)),
    ({"mamba_n_heads": 3}, (MAMBA2_MIXER,)),
    ({"model_type": "llama", "mamba_num_heads": 0}, ()),
    ({"model_type": "llama"}, ()),
    ({}, ()),
]


@pytest.mark.parametrize(("config", "layers"), MODELS, ids=str)
def test_a_config_names_the_layers_by_its_type_or_by_what_only_their_kind_has(config, layers):
    assert families.layers_in(config) == layers == families.layers_in(SimpleNamespace(**config))
    assert families.kinds_in(config) == tuple(layer.kind for layer in layers)


def test_the_chunks_that_kernels_compute_at_once_are_those_of_their_kind():
    assert {kind.name: kind.chunk for kind in families.KINDS if kind.chunk != 1} == {"gated delta net": 64, "KDA": 64}


def test_a_layers_name_is_its_classes_and_each_inside_a_pass_has_a_core():
    assert (MAMBA2_MIXER.name, SHORT_CONVOLUTION.name) == ("MambaMixer2", "ShortConv")
    assert all(layer.core for layer in INSIDE) and not any(layer.core for layer in families.CUT)
    assert [layer.name for layer in INSIDE if layer.on_rocm] == ["MambaMixer2"]
    assert {layer.name for layer in INSIDE if not layer.beside_drafts} == {OLMO_GDN.name, SHORT_CONVOLUTION.name}
