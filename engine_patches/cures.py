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


def keep_enlarged_block_size(original: Callable) -> Callable:
    """vLLM's CPU platform sets its default block size again after the cache of a hybrid model was built with a larger
    one. The scheduler then ends chunks at multiples of 128 while cache blocks are longer, and a state from the middle
    of a block is registered as the state at its end: wrong tokens on the next hit, whenever a prompt takes two chunks.
    """

    def check_and_update_config(cls, vllm_config):
        enlarged = vllm_config.cache_config.block_size
        original(cls, vllm_config)
        cache_config = vllm_config.cache_config
        if cache_config.mamba_cache_mode == "align" and enlarged is not None and enlarged > cache_config.block_size:
            cache_config.block_size = enlarged

    return check_and_update_config


def stop_at_the_block_edge_after_a_hit(original: Callable) -> Callable:
    """A prefill chunk that starts inside a block has to end at the block's edge; vLLM drops that rule where its backend
    can export a state from the last chunk.

    The chunk then runs past the edge, and the block, which still holds the state of the position where the chunk
    began, is registered under the key of its edge. Without the export for such chunks the rule holds again.
    """

    def _mamba_block_aligned_split(
        self, request, num_new_tokens, num_new_local_computed_tokens=0, num_external_computed_tokens=0
    ):
        start = request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
        exports = self.mamba_has_prefill_checkpoint_blocks
        self.mamba_has_prefill_checkpoint_blocks = exports and start % self.cache_config.block_size == 0
        try:
            return original(self, request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)
        finally:
            self.mamba_has_prefill_checkpoint_blocks = exports

    return _mamba_block_aligned_split


def runs_on_cpu() -> bool:
    """Whether vLLM's platform in this process is the CPU."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()
