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
from engine_patches.scheduler.request_state import RequestState, Wish
from engine_patches.scheduler.state_events import (
    AdapterReplaced,
    CacheCleared,
    StateEvents,
    StateEvicted,
    StateStored,
    emit_events,
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


def test_a_preempted_request_emits_its_states_again(cache):
    cache.plan(0, 100)
    cache.plan(64, 100)
    first, second = cache.taken()
    assert first == second


def test_with_a_drop_a_state_is_told_apart_by_the_tokens_that_lead_to_it(cache):
    cache.watch(Grid(UNIT, UNIT, UNIT, UNIT))
    proof = cache.cache(80 + UNIT, ATTENTION)
    cache.plan(0, 100)
    other = SimpleNamespace(**vars(cache.request))
    other.block_hashes = [*cache.request.block_hashes[:5], b"other hash".ljust(32)]
    cache.events.emit_stored(other, RequestState(), [CheckpointTarget(80, HINTED)], 0, 96)
    found, not_found = cache.taken()
    ((_, name),) = found.states
    assert name and not_found.states == ((80, ""),)
    cache.pool.evict_blocks({proof.block_id})
    cache.events.emit_evictions()
    assert cache.taken() == [StateEvicted(name)]


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
    assert not cache.events.pending  # in the middle of a step nothing is decided
    cache.events.emit_evictions()
    assert sorted(cache.taken()) == sorted(StateEvicted(known[index]) for index in gone)
    cache.plan(0, 160)
    (came,) = cache.taken()
    assert [name for _, name in came.states] == ["" if index in gone else known[index] for index in range(3)]


def test_keys_that_move_to_another_block_emit_nothing(cache):
    names(cache)
    (block,) = cache.pool.get_new_blocks(1)
    cache.pool.move_block_hashes(cache.blocks[0, 80], block)
    cache.events.emit_evictions()
    assert cache.taken() == []


def test_a_state_that_exists_twice_goes_with_the_second(cache):
    known = names(cache)
    twin = cache.cache(80, 0)
    for block, gone in ((cache.blocks[0, 80], []), (twin, [StateEvicted(known[0])])):
        cache.pool.evict_blocks({block.block_id})
        cache.events.emit_evictions()
        assert cache.taken() == gone


def test_blocks_that_no_state_needs_are_not_looked_at(cache, monkeypatch):
    monkeypatch.setattr(BlockHashToBlockMap, "get_one_block", lambda *_: pytest.fail("looked"))
    cache.pool.free_blocks(cache.blocks.values())
    cache.pool.get_new_blocks(39)
    cache.events.emit_evictions()
    assert not cache.events.pending


def test_an_emptied_cache_is_one_event(cache):
    names(cache)
    cache.pool.free_blocks(cache.blocks.values())
    assert cache.pool.reset_prefix_cache()
    cache.events.clear()
    cache.events.emit_evictions()
    assert cache.taken() == [CacheCleared()] and len(cache.events) == 0


def test_numbers_show_which_events_were_dropped(cache, monkeypatch):
    cache.plan(0, 160)
    for _ in range(state_events.MAX_EVENTS):
        cache.events.clear()
    numbers = [number for number, _ in cache.events.take()]
    assert numbers == list(range(2, state_events.MAX_EVENTS + 2))


def test_watched_states_are_bounded_and_the_oldest_is_given_up(cache, monkeypatch):
    monkeypatch.setattr(state_events, "MAX_STATES", 1)
    cache.plan(0, 160)
    gone, came = sorted(cache.taken(), key=lambda event: isinstance(event, StateStored))
    assert gone == StateEvicted(came.states[0][1]) and len(cache.events) == 1


def test_states_cached_again_after_a_clear_can_be_evicted(cache):
    names(cache)
    cache.events.clear()
    known = names_after_clear(cache)
    cache.pool.evict_blocks({cache.blocks[0, 80].block_id})
    cache.events.emit_evictions()
    assert cache.taken() == [StateEvicted(known[0])]


def names_after_clear(cache: Cache) -> list[str]:
    cache.plan(0, 160)
    cleared, (_, _, states) = cache.taken()
    assert cleared == CacheCleared()
    return [name for _, name in states]


def test_keys_cached_again_after_a_clear_are_evicted_without_an_event(cache):
    names(cache)
    cache.events.clear()
    cache.pool.evict_blocks({cache.blocks[0, 80].block_id})
    cache.events.emit_evictions()
    assert cache.taken() == [CacheCleared()]


def test_the_last_chunk_emits_an_event_without_a_target(cache):
    targets = [CheckpointTarget(80, HINTED)]
    for start, end in ((0, 100), (100, 150), (150, 160)):
        cache.events.emit_stored(cache.request, cache.state, targets, start, end)
    assert [(event.end, len(event.states)) for event in cache.taken()] == [(100, 1), (160, 0)]


class Step:
    """A planned step, as the scheduler hands it out."""

    def __init__(self, cache: Cache, **tokens: tuple[int, int]) -> None:
        """`tokens`: by request, those of this step, and those that are computed after it."""
        self.num_scheduled_tokens = {name: count for name, (count, _) in tokens.items()}
        self.total_num_scheduled_tokens = sum(self.num_scheduled_tokens.values())
        self.scheduled_new_reqs: list[str] = []
        self.scheduled_spec_decode_tokens: dict[str, list[int]] = {}
        requests = {}
        for name, (_, computed) in tokens.items():
            state = RequestState(Wish(() if name.startswith("plain") else (80,)))
            requests[name] = SimpleNamespace(
                **{**vars(cache.request), "request_id": name}, num_computed_tokens=computed, seamark=state
            )
        self._scheduler = SimpleNamespace(
            requests=requests,
            seamark=SimpleNamespace(
                states=SimpleNamespace(events=cache.events),
                state_of=lambda request: request.seamark,
                targets=lambda request: [CheckpointTarget(80, HINTED)],
            ),
        )

    def emitted(self, cache: Cache) -> list[str]:
        emit_events(self._scheduler, self)
        return [event.request_id for event in cache.taken()]


def test_hinted_prompts_emit_events_and_nothing_else_does(cache):
    assert Step(cache, hinted=(60, 100), plain=(60, 100)).emitted(cache) == ["hinted"]
    assert Step(cache, decoding=(1, 161), plain=(60, 100)).emitted(cache) == []
    assert Step(cache, decoding=(1, 161), hinted=(60, 160)).emitted(cache) == ["hinted"]


def test_a_step_of_decodes_emits_nothing_and_a_new_request_of_one_token_does(cache):
    last = Step(cache, hinted=(1, 160))
    assert last.emitted(cache) == []
    last.scheduled_new_reqs = ["hinted"]
    assert last.emitted(cache) == ["hinted"]


def test_an_unwatched_state_leaves_the_keys_of_the_others(cache):
    known = names(cache)
    cache.pool.evict_blocks({cache.blocks[0, 80].block_id})
    cache.pool.evict_blocks({cache.blocks[ATTENTION, 64].block_id})
    cache.events.emit_evictions()
    assert sorted(cache.taken()) == sorted([StateEvicted(known[0]), StateEvicted(known[2])])
    assert len(cache.events) == 0


def test_states_of_an_adapter_that_is_replaced_go_and_no_others(cache):
    cache.request.lora_request = SimpleNamespace(lora_name="ada")
    ada = [name for name in names(cache) if name]
    cache.events.adapter_replaced("bob")
    cache.events.adapter_replaced("ada")
    assert cache.taken() == [AdapterReplaced("bob"), *map(StateEvicted, ada), AdapterReplaced("ada")]
    assert len(ada) == 2 and len(cache.events) == 0
