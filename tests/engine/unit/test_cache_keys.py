"""No attention group of a hit may lead to rows that another request of the same step has yet to write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.scheduler.cache_keys import (
    avoid_unwritten_rows,
    avoid_unwritten_rows_with_a_connector,
    keep_attention_keys,
    keep_hinted_keys,
    key_at,
    look_up,
)
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import AttentionGroup
from engine_patches.scheduler.request_state import RequestState, Wish

UNIT, HIT = 16, 80  # tokens


def block(number):
    return SimpleNamespace(block_id=number)


def found_after(groups, copied, unwritten, cached, drop=0):
    """Blocks and tokens that a lookup gives, if its hit would copy the blocks `copied` (by group)."""
    request, blocks, manager = hit_of(groups, copied, unwritten, cached, drop)
    found, tokens, _ = avoid_unwritten_rows(lambda *_: (blocks, HIT, 0))(manager, request)
    assert request.seamark_local_hit == tokens
    if tokens == 0:
        assert found == "none"
        return None
    return {group: [each.block_id for each in found.blocks[group]] for group in groups}


def hit_of(groups, copied, unwritten, cached, drop=0) -> Any:
    """A request, the blocks of its hit, and the manager of the cache."""
    request = SimpleNamespace(block_hashes=[bytes([number]) * 32 for number in range(10)])
    blocks = SimpleNamespace(blocks={group: [block(number)] if number else [] for group, number in copied.items()})
    keys = {key_at(request, HIT + drop, UNIT, group): entry for group, entry in cached.items()}
    manager = SimpleNamespace(
        seamark=SimpleNamespace(
            grid=Grid(UNIT, UNIT),
            states=SimpleNamespace(
                unwritten=unwritten,
                keys=SimpleNamespace(attention=[AttentionGroup(group, size, drop) for group, size in groups.items()]),
            ),
        ),
        block_pool=SimpleNamespace(cached_block_hash_to_block=SimpleNamespace(_cache=keys)),
        empty_kv_cache_blocks="none",
    )
    return request, blocks, manager


@pytest.mark.parametrize("first", [{1: 64}, {1: 16}], ids=["rows are written", "the hit ends at a block's edge"])
def test_the_last_attention_group_is_checked_whatever_the_first_has(first):
    groups = first | {3: 64}
    assert found_after(groups, {1: 7, 3: 8}, {}, {}) == {1: [7], 3: [8]}
    assert found_after(groups, {1: 7, 3: 8}, {8: 64}, {3: block(8)}) is None
    assert found_after(groups, {1: 7, 3: 8}, {8: 64}, {3: {8: block(8), 9: block(9)}}) == {1: [7], 3: [9]}


def test_a_group_without_a_block_to_copy_does_not_end_the_check():
    assert found_after({1: 64, 3: 64}, {1: 0, 3: 8}, {8: 64}, {}) is None


def test_rows_before_the_hit_are_enough():
    assert found_after({1: 64}, {1: 7}, {7: HIT}, {}) == {1: [7]}
    assert found_after({1: 64}, {1: 7}, {7: HIT - 1}, {}) is None


@pytest.mark.parametrize("checkpoints", [{}, {"seamark": SimpleNamespace(states=None)}], ids=["before", "attention"])
def test_a_cache_without_states_is_left_to_vllm(checkpoints):
    cached = []

    def cache_blocks(manager, request, num_tokens, retention_interval, *, replay_boundaries):
        cached.append((num_tokens, retention_interval, replay_boundaries))

    keep_hinted_keys(cache_blocks)(SimpleNamespace(**checkpoints), "a request", 64, 2, replay_boundaries=(64,))
    assert cached == [(64, 2, (64,))]


def test_beside_a_draft_head_a_written_block_is_found_by_the_key_past_the_hit():
    assert found_after({1: 64}, {1: 7}, {7: HIT - 1}, {1: block(9)}, drop=UNIT) == {1: [9]}


@pytest.mark.parametrize("rows_are_written", [True, False])
def test_a_shorter_hit_is_looked_up_as_carefully(rows_are_written):
    request, blocks, manager = hit_of({1: 64}, {1: 7}, {} if rows_are_written else {7: 0}, {})
    asked = []

    def longest(hashes, at_most):
        asked.append((hashes, at_most))
        return "computed", HIT, 0

    manager.coordinator = SimpleNamespace(find_longest_cache_hit=longest)
    manager.create_kv_cache_blocks = {"computed": blocks}.get
    assert look_up(manager, request, 99) == ((blocks, HIT, 0) if rows_are_written else ("none", 0, 0))
    assert asked == [(request.block_hashes, 99)]


@pytest.mark.parametrize(("hit", "unwritten", "own"), [(HIT, {}, True), (0, {7: 0}, True), (HIT, {7: 0}, False)])
def test_a_connectors_lookup_is_kept_unless_it_leads_to_rows_that_are_not_written(hit, unwritten, own):
    request, blocks, manager = hit_of({1: 64}, {1: 7}, unwritten, {})
    manager.get_computed_blocks = lambda request, *args: (args, "the other lookup", 0)
    found = avoid_unwritten_rows_with_a_connector(lambda *_: (blocks, hit, 0, True))(manager, request, "longest")
    assert found == ((blocks, hit, 0, True) if own else (("longest",), "the other lookup", 0, False))


class Rows:
    """A manager of attention rows in blocks of 64 tokens, of which request `r` has three; it records what gets keys."""

    block_size, kv_cache_group_id = 64, 1

    def __init__(self, *, copies: tuple[int, ...] = (), full: int = 0, full_after: int = 0) -> None:
        self.keyed: list[tuple[int, int]] = []  # tokens, block
        self.req_to_blocks = {"r": [block(number) for number in (10, 11, 12)]}
        self.block_pool = SimpleNamespace(cache_partial_block=self._keep)
        self.num_cached_block = {"r": full} if full else {}
        self._pending_cow_copies = [(block(99), block(number)) for number in copies]
        self._full_after = full_after

    def _keep(self, *, request, block, num_tokens, kv_cache_group_id, block_size) -> None:
        assert (kv_cache_group_id, block_size) == (1, 64)
        self.keyed.append((num_tokens, block.block_id))

    def cache_blocks(self, request, num_tokens, retention_interval=None, *, replay_boundaries) -> None:
        """vLLM's own."""
        self.num_cached_block["r"] = self._full_after


def test_keys_inside_a_block_are_kept_longest_first_and_edges_are_left_to_vllm():
    rows = Rows()
    keep_attention_keys(rows, SimpleNamespace(request_id="r"), iter([16, 64, 100, 32, 128, 191, 192, 200, 256]))
    assert rows.keyed == [(191, 12), (100, 11), (32, 10), (16, 10)]


def kept(rows: Rows, num_tokens: int, positions: list[int], start: int = 0, prompt: int = 180) -> dict[int, int]:
    """The rows that this step has yet to write, by block, after it has cached so many tokens; keys are on `rows`."""
    states = SimpleNamespace(unwritten={}, positions_with_keys=lambda state, manager, most: positions)
    state = RequestState(Wish(), chunk_start=start)
    rows.seamark = SimpleNamespace(states=states, state_of=lambda request: state)
    request = SimpleNamespace(request_id="r", num_prompt_tokens=prompt)
    keep_hinted_keys(Rows.cache_blocks)(rows, request, num_tokens, replay_boundaries=())
    return states.unwritten


def test_keys_that_lead_to_states_are_kept_in_blocks_that_were_not_full_before():
    rows = Rows(full=1, full_after=2)
    assert kept(rows, 170, [32, 80, 144], start=70) == {11: 70, 12: 70}
    assert rows.keyed == [(144, 12), (80, 11)]
    assert kept(rows := Rows(), 170, [200]) == {10: 0, 11: 0, 12: 0} and rows.keyed == []


def test_a_private_copy_has_no_rows_yet_and_only_the_key_at_the_chunks_end():
    rows = Rows(copies=(12,))
    assert kept(rows, 150, [80, 144, 150], start=140) == {12: 0}
    assert rows.keyed == [(150, 12), (80, 11)]


@pytest.mark.parametrize(
    ("start", "how", "is_looked_at"),
    [
        (180, {"full": 2, "full_after": 2}, False),  # an answer's token inside a block
        (180, {"full": 2, "full_after": 3}, True),
        (180, {"full": 2, "full_after": 2, "copies": (12,)}, True),
        (179, {"full": 2, "full_after": 2}, True),
    ],
)
def test_a_step_that_generates_inside_a_block_costs_nothing(start, how, is_looked_at):
    rows = Rows(**how)
    assert bool(kept(rows, 181, [144], start=start)) is is_looked_at
    assert rows.keyed == ([(144, 12)] if is_looked_at and not rows._pending_cow_copies else [])
