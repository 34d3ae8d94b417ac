"""A narrow Qwen3.8-Flash-Next (`qwen4_exp`): vLLM's own model class, on the model runner that it needs, V2.

Its sparse attention wants a GPU. Plain attention stands for it, and beside it, if asked for, the two caches of its
index, which vLLM allocates and manages as ever: compressed keys, and a ring of raw ones.
"""

from __future__ import annotations

from typing import Any

NAME, HEAD = "Qwen4ExpForCausalLM", "Qwen4ExpMTP"

RATIO = 16  # tokens of one compressed key


def prepare(*, rings: bool, dtype: str = "bfloat16") -> None:
    """Before an engine is made. `dtype`: float32 is not vLLM's, but tells a small fault from rounding."""
    from vllm import ModelRegistry
    from vllm.models.qwen4_exp.nvidia import model, mtp

    if dtype == "float32":
        _compute_in_float32()
    if rings:
        model.Qwen4ExpQSAAttention = _attention_beside_rings()
    ModelRegistry.register_model(NAME, model.Qwen4ExpForCausalLM)
    ModelRegistry.register_model(HEAD, mtp.Qwen4ExpMTP)


def _compute_in_float32() -> None:
    """Three parts are made for half the width: what its residual streams have learnt, a gate, and a delta rule.

    Of the last vLLM's kernels take either, and what calls them does not.
    """
    import functools

    import torch
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
    from vllm.models.qwen4_exp.nvidia import model, mtp, ple_layer
    from vllm.third_party.flash_linear_attention.ops.chunk import ChunkGatedDeltaRuleFunction

    def delta_rule(*, core_attn_out: Any, **options: Any) -> Any:
        scale = options["k"].shape[-1] ** -0.5
        names = ("q", "k", "v", "g", "beta")
        before = [options.pop(name) for name in names]
        return ChunkGatedDeltaRuleFunction.apply(*before, scale, *options.values(), core_attn_out)

    qwen_gdn_linear_attn.fla_chunk_gated_delta_rule = delta_rule
    for module in (model, mtp):
        module.HyperConnectionConfig = functools.partial(_of_float32, module.HyperConnectionConfig)

    def normed(x: Any, weight: Any, eps: float, size: int) -> Any:
        by_stream = x.unflatten(-1, (-1, size))
        scaled = by_stream * torch.rsqrt(by_stream.square().mean(-1, keepdim=True) + eps)
        return scaled * (1 + weight.unflatten(-1, (-1, size)))

    def ple_gate(key: Any, value: Any, hidden: Any, of_key: Any, of_query: Any, of_conv: Any, eps: float) -> Any:
        size = value.shape[-1]
        dot = (normed(key, of_key, eps, size) * normed(hidden, of_query, eps, size)).sum(-1) / size**0.5
        gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
        gated = (gate[..., None] * value[:, None]).flatten(1)
        return gated, normed(gated, of_conv, eps, size).flatten(1)

    ple_layer.ple_gate = ple_gate


def _of_float32(config: Any, **options: Any) -> Any:
    import torch

    return config(**{**options, "params_dtype": torch.float32})


def _attention_beside_rings() -> type:
    import torch
    from vllm.model_executor.models.qwen3_next import Qwen3NextAttention
    from vllm.models.qwen4_exp.common import qsa_cache

    layout = type(qsa_cache.QSAStateBackend.supported_kv_cache_layouts()[0])
    qsa_cache.QSAStateBackend.supported_kv_cache_layouts = classmethod(lambda cls: (layout.LBHNC,))  # a CPU's

    class BesideRings(Qwen3NextAttention):  # type: ignore[misc]
        def __init__(
            self,
            *,
            vllm_config: Any,
            config: Any,
            layer_id: int,
            quant_config: Any = None,
            reduce_results: bool = True,
            prefix: str = "",
        ) -> None:
            super().__init__(
                config,
                model_config=vllm_config.model_config,
                cache_config=vllm_config.cache_config,
                quant_config=quant_config,
                prefix=prefix,
                reduce_results=reduce_results,
            )
            of_both = {
                "head_size": int(config.indexer_head_dim),
                "dtype": torch.bfloat16,
                "cache_config": vllm_config.cache_config,
                "vllm_config": vllm_config,
                "compress_ratio": int(config.indexer_compress_ratio),
            }
            self.ring = qsa_cache.QSAKeyStateCache(prefix=f"{prefix}.indexer.raw", **of_both)
            self.compressed = qsa_cache.QSACompressedKeyCache(prefix=f"{prefix}.indexer.compressed", **of_both)

    return BesideRings


def config(*, rings: bool) -> dict[str, Any]:
    """Two gated delta nets with embeddings of n-grams around one layer of attention."""
    indexed = {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": RATIO,
    }
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
    } | (indexed if rings else {})
