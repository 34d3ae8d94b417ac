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


def expect(what: str, found: Any, wanted: Any) -> None:
    """Raise `PreflightFailed` if something is `found` otherwise than `wanted`."""
    if found != wanted:
        raise PreflightFailed(f"{what}: {found!r}, expected {wanted!r}")


def _check() -> None:
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    recurrent, attention = 0, 1  # cache groups
    pool = BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=UNIT)
    hashes = [bytes([number]) * 32 for number in range(1, 10)]
    request: Any = SimpleNamespace(
        request_id="toy", block_hashes=hashes, all_token_ids=[0] * 9 * UNIT, mm_features=[], lora_request=None
    )
    state = MambaSpec(block_size=BLOCK, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    rows = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)

    def longest_hit(manager: Any, spec: Any, group: int) -> Any:
        common = dict(kv_cache_group_ids=[group], block_pool=pool, kv_cache_spec=spec, drop_eagle_block=False)
        return manager.find_longest_cache_hit(hashes, 9 * UNIT, alignment_tokens=UNIT, **common)[1]

    (block,) = pool.get_new_blocks(1)
    pool.cache_partial_block(request, block, 3 * UNIT, recurrent, BLOCK)
    expect("a state inside a block is found at", longest_hit(MambaManager, state, recurrent), 3 * UNIT)
    table = pool.get_new_blocks(2)
    manager = SimpleNamespace(
        req_to_blocks={"toy": table}, block_size=BLOCK, block_pool=pool, kv_cache_group_id=attention
    )
    keep_attention_keys(manager, request, [UNIT, 3 * UNIT])
    expect("attention rows inside a block are found at", longest_hit(FullAttentionManager, rows, attention), 3 * UNIT)
    pool.cache_full_blocks(request, table, 0, 1, BLOCK, attention)
    keep_attention_keys(manager, request, [UNIT, 3 * UNIT, 5 * UNIT])
    for position in (1, 3, 4, 5):
        found = pool.get_cached_block(hashes[position - 1], [attention])
        expect(f"the block of token {position * UNIT}", found, [table[0] if position <= 4 else table[1]])
    pool.free_blocks([block, *table])
    expect("a freed state is still found at", longest_hit(MambaManager, state, recurrent), 3 * UNIT)
    pool.get_new_blocks(5)
    expect("an evicted state is found at", longest_hit(MambaManager, state, recurrent), 0)
    expect("evicted attention rows are found at", longest_hit(FullAttentionManager, rows, attention), 0)


def _check_windows() -> None:
    """A request takes over a draft head's rows, or gets new blocks in their place, which are to be zeroed."""
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    hit, end = 13 * UNIT, 15 * UNIT  # the window before the hit begins in the second of four blocks
    pool = BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=UNIT)
    spec = left_out_spec()(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=100)
    manager = SlidingWindowManager(
        spec,
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=BLOCK,
        needs_kv_cache_zeroing=True,
    )
    windows = DraftWindows(pool, Grid(UNIT, UNIT), [manager], StepTime())

    def begins(name: str, table: list[Any]) -> list[Any]:
        manager.add_local_computed_blocks(name, table, hit, 0)
        new: list[Any] = manager.allocate_new_blocks(name, end, end)
        return new

    request: Any = SimpleNamespace(
        request_id="first",
        block_hashes=[bytes([number]) * 32 for number in range(1, 16)],
        all_token_ids=[0] * end,
        mm_features=[],
        lora_request=None,
        shared_prefix_boundary=0,
    )
    new = begins("first", [])
    expect("a window that is not held is", manager.req_to_blocks["first"], [pool.null_block, *new])
    expect("its blocks to zero are", manager.take_new_block_ids(), [block.block_id for block in new])
    manager.cache_blocks(request, end, replay_boundaries=[])
    expect("blocks of a window have keys", [block.block_hash for block in new], [None] * len(new))
    windows.keep(request, RequestState(), [hit])
    keys = windows.keys_at(request, hit)
    found = [pool.cached_block_hash_to_block.get_one_block(key) for key in keys]
    expect("the rows before a hit are found in", found, new)
    new_for_second = begins("second", [pool.null_block, *new])
    expect("a hit takes over", manager.req_to_blocks["second"], [pool.null_block, *new[:2], *new_for_second])
    expect("a hit copies", manager.take_pending_cow_copies(), [(new[2], new_for_second[0])])
