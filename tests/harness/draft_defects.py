"""Defects for engines that draft tokens, to show that the checks see them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest import mock

A_UNIT_EARLY = "a state is a unit early"

ACCEPTED_IGNORED = "counts of accepted drafts are ignored"

NO_COPY = "nothing is copied after sampling"

# Of heads with a window.
ROWS_NOT_KEPT = "a draft head's rows are not kept, and a hit without them is taken"

# Of the scheduler alone, for its audit.
REPLAY_TRUSTED = "computed again, an answer's blocks are registered as if it were generated"

SHORT_REPLAYS = "a preempted request may compute as few tokens again as a step verifies"

# Of the rows of a draft head with a window.
ZEROS_KEYED = "blocks that hold zeros carry keys of a window"

KEYS_TOO_SOON = "a window's rows are found before they are computed"

ANY_BLOCK = "a hit takes any block of a window"

NULLS_INSIDE = "a hit takes what is held of a window"

ROWS_LOST = "no rows of a window are kept, and none are computed again"

OF_WINDOWS = (ZEROS_KEYED, KEYS_TOO_SOON, ANY_BLOCK, NULLS_INSIDE, ROWS_LOST)

OF_THE_SCHEDULER = (A_UNIT_EARLY, REPLAY_TRUSTED, SHORT_REPLAYS, *OF_WINDOWS)


def plant(defect: str) -> None:
    """Plant a defect in this process, before its engine is made."""
    if defect == A_UNIT_EARLY:
        _write_a_unit_early()
    elif defect == ACCEPTED_IGNORED:
        _ignore_accepted()
    elif defect == NO_COPY:
        _copy_nothing_after_sampling()
    elif defect == ROWS_NOT_KEPT:
        from engine_patches.scheduler.draft_windows import DraftWindows
        from engine_patches.scheduler.states import States

        States.keep_windows = lambda *_: None
        DraftWindows._to_heal = lambda *_: None
    elif defect == REPLAY_TRUSTED:
        from engine_patches.scheduler import state_writes

        state_writes._generates = lambda request, start, _: start >= request.num_prompt_tokens
    elif defect == SHORT_REPLAYS:
        from engine_patches.scheduler import chunks

        chunks.no_short_replay = lambda request, start, num_new_tokens, verified: num_new_tokens
    elif defect in OF_WINDOWS:
        _spoil_windows(defect)
    else:
        raise ValueError(defect)


def evict_windows(pool: Any, groups: Collection[int]) -> None:
    """Take all blocks of some cache groups out of the cache."""
    from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_group_id

    for key, entry in [*pool.cached_block_hash_to_block._cache.items()]:
        if get_group_id(key) in groups:
            for block in [entry] if isinstance(entry, KVCacheBlock) else [*entry.values()]:
                pool._maybe_evict_cached_block(block)


def _spoil_windows(defect: str) -> None:
    from engine_patches.scheduler import preflight
    from engine_patches.scheduler.draft_windows import DraftWindows

    keep, block, keys_at = DraftWindows.keep, DraftWindows._block, DraftWindows.keys_at
    if defect in (ZEROS_KEYED, ROWS_LOST):
        DraftWindows._to_heal = lambda *_: None
    if defect == ROWS_LOST:
        DraftWindows.keep = lambda *_: {}
    elif defect == ZEROS_KEYED:

        def keep_all(self: Any, request: Any, state: Any, positions: Any) -> Any:
            state.drafts_from = 0
            return keep(self, request, state, positions)

        DraftWindows.keep = keep_all
    elif defect == KEYS_TOO_SOON:

        def keep_soon(self: Any, request: Any, state: Any, positions: Any) -> Any:
            """Under the names of rows that a later step computes, as far as there are blocks for them."""
            rows = min(len(table.req_to_blocks[request.request_id]) * table.block_size for table in self._managers)
            most = min(rows, len(request.block_hashes) * self._grid.unit)
            return keep(self, request, state, [min(each + 2 * self._grid.unit, most) for each in positions])

        DraftWindows.keep = keep_soon
        preflight.run = mock.Mock()  # which sees it, and refuses hints
    elif defect == ANY_BLOCK:
        DraftWindows._block = lambda self, key: (
            block(self, key) or next((each for each in self._pool.blocks[1:] if each.ref_cnt == 0), None)
        )
    else:
        DraftWindows.keys_at = lambda self, request, position: (
            keys_at(self, request, position)
            or (tuple(key for manager in self._managers for key in self._keys(manager, request, position)))
        )
        DraftWindows._block = lambda self, key: block(self, key) or self._pool.null_block


def _copy_nothing_after_sampling() -> None:
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    from tests.harness import draft_kernels

    original = MambaSpecDecodeGPUContext.run_fused_postprocess

    def without_copies(*args: Any, **options: Any) -> None:
        with mock.patch.object(draft_kernels, "_copy"):
            original(*args, **options)

    MambaSpecDecodeGPUContext.run_fused_postprocess = without_copies


def _write_a_unit_early() -> None:
    from engine_patches.scheduler import state_writes

    plan = state_writes._plan_writes

    def early(scheduler: Any, output: Any) -> Any:
        unit = scheduler.seamark.grid.alignment
        return {
            name: [write._replace(offset=max(write.offset - unit, 1)) for write in writes]
            for name, writes in plan(scheduler, output).items()
        }

    state_writes._plan_writes = early


def _ignore_accepted() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._update_states_after_model_execute

    def update(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        self.num_accepted_tokens.gpu.fill_(1)
        self.input_batch.num_accepted_tokens_cpu_tensor.fill_(1)
        return result

    GPUModelRunner._update_states_after_model_execute = update
