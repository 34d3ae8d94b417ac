"""Which states go first, and that nothing in use is ever touched. On vLLM's own block pool."""

from types import SimpleNamespace

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash, make_block_hash_with_group_id

from engine_patches.scheduler.retention import Retention

GROUPS = (0, 2)


class Cache:
    """A pool and the states in it."""

    def __init__(self, blocks=20, share=1.0):
        init_none_hash(sha256)
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=16)
        self.retention = Retention(self.pool, share)

    def write(self, name, turn=False, keep=False):
        """A state under the hash `name`; its blocks go back to the pool unless `keep`."""
        assert self.retention.make_room(len(GROUPS))
        blocks = self.pool.get_new_blocks(len(GROUPS))
        request = SimpleNamespace(block_hashes=[name], all_token_ids=[0] * 16)
        for group, block in zip(GROUPS, blocks, strict=True):
            self.pool.cache_partial_block(request, block, 16, group, 64)
        key = blocks[0].block_hash
        self.retention.add(key, blocks, turn)
        if not keep:
            self.pool.free_blocks(blocks)
        return key

    def has(self, name):
        return all(
            self.pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(name, group)) is not None
            for group in GROUPS
        )

    def fill(self, blocks):
        """Some request takes blocks and gives them back without a hash."""
        self.pool.free_blocks(self.pool.get_new_blocks(blocks))


@pytest.fixture
def cache():
    return Cache()


def test_a_turn_that_two_requests_resumed_from_is_kept_like_what_is_shared():
    cache = Cache(blocks=40, share=0.15)  # 6 blocks: three states
    document = cache.write(b"document", turn=True)
    for _ in range(2):
        cache.retention.resumed(document)
    for number in range(4):
        cache.write(b"turn %d" % number, turn=True)
    assert cache.has(b"document") and not cache.has(b"turn 1")


def test_turns_that_were_resumed_from_once_go_before_what_is_shared_by_their_last_use():
    cache = Cache(blocks=40, share=0.15)
    cache.write(b"document")
    keys = [cache.write(b"turn %d" % number, turn=True) for number in range(2)]
    for key in reversed(keys):
        cache.retention.resumed(key)
    cache.write(b"turn 2", turn=True)
    assert [cache.has(name) for name in (b"document", b"turn 0", b"turn 1", b"turn 2")] == [True, True, False, True]


def test_a_share_full_of_shared_states_gives_up_the_oldest():
    cache = Cache(blocks=40, share=0.15)
    for number in range(4):
        cache.write(b"document %d" % number)
    assert [cache.has(b"document %d" % number) for number in range(4)] == [False, True, True, True]


def test_a_state_fills_the_share_to_the_last_block():
    cache = Cache(blocks=40, share=0.15)
    for number in range(3):
        cache.write(b"document %d" % number)
    assert all(cache.has(b"document %d" % number) for number in range(3))
    assert cache.retention.make_room(6) and len(cache.retention) == 0
    assert not cache.retention.make_room(7)


def test_what_a_deeper_hit_builds_on_counts_as_used(cache):
    system = cache.write(b"system")
    for number in range(8):
        cache.write(b"turn %d" % number, turn=True)
    cache.retention.refresh([system])
    cache.fill(17)  # all but one state
    assert cache.has(b"system") and not cache.has(b"turn 7")


def test_all_states_together_hold_at_most_their_share():
    cache = Cache(blocks=40, share=0.2)  # 8 blocks: four states
    cache.write(b"system")
    for number in range(10):
        cache.write(b"turn %d" % number, turn=True)
        assert len(cache.retention) <= 4
    assert cache.has(b"system")  # turns go before it, however old it is
    assert [number for number in range(10) if cache.has(b"turn %d" % number)] == [7, 8, 9]
    assert cache.pool.get_num_free_blocks() == 39


def test_a_state_in_use_is_not_touched():
    cache = Cache(blocks=40, share=0.1)  # 4 blocks: two states
    cache.write(b"one", keep=True)
    cache.write(b"two", keep=True)
    assert not cache.retention.make_room(len(GROUPS))
    assert cache.has(b"one") and cache.has(b"two")


def test_a_share_too_small_for_one_state_keeps_none():
    assert not Cache(blocks=10, share=0.1).retention.make_room(len(GROUPS))


def test_what_vllm_evicted_is_forgotten(cache):
    key = cache.write(b"gone")
    cache.fill(19)
    cache.retention.prune()
    assert key not in cache.retention and not cache.retention.resumed(b"never")
