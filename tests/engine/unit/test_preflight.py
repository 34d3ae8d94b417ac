"""The check on a toy cache passes on the installed vLLM, and notices a cache that behaves in another way."""

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager, SlidingWindowManager

from engine_patches.scheduler.preflight import PreflightFailed, run


@pytest.mark.parametrize(
    ("method", "changed"),
    [
        ("cache_partial_block", lambda *args, **kwargs: None),
        ("_maybe_evict_cached_block", lambda self, block: False),
        ("get_cached_block", lambda self, block_hash, groups: None),
    ],
)
def test_it_notices_another_behaviour(monkeypatch, method, changed):
    monkeypatch.setattr(BlockPool, method, changed)
    with pytest.raises(PreflightFailed):
        run()


def test_an_error_in_vllms_own_code_is_a_failed_check(monkeypatch):
    def changed(*args, **kwargs):
        raise TypeError("unexpected keyword argument")

    monkeypatch.setattr(BlockPool, "cache_partial_block", changed)
    with pytest.raises(PreflightFailed, match="TypeError: unexpected keyword argument"):
        run()


Changed = Callable[[Any, Callable[..., Any]], Callable[..., Any]]


def less(by: int) -> Changed:
    """Of a lookup whose hits are shorter."""
    return lambda owner, original: classmethod(
        lambda cls, *args, **more: (lambda found: (found[0], found[1] - by))(original(*args, **more))
    )


def doing(instead: Callable[..., Any]) -> Changed:
    return lambda owner, original: instead


@pytest.mark.parametrize(
    ("owner", "method", "changed", "told"),
    [
        (MambaManager, "find_longest_cache_hit", less(16), "a state inside a block"),
        (FullAttentionManager, "find_longest_cache_hit", less(16), "attention rows inside a block"),
        (BlockPool, "cache_full_blocks", doing(lambda *args, **more: None), "the block of token"),
        (
            BlockPool,
            "free_blocks",
            doing(lambda self, blocks: [self._maybe_evict_cached_block(each) for each in blocks]),
            "a freed state",
        ),
    ],
)
def test_each_behaviour_that_is_relied_on_is_looked_at(monkeypatch, owner, method, changed, told):
    monkeypatch.setattr(owner, method, changed(owner, getattr(owner, method)))
    with pytest.raises(PreflightFailed, match=told):
        run()


@pytest.mark.parametrize(
    ("owner", "method", "changed", "told"),
    [
        (SlidingWindowManager, "get_num_skipped_tokens", doing(lambda self, tokens: 0), "a window that is not held"),
        (SlidingWindowManager, "take_new_block_ids", doing(lambda self: []), "its blocks to zero"),
        (BlockPool, "cache_partial_block", doing(lambda *args, **more: None), "the rows before a hit"),
        (SlidingWindowManager, "take_pending_cow_copies", doing(lambda self: []), "a hit copies"),
        (BlockPool, "get_new_blocks", doing(lambda self, count: 1 / 0), "ZeroDivisionError"),
    ],
)
def test_so_is_each_of_a_window(monkeypatch, owner, method, changed, told):
    monkeypatch.setattr("engine_patches.scheduler.preflight._check", lambda: None)
    monkeypatch.setattr(owner, method, changed(owner, getattr(owner, method)))
    with pytest.raises(PreflightFailed, match=told):
        run(windows=True)
    run()  # without a head that has any nobody asks
