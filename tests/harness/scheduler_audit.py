"""The audit of vLLM's scheduler as it is: no connector, no adapters, no drafts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from engine_patches.scheduler import hooks
from engine_patches.scheduler.cache_groups import GroupRole, role_of
from tests.harness.audit import Core, Scene, random_traffic


def _take_rings_for_attention() -> None:
    """As their classes derive from each other."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    hooks.role_of = lambda each: GroupRole.ATTENTION if isinstance(each, FullAttentionManager) else role_of(each)


RINGS = "rings taken for attention"

DEFECTS = {RINGS: _take_rings_for_attention}


def scenes(model: str, wanted: dict[str, Any], options: dict[str, Any]) -> Iterator[Scene]:
    """`options`: arguments of `Core`."""
    for seed in wanted["seeds"]:
        core = Core(model, **options)
        yield Scene(f"seed {seed}", [core], partial(random_traffic, core, seed, wanted["chats"]))
