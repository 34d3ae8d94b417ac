"""A check on a toy cache before the first request: what this room relies on, done once with vLLM's own classes.

Shapes can match though behaviour has changed. The check writes a state and attention keys inside a block, looks them up
as a request would, and lets them be evicted. If any result differs, no state is ever written.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine_patches.scheduler.cache_keys import keep_attention_keys
from engine_patches.scheduler.draft_windows import DraftWindows, left_out_spec
from engine_patches.scheduler.planner import Grid, RequestState
from engine_patches.scheduler.step_time import StepTime

UNIT, BLOCK = 16, 64  # tokens


class PreflightFailed(Exception):
    """vLLM's cache behaves otherwise than Seamark relies on; the message says how."""


def run(*, windows: bool = False) -> None:
    """Raise `PreflightFailed` if this vLLM's cache behaves otherwise. `windows`: a draft head has some."""
    try:
        _check()
        if windows:
            _check_windows()
    except PreflightFailed:
        raise
    except Exception as error:
        raise PreflightFailed(f"{type(error).__name__}: {error}") from error


def _expect(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        raise PreflightFailed(f"{what}: {found!r}, expected {wanted!r}")


def _toy(name: str, units: int) -> Any:
    """As much of a vLLM `Request` of so many units as its cache looks at."""
    hashes = [bytes([number]) * 32 for number in range(1, units + 1)]
    tokens = [0] * units * UNIT
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, all_token_ids=tokens, mm_features=[], lora_request=None
    )


def _check() -> None:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    recurrent, attention = 0, 1  # cache groups
    pool = BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=UNIT)
    request = _toy("toy", 9)
    state = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    rows = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)

    def longest_hit(manager: Any, spec: Any, group: int) -> Any:
        common = dict(kv_cache_group_ids=[group], block_pool=pool, kv_cache_spec=spec, drop_eagle_block=False)
        return manager.find_longest_cache_hit(request.block_hashes, 9 * UNIT, alignment_tokens=UNIT, **common)[1]

    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(request, block, 3 * UNIT, recurrent, BLOCK)
    _expect("a state inside a block is found at", longest_hit(MambaManager, state, recurrent), 3 * UNIT)
    table = pool.get_new_blocks(2)
    manager = SimpleNamespace(
        req_to_blocks={"toy": table}, block_size=BLOCK, block_pool=pool, kv_cache_group_id=attention
    )
    keep_attention_keys(manager, request, [UNIT, 3 * UNIT])
    _expect("attention rows inside a block are found at", longest_hit(FullAttentionManager, rows, attention), 3 * UNIT)
    pool.cache_full_blocks(request, table, 0, 1, BLOCK, attention)
    keep_attention_keys(manager, request, [UNIT, 3 * UNIT, 5 * UNIT])
    for position in (1, 3, 4, 5):
        found = pool.get_cached_block(request.block_hashes[position - 1], [attention])
        _expect(f"the block of token {position * UNIT}", found, [table[0] if position <= 4 else table[1]])
    pool.free_blocks([block, *table])
    _expect("a freed state is still found at", longest_hit(MambaManager, state, recurrent), 3 * UNIT)
    pool.get_new_blocks(5)
    _expect("an evicted state is found at", longest_hit(MambaManager, state, recurrent), 0)
    _expect("evicted attention rows are found at", longest_hit(FullAttentionManager, rows, attention), 0)


def _check_windows() -> None:
    """A request takes over a draft head's rows, or gets new blocks in their place, which are to be zeroed."""
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    request, hit, end = _toy("first", 15), 13 * UNIT, 15 * UNIT  # its window begins in the second of four blocks
    request.shared_prefix_boundary = 0
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=UNIT)
    spec = left_out_spec()(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=100)
    options = dict(enable_caching=True, kv_cache_group_id=0, scheduler_block_size=BLOCK, needs_kv_cache_zeroing=True)
    manager = SlidingWindowManager(spec, block_pool=pool, **options)
    windows = DraftWindows(pool, Grid(UNIT, UNIT), [manager], StepTime())

    def begins(name: str, table: list[Any]) -> list[Any]:
        manager.add_local_computed_blocks(name, table, hit, 0)
        new: list[Any] = manager.allocate_new_blocks(name, end, end)
        return new

    new = begins("first", [])
    _expect("a window that is not held is", manager.req_to_blocks["first"], [pool.null_block, *new])
    _expect("its blocks to zero are", manager.take_new_block_ids(), [block.block_id for block in new])
    manager.cache_blocks(request, end, replay_boundaries=[])
    _expect("blocks of a window have keys", [block.block_hash for block in new], [None] * len(new))
    windows.keep(request, RequestState(), [hit])
    keys = windows.keys_at(request, hit)
    found = [pool.cached_block_hash_to_block.get_one_block(key) for key in keys]
    _expect("the rows before a hit are found in", found, new)
    new_for_second = begins("second", [pool.null_block, *new])
    _expect("a hit takes over", manager.req_to_blocks["second"], [pool.null_block, *new[:2], *new_for_second])
    _expect("a hit copies", manager.take_pending_cow_copies(), [(new[2], new_for_second[0])])
