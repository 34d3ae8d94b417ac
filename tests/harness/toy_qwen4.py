"""A narrow Qwen3.8-Flash-Next (`qwen4_exp`): vLLM's own model class, on the model runner that it needs, V2.

Its sparse attention wants a GPU: plain attention stands for it.
"""

from __future__ import annotations

from typing import Any

NAME = "Qwen4ExpForCausalLM"


def prepare() -> None:
    """Before an engine is made."""
    from vllm import ModelRegistry
    from vllm.models.qwen4_exp.nvidia import model

    ModelRegistry.register_model(NAME, model.Qwen4ExpForCausalLM)


def config() -> dict[str, Any]:
    """Two gated delta nets with embeddings of n-grams around one layer of attention."""
    return {
        "architectures": [NAME],
        "model_type": "qwen4_exp_text",
        "vocab_size": 4096,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "mtp_num_hidden_layers": 1,
        "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 8192,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 500,
        "split_ngram_parts": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "output_gate_type": "silu",
        "tie_word_embeddings": False,
    }
