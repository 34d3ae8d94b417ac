"""The check on a toy cache notices a cache that behaves in another way than the installed vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager

from engine_patches.scheduler.preflight import PreflightFailed, run

Changed = Callable[[Callable[..., Any]], Callable[..., Any]]


def shorter(original: Callable[..., Any]) -> Any:
    """A lookup whose hits are shorter."""

    def find(cls: Any, *args: Any, **more: Any) -> Any:
        found = original(*args, **more)
        return found[0], found[1] - 16

    return classmethod(find)


def doing(instead: Callable[..., Any]) -> Changed:
    return lambda original: instead


def evict(self: Any, blocks: Any) -> None:
    for each in blocks:
        self._maybe_evict_cached_block(each)


@pytest.mark.parametrize(
    ("owner", "method", "changed", "told"),
    [
        (BlockPool, "cache_partial_block", doing(lambda *args, **more: len(5)), "TypeError: object of type 'int'"),
        (BlockPool, "_maybe_evict_cached_block", doing(lambda self, block: False), ""),
        (BlockPool, "get_cached_block", doing(lambda self, block_hash, groups: None), ""),
        (MambaManager, "find_longest_cache_hit", shorter, "a state inside a block"),
        (FullAttentionManager, "find_longest_cache_hit", shorter, "attention rows inside a block"),
        (BlockPool, "cache_full_blocks", doing(lambda *args, **more: None), "the block of token"),
        (BlockPool, "free_blocks", doing(evict), "a freed state"),
        (SlidingWindowManager, "get_num_skipped_tokens", doing(lambda self, tokens: 0), "a window that is not held"),
        (SlidingWindowManager, "take_new_block_ids", doing(lambda self: []), "its blocks to zero"),
        (SlidingWindowManager, "take_pending_cow_copies", doing(lambda self: []), "a hit copies"),
    ],
)
def test_each_behaviour_that_is_relied_on_is_looked_at(monkeypatch, owner, method, changed, told):
    monkeypatch.setattr(owner, method, changed(getattr(owner, method)))
    of_windows = owner is SlidingWindowManager
    with pytest.raises(PreflightFailed, match=told or None):
        run(windows=of_windows)
    if of_windows:
        run()  # without a head that has any nobody asks
