"""KV events of a hybrid, on vLLM's own block pool and requests: blocks come with a state behind them, and go with it.

`tests/harness/audit.py` compares an index built from them with what vLLM's scheduler finds, in random traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request

from engine_patches import settings
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys, watch_removed_keys
from engine_patches.scheduler.kv_events import ResumableBlocks, announce_resumable_blocks
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


def test_blocks_without_a_state_are_not_announced(cache):
    request, _ = cache.cached()
    cache.key(request, 176, ATTENTION)
    assert cache.events() == []


def test_a_state_announces_the_blocks_before_it_from_the_root(cache):
    request, _ = cache.cached()
    cache.state(request, 80)
    (stored,) = cache.events()
    assert stored == BlockStored(
        block_hashes=names(request, *range(16, 81, 16)),
        parent_block_hash=None,
        token_ids=HEAD[:80],
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * 5,
        group_idx=ATTENTION,
    )
    assert cache.promised(request) == 80


def test_a_state_needs_every_recurrent_group_and_all_rows(cache):
    request = cache.request()
    cache.rows(request, 0, 64)
    for group in RECURRENT:
        assert cache.events() == []
        cache.key(request, 80, group)
    assert cache.events() == []
    cache.key(request, 80, ATTENTION)
    assert cache.promised(request) == 80


def test_a_deeper_state_announces_what_lies_between(cache):
    request, _ = cache.cached()
    cache.state(request, 80)
    cache.events()
    cache.state(request, 192)
    (stored,) = cache.events()
    assert stored.parent_block_hash == names(request, 80)[0]
    assert stored.token_ids == HEAD[80:192] and stored.block_hashes == names(request, *range(96, 193, 16))


def test_a_shallower_state_announces_nothing_and_keeps_its_part(cache):
    request, _ = cache.cached()
    deep = cache.state(request, 192)
    cache.events()
    cache.state(request, 80)
    assert cache.events() == []
    cache.evict(deep[1])
    (removed,) = cache.events()
    assert removed == BlockRemoved(names(request, *range(192, 80, -16)), "GPU", ATTENTION)
    assert cache.promised(request) == 80


def test_an_evicted_state_takes_nothing_that_a_deeper_one_needs(cache):
    request, _ = cache.cached()
    shallow = cache.state(request, 80)
    cache.state(request, 192)
    assert cache.promised(request) == 192
    cache.evict(*shallow)
    assert cache.events() == [] and cache.promised(request) == 192


def test_branches_share_what_they_share(cache):
    one, other = cache.request(), cache.request([*HEAD[:96], *range(96)])
    cache.rows(one, 0, 192)
    cache.rows(other, 64, 192)
    states = [cache.state(request, position) for request, position in ((one, 192), (other, 176))]
    assert (cache.promised(one), cache.promised(other)) == (192, 176)
    cache.evict(states[0][0])
    assert (cache.promised(one), cache.promised(other)) == (96, 176)
    cache.evict(states[1][0])
    assert (cache.promised(one), cache.promised(other)) == (0, 0)


@pytest.mark.parametrize(("index", "left"), [(0, 0), (1, 80), (2, 80)])
def test_a_hole_in_the_rows_withdraws_what_lies_behind_it(cache, index, left):
    request, rows = cache.cached()
    for position in (64, 80, 192):
        cache.state(request, position)
    assert cache.promised(request) == 192
    cache.evict(rows[index])  # the key at 80 belongs to a block of its own
    assert cache.promised(request) == left


def test_rows_that_are_computed_again_lead_to_the_state_again(cache):
    request, rows = cache.cached()
    cache.state(request, 192)
    cache.events()
    cache.evict(rows[1])
    assert cache.promised(request) == 0
    cache.rows(request, 64, 192)
    assert cache.promised(request) == 192


def test_a_block_that_exists_twice_goes_with_the_second(cache):
    request = cache.request()
    rows, twin = cache.rows(request, 0, 192), cache.rows(request, 0, 192)
    cache.state(request, 192)
    cache.events()
    cache.evict(rows[0])
    assert cache.events() == []
    cache.evict(twin[0])
    assert cache.promised(request) == 0


def test_what_goes_and_returns_between_two_steps_is_no_event(cache):
    request, rows = cache.cached()
    cache.state(request, 192)
    cache.events()
    cache.evict(rows[2])
    cache.rows(request, 128, 192)
    assert cache.events() == []
    assert cache.promised(request) == 192


def test_a_state_that_is_gone_before_the_events_are_taken_was_never_there(cache):
    request, _ = cache.cached()
    cache.evict(*cache.state(request, 192))
    assert cache.events() == []


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


def test_with_a_drop_the_rows_have_to_reach_further():
    cache = Cache(Grid(UNIT, UNIT, UNIT, UNIT), groups={ATTENTION: True, 3: False})
    request = cache.request()
    for group in (ATTENTION, 3):
        cache.rows(request, 0, 64, group)
    for group in (*RECURRENT, 3):
        cache.key(request, 80, group)
    assert cache.events() == []
    proof = cache.key(request, 96, ATTENTION)
    stored = cache.events()
    assert [(each.group_idx, len(each.token_ids)) for each in stored] == [(ATTENTION, 80), (3, 80)]
    cache.pool.evict_blocks({proof.block_id})
    removed = cache.pool.take_events()
    assert [(each.group_idx, len(each.block_hashes)) for each in removed] == [(ATTENTION, 5), (3, 5)]


def test_another_salt_is_another_prefix(cache):
    request, other = cache.request(salt="one"), cache.request()
    cache.rows(request, 0, 128)
    cache.state(request, 128)
    (stored,) = cache.events()
    assert stored.extra_keys == [("one",), *[None] * 7]
    assert (cache.promised(request), cache.promised(other)) == (128, 0)


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


def test_nothing_is_kept_of_states_that_are_gone(cache):
    request, rows = cache.cached()
    for position in (80, 192):
        cache.state(request, position)
    cache.events()
    cache.evict(rows[0])
    cache.events()
    blocks = cache.pool.take_events.__self__
    assert not blocks._last and not blocks._states and blocks._announced == {ATTENTION: {}}


def started(pool: BlockPool, events: bool, enabled: bool = True) -> None:
    """A scheduler has been built around a pool."""
    manager = SimpleNamespace(kv_cache_group_id=ATTENTION, block_size=BLOCK)
    states = SimpleNamespace(keys=HeldKeys(pool, GRID, STATES, [manager]), windows=None) if enabled else None
    checkpoints = SimpleNamespace(states=states)

    def init(self) -> None:
        self.seamark, self.enable_kv_cache_events = checkpoints, events

    announce_resumable_blocks(init)(SimpleNamespace())


@pytest.mark.parametrize(
    ("events", "enabled", "asked", "ours"),
    [
        (True, True, "", True),
        (True, True, settings.BLOCKS, True),
        (False, True, "", False),
        (True, False, "", False),
        (True, True, settings.OFF, False),
    ],
)
def test_a_pool_is_touched_only_where_events_are_on_and_wanted(monkeypatch, events, enabled, asked, ours):
    monkeypatch.setenv(settings.KV_EVENTS, asked)
    pool = BlockPool(4, enable_caching=True, hash_block_size=UNIT, enable_kv_cache_events=events)
    started(pool, events, enabled)
    replaced = {name for name in vars(pool) if hasattr(BlockPool, name)}
    assert bool(replaced) is ours
