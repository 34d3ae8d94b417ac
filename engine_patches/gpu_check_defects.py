"""Planted defects: proof that `seamark gpu-check` would notice a wrong state on this machine's kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from engine_patches.gpu_check_questions import EARLY_STATE
from engine_patches.keys import key_at


@contextlib.contextmanager
def planted(scheduler: Any, defect: str) -> Iterator[None]:
    """While inside, requests that hit resume from a wrong recurrent state, where one is at hand."""
    manager = scheduler.kv_cache_manager
    original = manager.get_computed_blocks
    checkpoints = scheduler.seamark

    def get_computed_blocks(request: Any) -> Any:
        found = original(request)
        blocks, hit = found[0], found[1]
        for group in checkpoints.recurrent_groups if hit else ():
            wrong = _wrong_state(manager.block_pool, checkpoints, request, hit, group, defect)
            if wrong is not None:
                blocks.blocks[group][-1] = wrong
        return found

    manager.get_computed_blocks = get_computed_blocks
    try:
        yield
    finally:
        del manager.get_computed_blocks


def _wrong_state(pool: Any, checkpoints: Any, request: Any, hit: int, group: int, defect: str) -> Any:
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

    unit = checkpoints.match_unit
    cached = pool.cached_block_hash_to_block
    if defect == EARLY_STATE:
        early = hit - alignment_of(checkpoints)
        return cached.get_one_block(key_at(request, early, unit, group)) if early > 0 else None
    own = set(request.block_hashes)
    others = (key for key in cached._cache if get_group_id(key) == group and get_block_hash(key) not in own)
    return next((cached.get_one_block(key) for key in others), None)


def alignment_of(checkpoints: Any) -> int:
    """States are kept at multiples of this many tokens."""
    return getattr(checkpoints, "alignment", 0) or checkpoints.match_unit
