"""What is said of states, and when. On vLLM's own block pool; that it is true: `tests/harness/scheduler_audit.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from engine_patches.scheduler import state_events
from engine_patches.scheduler.hints import HINTED, CheckpointTarget
from engine_patches.scheduler.state_events import (
    CacheCleared,
    Findable,
    StateEvicted,
    StateStored,
    notice_what_is_taken_back,
)

UNIT, BLOCK = 16, 64

RECURRENT, ATTENTION = (0, 2), 1


class Cache:
    """A pool, what is known of it, and one request of 160 tokens with keys at 80 and 144."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(40, enable_caching=True, hash_block_size=UNIT)
        attention = SimpleNamespace(kv_cache_group_id=ATTENTION, block_size=BLOCK)
        self.findable = self.pool.seamark_findable = Findable(self.pool, UNIT, RECURRENT, [attention])
        hashes = [b"%02d" % number * 16 for number in range(10)]
        self.request = SimpleNamespace(
            request_id="r", block_hashes=hashes, all_token_ids=[0] * 160, num_prompt_tokens=160
        )
        self.blocks = {(ATTENTION, 64): self.cache(64, ATTENTION), (ATTENTION, 128): self.cache(128, ATTENTION)}
        for position in (80, 144):
            for group in (*RECURRENT, ATTENTION):
                self.blocks[group, position] = self.cache(position, group)

    def cache(self, position: int, group: int):
        (block,) = self.pool.get_new_blocks(1)
        self.pool.cache_partial_block(self.request, block, position, group, BLOCK)
        return block

    def plan(self, start: int, end: int) -> None:
        wanted = [CheckpointTarget(position, HINTED) for position in (80, 112, 144)]
        self.findable.planned(self.request, wanted, start, end)
        self.findable.settle()

    def news(self) -> list:
        return [news for _, news in self.findable.take_news()]


@pytest.fixture
def cache(monkeypatch) -> Cache:
    patched = notice_what_is_taken_back(BlockPool._remove_cached_block_hashes)
    monkeypatch.setattr(BlockPool, "_remove_cached_block_hashes", patched)
    return Cache()


def names(cache: Cache) -> list[str]:
    cache.plan(0, 160)
    ((_, _, states),) = cache.news()
    return [name for _, name in states]


def test_a_request_is_told_of_with_each_chunk_and_once(cache):
    cache.plan(0, 100)
    cache.plan(100, 160)
    first, second = cache.news()
    assert (first.end, [position for position, _ in first.states]) == (100, [80])
    assert (second.end, [(position, bool(name)) for position, name in second.states]) == (
        160,
        [(112, False), (144, True)],
    )
    assert not cache.findable.has_news


def test_a_request_that_was_preempted_is_told_of_anew(cache):
    cache.plan(0, 100)
    cache.plan(64, 100)
    first, second = cache.news()
    assert first == second


@pytest.mark.parametrize(
    ("evicted", "gone"),
    [
        ((0, 80), [0]),
        ((2, 80), [0]),
        ((ATTENTION, 80), [0]),
        ((ATTENTION, 128), [2]),
        ((ATTENTION, 64), [0, 2]),
        ((2, 144), [2]),
    ],
)
def test_whatever_a_state_needs_takes_it_along(cache, evicted, gone):
    known = names(cache)
    cache.pool.evict_blocks({cache.blocks[evicted].block_id})
    assert not cache.findable.has_news  # in the middle of a step nothing is decided
    cache.findable.settle()
    assert sorted(cache.news()) == sorted(StateEvicted(known[index]) for index in gone)
    cache.plan(0, 160)
    (came,) = cache.news()
    assert [name for _, name in came.states] == ["" if index in gone else known[index] for index in range(3)]


def test_keys_that_move_to_another_block_are_no_news(cache):
    names(cache)
    (block,) = cache.pool.get_new_blocks(1)
    cache.pool.move_block_hashes(cache.blocks[0, 80], block)
    cache.findable.settle()
    assert cache.news() == []


def test_a_state_that_exists_twice_goes_with_the_second(cache):
    known = names(cache)
    twin = cache.cache(80, 0)
    for block, gone in ((cache.blocks[0, 80], []), (twin, [StateEvicted(known[0])])):
        cache.pool.evict_blocks({block.block_id})
        cache.findable.settle()
        assert cache.news() == gone


def test_blocks_that_no_state_needs_are_not_looked_at(cache, monkeypatch):
    monkeypatch.setattr(Findable, "_has_all", lambda *_: pytest.fail("looked"))
    cache.pool.free_blocks(cache.blocks.values())
    cache.pool.get_new_blocks(39)
    cache.findable.settle()
    assert not cache.findable.has_news


def test_an_emptied_cache_is_one_word(cache):
    names(cache)
    cache.pool.free_blocks(cache.blocks.values())
    assert cache.pool.reset_prefix_cache()
    cache.findable.clear()
    cache.findable.settle()
    assert cache.news() == [CacheCleared()] and len(cache.findable) == 0


def test_numbers_show_what_was_lost(cache, monkeypatch):
    cache.plan(0, 160)
    for _ in range(state_events.MAX_NEWS):
        cache.findable.clear()
    numbers = [number for number, _ in cache.findable.take_news()]
    assert numbers == list(range(2, state_events.MAX_NEWS + 2))


def test_watched_states_are_bounded_and_the_oldest_is_given_up(cache, monkeypatch):
    monkeypatch.setattr(state_events, "MAX_STATES", 1)
    cache.plan(0, 160)
    gone, came = sorted(cache.news(), key=lambda news: isinstance(news, StateStored))
    assert gone == StateEvicted(came.states[0][1]) and len(cache.findable) == 1
    assert all(cache.findable._needed_by.values())
