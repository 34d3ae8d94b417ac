"""The match unit: how finely a prefix can be found again, in tokens; and how finely states are placed.

vLLM's default is the cache block, 500 to 8,000 tokens on a hybrid model; a checkpoint between two blocks could not be
found. Pure-attention models keep their default, and so do engines that refuse hints.

A gated delta net is computed in chunks of 64 tokens from where a pass begins. A state taken inside a chunk is right,
but what follows is rounded differently than without the stop (measured in bfloat16 on a small model: 0.16 in logprob,
17 of 42 greedy answers; on chunk ends 1 of 42). So the unit of such a model is the chunk. With a draft head vLLM takes
a unit off each match, so there the unit is fine, and states stay on chunk ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from engine_patches import families, settings, speculation
from engine_patches.scheduler import draft_windows, refusals

DEFAULT = 16  # tokens


def expected(vllm_config: Any) -> int:
    """Tokens of which a hit in an engine with this configuration is a multiple, before it has said so itself."""
    configured: int | None = vllm_config.cache_config.prefix_match_unit
    if not vllm_config.model_config.is_hybrid or refusals.by_configuration(vllm_config) is not None:
        return configured or int(vllm_config.cache_config.block_size)
    unit = unit_of(vllm_config)
    kinds = families.kinds_in(vllm_config.model_config.hf_text_config)
    return math.lcm(unit, *(kind.chunk for kind in kinds)) if settings.chunk_ends(default=True) else unit


def unit_of(vllm_config: Any) -> int:
    """The match unit of a hybrid with this configuration, before it has said so itself."""
    configured: int | None = vllm_config.cache_config.prefix_match_unit
    return configured or math.lcm(DEFAULT, families.compression_in(vllm_config.model_config.hf_text_config))


def kernel_chunk(spec: Any, vllm_config: Any) -> int:
    """Tokens that the kernels of a recurrent layer compute at once, counted from the start of a pass; 1 if unknown."""
    if spec.mamba_type.name == families.MAMBA2.backend:
        return int(vllm_config.model_config.get_mamba_chunk_size() or 1)
    return max((kind.chunk for kind in families.KINDS if kind.backend == spec.mamba_type.name), default=1)


def state_alignment(specs: Sequence[Any], vllm_config: Any, match_unit: int) -> int:
    """States are placed on multiples of this many tokens; `specs` are those of the recurrent layers."""
    delta = any(spec.mamba_type.name == families.GDN.backend for spec in specs)
    if not settings.chunk_ends(default=delta):
        return match_unit
    return math.lcm(match_unit, *(kernel_chunk(spec, vllm_config) for spec in specs))


def default_to_fine_unit(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `resolve_kv_cache_block_sizes`: if the user set nothing, hybrids get a fine unit.

    It is the finest that states are placed on, or `DEFAULT` if that one does not divide the model's cache blocks; of a
    model with a compressed index a multiple of what the index has one key for.
    """

    def resolve_kv_cache_block_sizes(kv_cache_config: Any, vllm_config: Any) -> Any:
        from vllm.v1.kv_cache_interface import MambaSpec

        cache_config = vllm_config.cache_config
        if refusals.by_configuration(vllm_config) is None:
            draft_windows.leave_out(kv_cache_config, vllm_config)
        coarse = original(kv_cache_config, vllm_config)
        groups = kv_cache_config.kv_cache_groups
        recurrent = [g.kv_cache_spec for g in groups if isinstance(g.kv_cache_spec, MambaSpec)]
        if (
            cache_config.prefix_match_unit is not None
            or refusals.by_configuration(vllm_config) is not None
            or not recurrent
            or len(groups) < 2
        ):
            return coarse
        coarsest = DEFAULT if speculation.drops(vllm_config) else state_alignment(recurrent, vllm_config, DEFAULT)
        compressed = refusals.compression(groups, vllm_config)
        for unit in sorted({math.lcm(each, *compressed) for each in (coarsest, DEFAULT)}, reverse=True):
            cache_config.prefix_match_unit = unit
            try:
                return original(kv_cache_config, vllm_config)
            except ValueError:  # the unit does not divide vLLM's blocks
                cache_config.prefix_match_unit = None
        return coarse

    return resolve_kv_cache_block_sizes
