"""KV events of a hybrid, on vLLM's own block pool and requests: blocks come with a state behind them, and go with it.

`tests/harness/audit.py` compares an index built from them with what vLLM's scheduler finds, in random traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys, watch_removed_keys
from engine_patches.scheduler.kv_events import ResumableBlocks
from tests.harness.kv_event_index import KvEventIndex

UNIT, BLOCK = 16, 64

RECURRENT, ATTENTION, WINDOW = (0, 2), 1, 7

GRID = Grid(UNIT, UNIT)

STATES = [SimpleNamespace(kv_cache_group_id=group, block_size=BLOCK) for group in RECURRENT]

DRAFTED = {ATTENTION: True}

HEAD = list(range(1000, 1400))


class Cache:
    """A pool whose events are taken over, and an index that is built from them."""

    def __init__(self, grid: Grid = GRID, size: int = UNIT, groups: Mapping[int, bool] = DRAFTED) -> None:
        """`size`: of announced blocks; `groups`: the attention groups, and whether a draft head has rows there."""
        init_none_hash(sha256)
        self.pool = BlockPool(80, enable_caching=True, hash_block_size=UNIT, enable_kv_cache_events=True)
        managers = [
            SimpleNamespace(kv_cache_group_id=group, block_size=BLOCK, use_eagle=use_eagle)
            for group, use_eagle in groups.items()
        ]
        keys = HeldKeys(self.pool, grid, STATES, managers)
        ResumableBlocks(keys, {each.group: size for each in keys.attention}).take_over()
        self.index = KvEventIndex(UNIT)
        self.hasher = get_request_block_hasher(UNIT, sha256)

    def request(self, tokens: Iterable[int] = HEAD[:200], salt: str | None = None) -> Request:
        parameters = SamplingParams(max_tokens=1)
        return Request("r", list(tokens), parameters, None, block_hasher=self.hasher, cache_salt=salt)

    def rows(self, request: Request, start: int, end: int, group: int = ATTENTION) -> list:
        """Cache the attention blocks of tokens [start, end), both at block edges."""
        blocks = [*[self.pool.null_block] * (start // BLOCK), *self.pool.get_new_blocks((end - start) // BLOCK)]
        self.pool.cache_full_blocks(request, blocks, start // BLOCK, end // BLOCK, BLOCK, group)
        return blocks

    def cached(self) -> tuple[Request, list]:
        """A request, and the three attention blocks that it fills."""
        request = self.request()
        return request, self.rows(request, 0, 192)

    def key(self, request: Request, position: int, group: int):
        (block,) = self.pool.get_new_blocks(1)
        self.pool.cache_partial_block(request, block, position, group, BLOCK)
        return block

    def state(self, request: Request, position: int) -> list:
        """A state in all recurrent groups, and the rows' key at its position."""
        if position % BLOCK:
            self.key(request, position, ATTENTION)
        return [self.key(request, position, group) for group in RECURRENT]

    def evict(self, *blocks) -> None:
        self.pool.evict_blocks({block.block_id for block in blocks})

    def events(self) -> list:
        taken = self.pool.take_events()
        for event in taken:
            self.index.apply(msgspec.to_builtins(event))
        assert not self.index.surprises
        return taken

    def promised(self, request: Request) -> int:
        self.events()
        return self.index.promised(request.all_token_ids, request.cache_salt)


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    patched = watch_removed_keys(BlockPool._remove_cached_block_hashes)
    monkeypatch.setattr(BlockPool, "_remove_cached_block_hashes", patched)


@pytest.fixture
def cache() -> Cache:
    return Cache()


def names(request: Request, *positions: int) -> list:
    """vLLM's hashes of a request's first tokens, as they travel."""
    return [maybe_convert_block_hash(request.block_hashes[position // UNIT - 1]) for position in positions]


def test_an_emptied_cache_withdraws_all_and_starts_at_the_root(cache):
    request = cache.request()
    blocks = [*cache.rows(request, 0, 192), *cache.state(request, 192)]
    cache.events()
    cache.evict(blocks[-1])
    cache.state(request, 128)
    cache.pool.free_blocks([block for block in cache.pool.blocks if block.ref_cnt and not block.is_null])
    assert cache.pool.reset_prefix_cache()
    cache.rows(request, 0, 64)
    cache.state(request, 64)
    removed, cleared, stored = cache.events()
    assert removed.block_hashes == names(request, *range(192, 0, -16))
    assert cleared == AllBlocksCleared()
    assert stored.parent_block_hash is None and cache.promised(request) == 64


def test_events_of_other_cache_groups_pass(cache):
    request = cache.request()
    (block,) = cache.rows(request, 0, 64, WINDOW)
    cache.state(request, 64)
    cache.evict(block)
    stored, removed = cache.events()
    assert (stored.group_idx, stored.block_size, removed.group_idx) == (WINDOW, BLOCK, WINDOW)


def test_whole_cache_blocks_up_to_the_edge_before_a_state():
    cache = Cache(size=BLOCK)
    request, _ = cache.cached()
    head = cache.state(request, 48)
    states = cache.state(request, 176)
    (stored,) = cache.events()
    assert (stored.block_size, stored.block_hashes) == (BLOCK, names(request, 64, 128))
    cache.evict(*head)
    assert cache.promised(request) == 128
    cache.evict(states[0])
    assert cache.promised(request) == 0


def test_a_full_report_repeats_what_is_announced(cache):
    request, _ = cache.cached()
    cache.state(request, 80)
    cache.events()
    for group in (*RECURRENT, ATTENTION):
        cache.pool.emit_cached_block_events(request, 2, BLOCK, group)
    (stored,) = cache.events()
    assert stored.parent_block_hash is None and stored.token_ids == HEAD[:80]
    cache.pool.emit_cached_block_events(cache.request(range(64)), 1, BLOCK, ATTENTION)
    assert cache.events() == []
