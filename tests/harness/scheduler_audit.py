"""The audit of vLLM's scheduler as it is: no connector, no adapters, no drafts."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from engine_patches.scheduler import cache_keys, hooks, state_writes
from engine_patches.scheduler.cache_groups import GroupRole, role_of
from tests.harness.audit import Core, Scene, random_traffic


def _take_rings_for_attention() -> None:
    """As their classes derive from each other."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    hooks.role_of = lambda each: GroupRole.ATTENTION if isinstance(each, FullAttentionManager) else role_of(each)


def _take_a_rank_for_all() -> None:
    """Keys inside an attention block are placed as if the rows of one rank were all that the block has."""
    keep = cache_keys.keep_attention_keys

    def keep_attention_keys(manager: Any, request: Any, positions: Iterable[int]) -> None:
        of_a_rank = copy.copy(manager)
        of_a_rank.block_size = manager.kv_cache_spec.block_size
        keep(of_a_rank, request, positions)

    cache_keys.keep_attention_keys = state_writes.keep_attention_keys = keep_attention_keys


RINGS, RANK = "rings taken for attention", "a rank taken for all"

DEFECTS = {RINGS: _take_rings_for_attention, RANK: _take_a_rank_for_all}


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: arguments of `Core`."""
    for seed in wanted["seeds"]:
        core = Core(model, **options)
        yield Scene(f"seed {seed}", [core], partial(random_traffic, core, seed, wanted["chats"]))
