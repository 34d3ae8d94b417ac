"""Cache keys at a position: what makes a state findable, and the attention rows before it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from functools import cache
from typing import Any

from engine_patches.footprint import LOCAL_HIT


def key_at(request: Any, position: int, match_unit: int, group: int) -> bytes:
    """vLLM's cache key of a request's first `position` tokens (a multiple of `match_unit`) in a cache group."""
    key: bytes = _key_maker()(request.block_hashes[position // match_unit - 1], group)
    return key


@cache
def _key_maker() -> Callable[[bytes, int], Any]:
    """vLLM's own, looked up once: an import inside a function costs more than a key, and keys come by the dozen."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    maker: Callable[[bytes, int], Any] = make_block_hash_with_group_id
    return maker


def keep_attention_keys(manager: Any, request: Any, positions: Iterable[int]) -> None:
    """Register the request's attention blocks under the keys of `positions`, all computed by the end of this step.

    vLLM registers a key inside a block only for a prompt's tail, and drops a block's shorter keys when a longer one
    comes. The keys of a block do not exclude each other: its rows are append-only, so what stood at token 160 still
    stands there when the block is full.
    """
    blocks = manager.req_to_blocks[request.request_id]
    # Longest first: vLLM's own registration removes keys shorter than the new one.
    for position in sorted(positions, reverse=True):
        index = position // manager.block_size
        if position % manager.block_size == 0 or index >= len(blocks):
            continue
        # cache_partial_block also emits BlockStored, so that every consumer of KV events sees the key.
        manager.block_pool.cache_partial_block(
            request=request,
            block=blocks[index],
            num_tokens=position,
            kv_cache_group_id=manager.kv_cache_group_id,
            block_size=manager.block_size,
        )


def keep_hinted_keys(original: Callable[..., None]) -> Callable[..., None]:
    """Replacement of `FullAttentionManager.cache_blocks`: keys that lead to a state survive vLLM's own longer ones."""

    def cache_blocks(
        self: Any, request: Any, num_tokens: int, retention_interval: Any = None, *, replay_boundaries: Any
    ) -> None:
        checkpoints = getattr(self, "seamark", None)
        if checkpoints is None or checkpoints.states is None:
            original(self, request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
            return
        full_before = self.num_cached_block.get(request.request_id, 0)
        original(self, request, num_tokens, retention_interval, replay_boundaries=replay_boundaries)
        state = checkpoints.state_of(request)
        start = state.chunk_start
        full = self.num_cached_block.get(request.request_id, 0)
        if start >= request.num_prompt_tokens and full == full_before and not self._pending_cow_copies:
            return  # a decode step inside a block: no key came and none went
        copies = {copy.block_id for _, copy in self._pending_cow_copies}
        blocks = self.req_to_blocks[request.request_id]
        # This step has yet to compute the rows from `start` on, and all rows of a private copy.
        for block in blocks[start // self.block_size :]:
            checkpoints.states.unwritten[block.block_id] = 0 if block.block_id in copies else start

        def needs_key(position: int) -> bool:
            index = position // self.block_size
            # A block that was full before this call has its keys and keeps them.
            if index < full_before or index >= len(blocks):
                return False
            # This step's copies fill a private copy; a request that finds it in this very step would copy it empty.
            return position == num_tokens or blocks[index].block_id not in copies

        positions = checkpoints.states.positions_with_keys(state, self, num_tokens)
        keep_attention_keys(self, request, filter(needs_key, positions))

    return cache_blocks


def avoid_unwritten_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `KVCacheManager.get_computed_blocks`.

    A prefix that ends inside a block is resumed on a copy of the block, and copies run before the step computes
    anything. A block that another request of the same step fills, itself perhaps a copy, would be copied empty: its
    keys are out already, and vLLM's own deferral misses it if its state is older than its rows.
    """

    def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, request, *args, **kwargs)
        if not _avoids_unwritten_rows(self, request, *found[:2]):
            found = self.empty_kv_cache_blocks, 0, 0
        setattr(request, LOCAL_HIT, found[1])
        return found

    return get_computed_blocks


def look_up(manager: Any, request: Any, at_most: int) -> Any:
    """What `KVCacheManager.get_computed_blocks` finds of so many tokens at most."""
    computed, hit, _ = manager.coordinator.find_longest_cache_hit(request.block_hashes, at_most)
    found = manager.create_kv_cache_blocks(computed), hit, 0
    return found if _avoids_unwritten_rows(manager, request, *found[:2]) else (manager.empty_kv_cache_blocks, 0, 0)


def avoid_unwritten_rows_with_a_connector(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replacement of `KVCacheManager.get_computed_blocks_for_connector`, which looks up without the other."""

    # From vLLM 0.33 on it takes a longest hit.
    def get_computed_blocks_for_connector(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, request, *args, **kwargs)
        if _avoids_unwritten_rows(self, request, *found[:2]):
            return found
        return *self.get_computed_blocks(request, *args, **kwargs), False

    return get_computed_blocks_for_connector


def _avoids_unwritten_rows(manager: Any, request: Any, blocks: Any, hit: int) -> bool:
    """Whether all attention rows of a hit (tokens) are written, after unwritten blocks were replaced by others."""
    checkpoints = getattr(manager, "seamark", None)
    if not hit or checkpoints is None or checkpoints.states is None:
        return True
    unwritten = checkpoints.states.unwritten
    for group, block_size, drop in checkpoints.states.keys.attention:
        copied = blocks.blocks[group]
        if not copied or hit % block_size == 0 or hit <= unwritten.get(copied[-1].block_id, hit):
            continue
        key = key_at(request, hit + drop, checkpoints.grid.unit, group)
        written = _block_other_than(manager.block_pool, key, unwritten)
        if written is None:
            return False
        copied[-1] = written
    return True


def _block_other_than(pool: Any, key: bytes, avoided: Container[int]) -> Any:
    entry = pool.cached_block_hash_to_block._cache.get(key)
    candidates = () if entry is None else entry.values() if isinstance(entry, dict) else (entry,)
    return next((block for block in candidates if block.block_id not in avoided), None)
