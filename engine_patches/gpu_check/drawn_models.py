"""Tiny models of families that vLLM alone can run: their configurations, and weights that the engine's process draws.

transformers cannot write them as vLLM loads them. vLLM starts them without weights (`--load-format dummy`), whose usual
filling is too small for an answer to show a damaged state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 4096

FLASH_NEXT, KIMI_LINEAR = "qwen4_exp", "kimi_linear"

OF_BOTH: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    FLASH_NEXT: {
        **OF_BOTH,
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "num_hidden_layers": 4,
        # Its attention without the index: that one's kernels want the sizes of the published model.
        "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "ple_layer_ids": [1, 4],  # from 1
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 500,
        "split_ngram_parts": 1,
        "hc_count": 2,
        "hc_lowrank": 16,
        # One expert: between several, rounding alone would send a token elsewhere.
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "output_gate_type": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    KIMI_LINEAR: {
        **OF_BOTH,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": None,
        "first_k_dense_replace": 4,
        # Layers are counted from 1.
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "num_heads": 2,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
}


def write_config(out: Path, family: str) -> Path:
    """Write the configuration of one of `CONFIGS` into the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIGS[family], indent=2) + "\n")
    return out


def draw_weights(model: Any) -> None:
    """Fill a model of vLLM's, the same for each engine, so that its prompts and states can be told apart."""
    import torch

    with torch.no_grad():
        for number, (name, weight) in enumerate(sorted(model.named_parameters())):
            if not weight.is_floating_point():
                continue
            generator = torch.Generator().manual_seed(number)
            drawn = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                drawn = torch.rand(weight.shape, generator=generator).add(0.5).log()
            elif name.endswith("dt_bias"):
                drawn = drawn * 0.5 - 2
            elif weight.dim() == 1 and "norm" in name:
                drawn = 1 + drawn * 0.1
            else:
                wide = any(part in name for part in ("embed", "lm_head", "conv1d"))
                drawn = drawn * (0.5 if wide else 0.15)
            weight.copy_(drawn.to(weight.dtype))


def draw_in_place_of_loading() -> None:
    """Have vLLM fill models that are started without weights in this way, in this process."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: draw_weights(model)
