"""What a state depends on besides its tokens: two engines share files only if all of it is the same."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from engine_patches.disk.files import CHECKSUM_NAME
from engine_patches.forward.loaded_weights import Weights


def identity_of(vllm_config: Any, kv_cache_config: Any) -> bytes:
    """32 bytes that differ whenever a state written under the one configuration is no use, or wrong, under another.

    Empty if the weights are not known.
    """
    import torch
    import vllm

    weights = Weights.of(vllm_config)
    if not weights.name:
        return b""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    facts = {
        "versions": [vllm.__version__, torch.__version__, torch.version.cuda or torch.version.hip or ""],
        "checksum": CHECKSUM_NAME,
        "device": vllm_config.device_config.device_type,
        "attention": [weights.backends, str(vllm_config.attention_config), _instructions(vllm_config)],
        "weights": weights.name,
        "config": _config(model.hf_config),
        "types": [str(model.dtype), str(model.quantization), str(cache.cache_dtype), str(cache.kv_cache_layout)],
        "states": [str(getattr(cache, f"mamba_{name}", "")) for name in ("cache_dtype", "ssm_cache_dtype")],
        "conv layout": os.environ.get("VLLM_SSM_CONV_STATE_LAYOUT", ""),
        "caches": [[repr(group.kv_cache_spec), group.layer_names] for group in kv_cache_config.kv_cache_groups],
        "hash": str(getattr(cache, "prefix_caching_hash_algo", "")),
        "parallel": [
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.prefill_context_parallel_size,
            bool(parallel.enable_expert_parallel),
        ],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


def _instructions(vllm_config: Any) -> str:
    """Those of a CPU for which its kernels lay out blocks; empty for another device."""
    if vllm_config.device_config.device_type != "cpu":
        return ""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return str(_get_attn_isa(torch.bfloat16, 32))


def _config(hf_config: Any) -> dict[str, Any]:
    return {name: value for name, value in hf_config.to_dict().items() if name != "_name_or_path"}
