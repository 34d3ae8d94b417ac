"""Which states go first, and that nothing in use is ever touched. On vLLM's own block pool."""

from types import SimpleNamespace

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import init_none_hash, make_block_hash_with_group_id

from engine_patches.scheduler.retention import KeptState, Retention

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


def test_turns_that_were_resumed_from_once_go_before_what_is_shared_by_their_last_use():
    cache = Cache(blocks=40, share=0.15)
    cache.write(b"document")
    keys = [cache.write(b"turn %d" % number, turn=True) for number in range(2)]
    for key in reversed(keys):
        cache.retention.resumed(key)
    cache.write(b"turn 2", turn=True)
    cache.use_up()
    assert [cache.has(name) for name in (b"document", b"turn 0", b"turn 1", b"turn 2")] == [True, True, False, True]


def test_a_share_full_of_shared_states_gives_up_the_oldest():
    cache = Cache(blocks=40, share=0.15)
    for number in range(4):
        cache.write(b"document %d" % number)
    cache.use_up()
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
    cache.use_up()
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


def test_what_goes_for_the_share_stays_while_unused_blocks_are_there_and_then_goes_first():
    cache = Cache(blocks=30, share=0.2)  # 6 blocks: three states
    rows = cache.pool.get_new_blocks(2)
    request = SimpleNamespace(block_hashes=[b"rows 0", b"rows 1"], all_token_ids=[0] * 32)
    cache.pool.cache_full_blocks(request, rows, 0, 2, 16, 1)
    cache.pool.free_blocks(rows)  # older than all states
    for number in range(8):
        cache.write(b"turn %d" % number, turn=True)
    assert all(cache.has(b"turn %d" % number) for number in range(8))
    cache.pool.get_new_blocks(11)  # those that hold nothing
    assert all(cache.has(b"turn %d" % number) for number in range(8))
    for number in range(5):  # the earliest first, each before the rows and before what the share holds
        assert cache.has(b"turn %d" % number)
        cache.pool.get_new_blocks(2)
        assert not cache.has(b"turn %d" % number)
    assert all(row.block_hash is not None for row in rows)
    assert all(cache.has(b"turn %d" % number) for number in (5, 6, 7))
    cache.pool.get_new_blocks(2)
    assert all(row.block_hash is None for row in rows)


def test_the_free_list_stays_whole():
    cache = Cache(blocks=30, share=0.2)
    for number in range(8):
        cache.write(b"turn %d" % number, turn=True)
        queue = cache.pool.free_block_queue
        blocks = queue.get_all_free_blocks()
        assert len({block.block_id for block in blocks}) == len(blocks) == queue.num_free_blocks == 29
        backwards, block = [], queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            backwards.append(block)
            block = block.prev_free_block
        assert backwards == blocks[::-1]


def test_a_state_that_was_given_up_and_is_used_counts_again():
    cache = Cache(blocks=40, share=0.15)  # three states
    keys = [cache.write(b"turn %d" % number, turn=True) for number in range(5)]
    assert keys[0] not in cache.retention and keys[1] not in cache.retention
    assert cache.retention.resumed(keys[0])
    cache.retention.refresh([keys[1]])
    assert keys[0] in cache.retention and keys[1] in cache.retention
    cache.write(b"turn 5", turn=True)
    assert len(cache.retention) == 3
    cache.use_up()
    assert [number for number in range(6) if cache.has(b"turn %d" % number)] == [0, 1, 5]


def test_a_state_of_which_vllm_took_a_block_is_not_found_and_its_blocks_stay_where_they_are():
    cache = Cache(blocks=40, share=0.15)
    keys = [cache.write(b"turn %d" % number, turn=True) for number in range(3)]
    retention, queue = cache.retention, cache.pool.free_block_queue
    lost = retention._turns[keys[0]].blocks
    cache.pool.evict_blocks({lost[1].block_id})
    before = queue.get_all_free_blocks()
    assert retention.make_room(len(GROUPS)) and len(retention) == 2
    assert queue.get_all_free_blocks() == before
    assert not retention.resumed(keys[0])


def test_a_turn_that_later_hints_still_name_outlives_those_that_no_hint_names():
    """The end of a user's turn before a tool loop: each request of the loop names it, and resumes behind it."""
    cache = Cache(blocks=40, share=0.2)  # four states
    cache.write(b"system")
    question = cache.write(b"question", turn=True)
    for number in range(6):
        key = cache.write(b"call %d" % number, turn=True)
        cache.retention.resumed(key)
        cache.retention.refresh([question])
    cache.use_up()
    assert cache.has(b"system") and cache.has(b"question")
    assert [number for number in range(6) if cache.has(b"call %d" % number)] == [4, 5]


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


def test_a_turn_that_a_hint_names_or_two_have_resumed_from_is_not_left_behind():
    cache = Cache(blocks=40)
    named = cache.write(b"turn 0", turn=True)
    keys = conversation(cache, 3, named=[named])
    assert named in cache.retention
    cache.retention.resumed(keys[1])
    keys.append(cache.write(b"turn 3", turn=True))
    cache.retention.resumed(keys[2])
    cache.retention.went_on(keys[3], keys[2], ())
    assert keys[1] in cache.retention


def test_a_turn_in_use_is_not_left_behind():
    cache = Cache(blocks=40)
    keys = [cache.write(b"turn 0", turn=True, keep=True)]
    for number in (1, 2):
        keys.append(cache.write(b"turn %d" % number, turn=True))
        cache.retention.went_on(keys[-1], keys[-2], ())
    assert keys[0] in cache.retention


def test_a_full_share_costs_a_new_state_a_look_at_few_others(monkeypatch):
    """However many there are: prompts that nobody shares would pay for all of them."""
    cache = Cache(blocks=4000, share=0.5)  # 1,000 states, of which every third is a turn
    for number in range(1000):
        cache.write(b"%d" % number, turn=number % 3 == 0)
    looks = 0

    def counted(seen):
        def look(state):
            nonlocal looks
            looks += 1
            return seen.fget(state)

        return property(look)

    monkeypatch.setattr(KeptState, "cached", counted(KeptState.cached))
    monkeypatch.setattr(KeptState, "free", counted(KeptState.free))
    for number in range(1000, 2000):
        cache.write(b"%d" % number, turn=number % 3 == 0)
    assert len(cache.retention) == 1000
    assert looks < 30 * 1000


def test_given_up_states_go_in_order_though_the_last_of_them_is_used_again():
    cache = Cache(blocks=60, share=0.1)  # three states
    keys = [cache.write(b"turn %d" % number, turn=True) for number in range(6)]
    assert cache.retention.resumed(keys[2])  # given up last
    for number in range(6, 9):
        cache.write(b"turn %d" % number, turn=True)
    cache.use_up()
    assert len(cache.retention) == 3 and all(cache.has(b"turn %d" % number) for number in (7, 8))
    backwards = cache.pool.free_block_queue.get_all_free_blocks()
    assert len(backwards) == cache.pool.get_num_free_blocks() == 59


def test_a_state_that_is_given_up_at_once_goes_before_all_that_is_of_use_and_counts_for_no_share():
    cache = Cache(blocks=12, share=0.5)  # 6 blocks: three states
    turn, spare = cache.write(b"turn", turn=True), cache.write(b"spare", turn=True)
    assert cache.retention.give_up(spare) and spare not in cache.retention
    for name in (b"one", b"two"):
        cache.write(name)
    assert turn in cache.retention and cache.has(b"spare")  # nothing went for it
    cache.fill(cache.pool.get_num_free_blocks() - 3 * len(GROUPS))
    assert cache.has(b"turn") and not cache.has(b"spare")


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


def test_blocks_are_idle_while_the_next_ones_hold_nothing_of_use():
    cache = Cache(blocks=9, share=0.5)  # 4 blocks: two states
    assert cache.retention.has_idle(len(GROUPS)) and not cache.retention.has_idle(6)
    spare = cache.write(b"spare", turn=True)
    cache.retention.give_up(spare)
    cache.write(b"turn", turn=True)
    held = cache.pool.get_new_blocks(cache.pool.get_num_free_blocks() - 2 * len(GROUPS))
    assert cache.retention.has_idle(len(GROUPS))  # the spare one
    held += cache.pool.get_new_blocks(len(GROUPS))
    assert not cache.retention.has_idle(len(GROUPS))
    cache.pool.free_blocks(held)


def test_a_share_that_is_full_has_nothing_idle():
    cache = Cache(blocks=40, share=0.1)  # 4 blocks: two states
    for name in (b"one", b"two"):
        cache.write(name)
    assert not cache.retention.has_idle(len(GROUPS))


def test_a_turn_that_others_are_shown_to_share_is_kept_like_what_is_shared():
    cache = Cache(blocks=40, share=0.15)  # three states
    shared = cache.write(b"shared", turn=True)
    assert cache.retention.resumed(shared, shared=True)
    for number in range(3):
        cache.write(b"turn %d" % number, turn=True)
    cache.use_up()
    assert cache.has(b"shared") and not cache.has(b"turn 0")


def test_a_cleared_cache_has_all_of_its_share_and_knows_none_of_its_states():
    cache = Cache(blocks=40, share=0.15)
    keys = [cache.write(b"turn %d" % number, turn=number < 4) for number in range(5)]
    cache.retention.clear()
    assert len(cache.retention) == 0 and not any(key in cache.retention for key in keys)
    free = cache.pool.free_block_queue.get_all_free_blocks()
    assert cache.retention.has_idle(6) and not cache.retention.has_idle(7) and cache.retention.make_room(6)
    assert cache.pool.free_block_queue.get_all_free_blocks() == free  # nothing went for it
    cache.pool.get_new_blocks(29)  # of the ten blocks with states none is known to be given up
    assert not cache.retention.has_idle(2) and not cache.retention.resumed(keys[0])


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


def test_rows_before_a_state_that_is_not_known_are_not_remembered():
    cache = Cache(blocks=40)
    key, found = cache.write(b"system"), window(cache, b"system")
    cache.retention.clear()
    cache.retention.add_window(key, [found])
    cache.retention.add(key, cache.pool.get_cached_block(b"system", list(GROUPS)), False)
    before = cache.pool.free_block_queue.get_all_free_blocks()
    cache.retention.refresh([key])
    after = cache.pool.free_block_queue.get_all_free_blocks()
    assert after.index(found[0]) == before.index(found[0]) - len(GROUPS)


def test_a_state_that_is_registered_again_counts_once():
    cache = Cache(blocks=40, share=0.15)  # three states
    for _ in range(3):
        key = cache.write(b"same", turn=True)
    assert len(cache.retention) == 1 and key in cache.retention
    assert cache.retention.has_idle(4) and not cache.retention.has_idle(5)


def test_a_turn_goes_on_only_from_one_that_is_known():
    cache = Cache(blocks=40)
    keys = conversation(cache, 2)
    document = cache.write(b"document")
    later = cache.write(b"turn 2", turn=True)
    cache.retention.went_on(later, document, ())  # not a turn: what lies before it is nothing of this conversation
    cache.retention.went_on(b"never", later, ())
    assert all(key in cache.retention for key in (*keys, document, later))
