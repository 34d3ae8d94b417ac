"""Which events states give, and when, on vLLM's own block pool; `tests/harness/audit.py` checks that they are true."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from engine_patches.scheduler import state_events
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys, watch_removed_keys
from engine_patches.scheduler.planner import HINTED, CheckpointTarget
from engine_patches.scheduler.request_state import RequestState
from engine_patches.scheduler.state_events import (
    AdapterReplaced,
    StateEvents,
    StateEvicted,
    StateStored,
)

UNIT, BLOCK = 16, 64

RECURRENT, ATTENTION = (0, 2), 1


class Cache:
    """A pool, what is known of it, and one request of 160 tokens with keys at 80 and 144."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(40, enable_caching=True, hash_block_size=UNIT)
        self.watch(Grid(UNIT, UNIT))
        hashes = [b"%02d" % number * 16 for number in range(10)]
        self.request = SimpleNamespace(
            request_id="r", block_hashes=hashes, all_token_ids=[0] * 160, num_prompt_tokens=160
        )
        self.state = RequestState()
        self.blocks = {(ATTENTION, 64): self.cache(64, ATTENTION), (ATTENTION, 128): self.cache(128, ATTENTION)}
        for position in (80, 144):
            for group in (*RECURRENT, ATTENTION):
                self.blocks[group, position] = self.cache(position, group)

    def watch(self, grid: Grid) -> None:
        *recurrent, attention = (
            SimpleNamespace(kv_cache_group_id=group, block_size=BLOCK) for group in (*RECURRENT, ATTENTION)
        )
        self.events = StateEvents(HeldKeys(self.pool, grid, recurrent, [attention]))

    def cache(self, position: int, group: int):
        (block,) = self.pool.get_new_blocks(1)
        self.pool.cache_partial_block(self.request, block, position, group, BLOCK)
        return block

    def plan(self, start: int, end: int) -> None:
        targets = [CheckpointTarget(position, HINTED) for position in (80, 112, 144)]
        self.events.emit_stored(self.request, self.state, targets, start, end)
        self.events.emit_evictions()

    def taken(self) -> list:
        return [event for _, event in self.events.take()]


@pytest.fixture
def cache(monkeypatch) -> Cache:
    patched = watch_removed_keys(BlockPool._remove_cached_block_hashes)
    monkeypatch.setattr(BlockPool, "_remove_cached_block_hashes", patched)
    return Cache()


def names(cache: Cache) -> list[str]:
    cache.plan(0, 160)
    ((_, _, states),) = cache.taken()
    return [name for _, name in states]


def test_each_chunk_emits_its_states_once(cache):
    cache.plan(0, 100)
    cache.plan(100, 160)
    first, second = cache.taken()
    assert (first.end, [position for position, _ in first.states]) == (100, [80])
    assert (second.end, [(position, bool(name)) for position, name in second.states]) == (
        160,
        [(112, False), (144, True)],
    )
    assert not cache.events.pending


def test_blocks_that_no_state_needs_are_not_looked_at(cache, monkeypatch):
    monkeypatch.setattr(BlockHashToBlockMap, "get_one_block", lambda *_: pytest.fail("looked"))
    cache.pool.free_blocks(cache.blocks.values())
    cache.pool.get_new_blocks(39)
    cache.events.emit_evictions()
    assert not cache.events.pending


def test_watched_states_are_bounded_and_the_oldest_is_given_up(cache, monkeypatch):
    monkeypatch.setattr(state_events, "MAX_STATES", 1)
    cache.plan(0, 160)
    gone, came = sorted(cache.taken(), key=lambda event: isinstance(event, StateStored))
    assert gone == StateEvicted(came.states[0][1]) and len(cache.events) == 1


def test_states_of_an_adapter_that_is_replaced_go_and_no_others(cache):
    cache.request.lora_request = SimpleNamespace(lora_name="ada")
    ada = [name for name in names(cache) if name]
    cache.events.adapter_replaced("bob")
    cache.events.adapter_replaced("ada")
    assert cache.taken() == [AdapterReplaced("bob"), *map(StateEvicted, ada), AdapterReplaced("ada")]
    assert len(ada) == 2 and len(cache.events) == 0
