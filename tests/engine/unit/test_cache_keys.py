"""No attention group of a hit may lead to rows that another request of the same step has yet to write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.scheduler.cache_keys import (
    avoid_unwritten_rows,
    keep_hinted_keys,
    key_at,
)
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.held_keys import AttentionGroup

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


@pytest.mark.parametrize("checkpoints", [{}, {"seamark": SimpleNamespace(states=None)}], ids=["before", "attention"])
def test_a_cache_without_states_is_left_to_vllm(checkpoints):
    cached = []

    def cache_blocks(manager, request, num_tokens, retention_interval, *, replay_boundaries):
        cached.append((num_tokens, retention_interval, replay_boundaries))

    keep_hinted_keys(cache_blocks)(SimpleNamespace(**checkpoints), "a request", 64, 2, replay_boundaries=(64,))
    assert cached == [(64, 2, (64,))]
