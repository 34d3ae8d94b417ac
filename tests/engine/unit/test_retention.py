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

    def use_up(self, left=0):
        """A request takes all blocks that hold no state within the share, and gives them back without a hash."""
        self.fill(self.pool.get_num_free_blocks() - len(GROUPS) * len(self.retention) - left)

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
    cache.use_up()
    assert cache.has(b"document") and not cache.has(b"turn 1")


def test_a_state_fills_the_share_to_the_last_block():
    cache = Cache(blocks=40, share=0.15)
    for number in range(3):
        cache.write(b"document %d" % number)
    assert all(cache.has(b"document %d" % number) for number in range(3))
    assert cache.retention.make_room(6) and len(cache.retention) == 0
    assert not cache.retention.make_room(7)


def test_a_state_in_use_is_not_touched():
    cache = Cache(blocks=40, share=0.1)  # 4 blocks: two states
    cache.write(b"one", keep=True)
    cache.write(b"two", keep=True)
    assert not cache.retention.make_room(len(GROUPS))
    assert cache.has(b"one") and cache.has(b"two")


def test_a_share_too_small_for_one_state_keeps_none():
    assert not Cache(blocks=10, share=0.1).retention.make_room(len(GROUPS))


def conversation(cache, turns, named=()):
    """Its turns, each of which goes on from the one before."""
    keys = []
    for number in range(turns):
        keys.append(cache.write(b"turn %d" % number, turn=True))
        if number:
            cache.retention.resumed(keys[-2])
            cache.retention.went_on(keys[-1], keys[-2], named)
    return keys


def test_a_conversation_leaves_all_but_its_last_two_turns_behind():
    cache = Cache(blocks=40)
    stranger = cache.write(b"stranger", turn=True)
    keys = conversation(cache, 5)
    assert [key in cache.retention for key in keys] == [False, False, False, True, True]
    assert all(cache.has(b"turn %d" % number) for number in range(5))  # as long as unused blocks are there
    cache.use_up()
    assert [cache.has(b"turn %d" % number) for number in range(5)] == [False, False, False, True, True]
    assert stranger in cache.retention and cache.has(b"stranger")  # older than all of them


def test_a_spare_state_that_somebody_uses_is_kept():
    cache = Cache()
    spare = cache.write(b"spare", turn=True)
    assert cache.retention.give_up(spare)
    assert cache.retention.resumed(spare) and spare in cache.retention
    assert cache.retention.give_up(spare) and spare in cache.retention


def test_a_state_whose_blocks_are_held_is_given_up_later():
    cache = Cache()
    spare = cache.write(b"spare", turn=True, keep=True)
    assert not cache.retention.give_up(spare) and spare in cache.retention


def window(cache, name):
    """A block of a draft head's rows."""
    (block,) = cache.pool.get_new_blocks(1)
    request = SimpleNamespace(block_hashes=[name], all_token_ids=[0] * 16)
    cache.pool.cache_partial_block(request, block, 16, 7, 64)
    cache.pool.free_blocks([block])
    return block, block.block_hash


def test_the_rows_before_a_state_count_as_used_whenever_it_does():
    cache = Cache(blocks=40)
    key, (rows, name), (gone, lost) = cache.write(b"system"), window(cache, b"system"), window(cache, b"another")
    cache.retention.add_window(key, [(rows, name), (gone, lost), (cache.pool.null_block, name)])
    cache.pool.evict_blocks({gone.block_id})
    cache.write(b"later")
    cache.retention.refresh([key])
    last = cache.pool.free_block_queue.get_all_free_blocks()[-3:]
    assert last == [*cache.retention._kept[key].blocks, rows]
    held = cache.pool.get_cached_block(b"system", [7])
    cache.pool.touch(held)
    cache.retention.refresh([key])  # a block that a request holds is in no queue
    assert held[0].ref_cnt == 1


def test_a_turn_goes_on_only_from_one_that_is_known():
    cache = Cache(blocks=40)
    keys = conversation(cache, 2)
    document = cache.write(b"document")
    later = cache.write(b"turn 2", turn=True)
    cache.retention.went_on(later, document, ())  # not a turn: what lies before it is nothing of this conversation
    cache.retention.went_on(b"never", later, ())
    assert all(key in cache.retention for key in (*keys, document, later))
