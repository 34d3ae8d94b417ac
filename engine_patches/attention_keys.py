"""The attention side of a checkpoint: a cache key at the hinted position, without which the state cannot be reached.

vLLM registers a sub-block key only for a prompt's tail, and drops shorter keys of a block when a longer one comes. Keys
inside a block do not exclude each other: its keys and values are append-only, so what stood at token 160 still stands
there when the block is full.
"""

from __future__ import annotations

from collections.abc import Callable


def keep_hinted_keys(original: Callable) -> Callable:
    """Replacement of `FullAttentionManager.cache_blocks`."""

    def cache_blocks(self, request, num_tokens, retention_interval=None, *, replay_boundaries):
        checkpoints = getattr(self, "seamark", None)
        hint = checkpoints.hint_of(request) if checkpoints is not None else None
        full_before = self.num_cached_block.get(request.request_id, 0)
        original(self, request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        if hint is None:
            return
        blocks = self.req_to_blocks[request.request_id]
        # Longest first: vLLM's own registration removes keys shorter than the new one.
        for position in reversed(hint.positions):
            index = position // self.block_size
            # A block that was full before this call has got its keys and keeps them.
            if position > num_tokens or position % self.block_size == 0 or index < full_before or index >= len(blocks):
                continue
            # A private copy is filled by this step's copies; who finds it in this very step would copy it empty.
            if position < num_tokens and any(copy is blocks[index] for _, copy in self._pending_cow_copies):
                continue
            # cache_partial_block also emits BlockStored, so that every consumer of KV events sees the key.
            self.block_pool.cache_partial_block(
                request=request,
                block=blocks[index],
                num_tokens=position,
                kv_cache_group_id=self.kv_cache_group_id,
                block_size=self.block_size,
            )

    return cache_blocks
