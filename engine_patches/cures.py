"""Cures of upstream defects, wanted with or without checkpoints: they repair answers, they never change right ones."""

from __future__ import annotations

from collections.abc import Callable


def copy_largest_view_first(original: Callable) -> Callable:
    """vLLM's block copy takes the first of several caches that start at one address and skips the rest.

    With a layer-major layout a Mamba page and a larger attention page share their start; copying only the shorter one
    loses the tail of the attention page, and a request that resumes inside that block computes on someone else's keys.
    Offering the widest view of each address first makes the one copy complete.
    """

    def copy_kv_cache_blocks_inplace(kv_caches, num_blocks, kv_cache_block_copies):
        caches = list(kv_caches) if kv_cache_block_copies else []
        caches.sort(key=lambda cache: cache.nbytes, reverse=True)
        return original(caches, num_blocks, kv_cache_block_copies)

    return copy_kv_cache_blocks_inplace


def no_checkpoint_export_on_cpu(original: Callable) -> Callable:
    """vLLM promises to export a state from inside one forward pass; its CPU scan returns final states only.

    Any prompt longer than a block then kills the engine with an IndexError. Without the promise the scheduler ends a
    chunk at the block boundary instead, which costs a pass and is right.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    def get_kv_cache_spec(self, vllm_config):
        return MambaBase.get_kv_cache_spec(self, vllm_config)

    return get_kv_cache_spec


def runs_on_cpu() -> bool:
    """Whether vLLM's platform in this process is the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
