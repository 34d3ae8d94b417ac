"""What pinned prompts hold, on vLLM's own block pool, and what they leave to others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash

from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import HeldKeys
from engine_patches.scheduler.hints import FIELD, PIN
from engine_patches.scheduler.hooks import release_before_reset
from engine_patches.scheduler.pins import NO_ROOM, NOT_CACHED, PINNED, Pins
from engine_patches.scheduler.states import States

UNIT, BLOCK, BLOCKS = 16, 64, 60

RECURRENT, ATTENTION = (0, 2), 1

TOKENS = 160


class Cache:
    """A pool of which pins may hold 20 blocks, and the scheduler around it."""

    def __init__(self) -> None:
        init_none_hash(sha256)
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=UNIT)
        *recurrent, attention = (
            SimpleNamespace(kv_cache_group_id=group, block_size=BLOCK) for group in (*RECURRENT, ATTENTION)
        )
        self.pins = Pins(self.pool, 20)
        self.states = States(HeldKeys(self.pool, Grid(UNIT, UNIT), recurrent, [attention]), self.pins)
        self.checkpoints = Checkpoints(Grid(UNIT, UNIT), BLOCK, self.states)
        self.scheduler = SimpleNamespace(
            seamark=self.checkpoints, requests={}, kv_cache_manager=SimpleNamespace(block_pool=self.pool)
        )

    def compute(
        self,
        prompt: int,
        pin: Any = 1,
        positions: tuple[int, ...] = (80, 144),
        name: str = "r",
        hint: tuple[int, ...] | None = None,
    ) -> str | None:
        """A request for prompt number `prompt` is planned; what became of its pin.

        `positions`: where it gets states; `hint`: where it asks for them, if not at all of these.
        """
        hint = positions if hint is None else hint
        hashes = [b"%03d,%02d" % (prompt, unit) * 5 for unit in range(TOKENS // UNIT)]
        request = SimpleNamespace(
            request_id=name,
            prompt_token_ids=[0] * TOKENS,
            all_token_ids=[0] * TOKENS,
            block_hashes=hashes,
            num_prompt_tokens=TOKENS,
            num_computed_tokens=0,
            num_tokens=TOKENS,
            shared_prefix_boundary=0,
            sampling_params=SimpleNamespace(extra_args={FIELD: list(hint), PIN: pin}),
        )
        self.scheduler.requests = {name: request}
        self.checkpoints.state_of(request)
        self.checkpoints.pin_prompts(self.scheduler.requests)
        assert not self.checkpoints.counters.counts.pinned  # not computed yet
        blocks = [self.cache(request, end, ATTENTION) for end in (64, 128)]
        for position in positions:
            blocks += [self.cache(request, position, group) for group in (*RECURRENT, ATTENTION)]
        request.num_computed_tokens = TOKENS
        self.checkpoints.pin_prompts(self.scheduler.requests)
        self.scheduler.requests = {}
        self.pool.free_blocks(reversed(blocks))
        told = self.checkpoints.counters.take().pinned
        assert [each for each, _ in told] in ([], [name])
        return told[0][1] if told else None

    def cache(self, request: Any, position: int, group: int) -> Any:
        (block,) = self.pool.get_new_blocks(1)
        self.pool.cache_partial_block(request, block, position, group, BLOCK)
        return block

    def evict_all(self) -> None:
        """Traffic takes every block that is not held, and gives it back."""
        self.pool.free_blocks(self.pool.get_new_blocks(self.pool.get_num_free_blocks()))

    def found(self, prompt: int) -> list[int]:
        hashes = [b"%03d,%02d" % (prompt, unit) * 5 for unit in range(TOKENS // UNIT)]
        request = SimpleNamespace(block_hashes=hashes)
        return [position for position in (80, 144) if self.states.keys.found(request, position)]


@pytest.fixture
def cache() -> Cache:
    return Cache()


def test_the_keys_of_what_is_pinned_are_told_until_it_is_released(cache):
    cache.compute(1)
    held = cache.pool.cached_block_hash_to_block
    assert len(cache.pins.keys) == 2 * 3 + 2 and all(map(held.get_one_block, cache.pins.keys))
    cache.compute(1, pin=0)
    assert cache.pins.keys == set()


def test_pins_beyond_their_share_are_refused_and_hold_nothing(cache):
    assert [cache.compute(number) for number in (1, 2, 3)] == [PINNED, PINNED, NO_ROOM]
    cache.evict_all()
    assert [cache.found(number) for number in (1, 2, 3)] == [[80, 144], [80, 144], []]
    cache.compute(1, pin=0)
    assert cache.compute(3) == PINNED


def test_the_same_prompt_pinned_again_takes_no_more_room(cache):
    assert [cache.compute(1) for _ in range(5)] == [PINNED] * 5
    assert len(cache.pins) == 1 and cache.pins.num_blocks <= 8
    cache.compute(1, pin=0)
    assert cache.pool.get_num_free_blocks() == BLOCKS - 1


def test_a_state_that_only_the_pin_itself_would_use_again_is_not_held(cache):
    assert [cache.compute(1, hint=(80,)) for _ in range(3)] == [PINNED] * 3
    assert cache.pins.num_blocks == 2 + 1 + 1  # a state and its attention blocks
    cache.evict_all()
    assert cache.found(1) == [80]


def test_what_two_pins_share_is_held_until_both_are_released(cache):
    blocks = cache.pool.get_new_blocks(3)
    shared, one, other = blocks
    keys = [b"shared".ljust(36), b"one".ljust(36), b"other".ljust(36)]
    for key, block in zip(keys, blocks, strict=True):
        cache.pool.cached_block_hash_to_block.insert(key, block)
    assert cache.pins.pin(b"1", [keys[0], keys[1]]) == cache.pins.pin(b"2", [keys[0], keys[2]]) == PINNED
    assert cache.pins.num_blocks == 3 and [block.ref_cnt for block in blocks] == [3, 2, 2]
    cache.pins.release(b"1")
    assert [block.ref_cnt for block in (shared, one, other)] == [2, 1, 2] and cache.pins.num_blocks == 2
    cache.pins.release(b"2")
    assert [block.ref_cnt for block in blocks] == [1, 1, 1] and cache.pins.num_blocks == 0


@pytest.mark.parametrize("pin", ["1", 2, None, [1], {"a": 1}])
def test_what_is_no_pin_pins_nothing(cache, pin):
    assert cache.compute(1, pin=pin) is None and not cache.pins


def test_a_prompt_of_which_nothing_is_cached_is_not_pinned(cache):
    assert cache.compute(1, positions=()) == NOT_CACHED


def test_a_request_that_is_gone_before_its_prompt_is_computed_is_forgotten(cache):
    cache.checkpoints.pinning.add("gone")
    cache.checkpoints.pin_prompts({})
    assert not cache.checkpoints.pinning and not cache.checkpoints.counters.counts.pinned


@pytest.mark.parametrize("fails", [False, True])
def test_the_cache_can_be_emptied_and_keeps_its_pins_if_it_is_not(cache, fails):
    cache.compute(1)
    held = cache.pool.get_new_blocks(1) if fails else []  # a request runs

    def reset(scheduler: Any) -> bool:
        return scheduler.kv_cache_manager.block_pool.reset_prefix_cache()

    assert release_before_reset(reset)(cache.scheduler) is not fails
    assert cache.pins.num_blocks == (8 if fails else 0)
    cache.pool.free_blocks(held)
    cache.evict_all()
    assert cache.found(1) == ([80, 144] if fails else [])


def test_a_reset_that_breaks_keeps_the_pins(cache):
    cache.compute(1)

    def reset(scheduler: Any) -> bool:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        release_before_reset(reset)(cache.scheduler)
    cache.evict_all()
    assert cache.found(1) == [80, 144]
