"""The match unit: how finely a prefix can be found again, in tokens.

vLLM's default is the cache block, 500 to 8,000 tokens on a hybrid model; a checkpoint between two of them could not be
found. Pure-attention models keep their default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DEFAULT = 16  # tokens


def expected(vllm_config: Any) -> int:
    """The match unit (tokens) an engine with this configuration is going to use, before it has said so itself."""
    configured = vllm_config.cache_config.prefix_match_unit
    if configured is not None:
        return configured
    return DEFAULT if vllm_config.model_config.is_hybrid else vllm_config.cache_config.block_size


def default_to_fine_unit(original: Callable) -> Callable:
    """Replacement of `resolve_kv_cache_block_sizes`: where the user set nothing, hybrids get `DEFAULT`."""
    from vllm.v1.kv_cache_interface import MambaSpec

    def resolve_kv_cache_block_sizes(kv_cache_config, vllm_config):
        cache_config = vllm_config.cache_config
        scheduler_block_size, hash_block_size = original(kv_cache_config, vllm_config)
        groups = kv_cache_config.kv_cache_groups
        if (
            cache_config.prefix_match_unit is not None
            or not cache_config.enable_prefix_caching
            or len(groups) < 2
            or not any(isinstance(group.kv_cache_spec, MambaSpec) for group in groups)
        ):
            return scheduler_block_size, hash_block_size
        cache_config.prefix_match_unit = DEFAULT
        try:
            return original(kv_cache_config, vllm_config)
        except ValueError:  # vLLM's word that the unit does not divide its blocks
            cache_config.prefix_match_unit = None
            return scheduler_block_size, hash_block_size

    return resolve_kv_cache_block_sizes
