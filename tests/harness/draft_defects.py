"""Defects for engines that draft tokens, to show that the checks see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

A_UNIT_EARLY = "a state is a unit early"

ACCEPTED_IGNORED = "counts of accepted drafts are ignored"

NO_COPY = "nothing is copied after sampling"

# Of heads with a window.
ROWS_NOT_KEPT = "a draft head's rows are not kept, and a hit without them is taken"

DEFECTS: dict[str, Callable[[], None]] = {}


def plant(defect: str) -> None:
    """Plant a defect in this process, before its engine is made."""
    DEFECTS[defect]()


def _defect(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    return lambda plants: DEFECTS.setdefault(name, plants)


@_defect(A_UNIT_EARLY)
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


@_defect(ACCEPTED_IGNORED)
def _ignore_accepted() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._update_states_after_model_execute

    def update(self: Any, *args: Any, **options: Any) -> Any:
        result = original(self, *args, **options)
        self.num_accepted_tokens.gpu.fill_(1)
        self.input_batch.num_accepted_tokens_cpu_tensor.fill_(1)
        return result

    GPUModelRunner._update_states_after_model_execute = update


@_defect(NO_COPY)
def _copy_nothing_after_sampling() -> None:
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    from tests.harness import draft_kernels

    original = MambaSpecDecodeGPUContext.run_fused_postprocess

    def without_copies(*args: Any, **options: Any) -> None:
        with mock.patch.object(draft_kernels, "_copy"):
            original(*args, **options)

    MambaSpecDecodeGPUContext.run_fused_postprocess = without_copies


@_defect(ROWS_NOT_KEPT)
def _keep_no_windows() -> None:
    from engine_patches.scheduler.states import States

    States.keep_windows = lambda *_: None
    _heal_nothing()


@_defect("computed again, an answer's blocks are registered as if it were generated")
def _trust_replays() -> None:
    from engine_patches.scheduler import state_writes

    state_writes._generates = lambda request, start, _: start >= request.num_prompt_tokens


@_defect("a preempted request may compute as few tokens again as a step verifies")
def _replay_in_short_steps() -> None:
    from engine_patches.scheduler import state_writes

    state_writes.no_short_replay = lambda request, start, num_new_tokens, verified: num_new_tokens


def _heal_nothing() -> Any:
    from engine_patches.scheduler.draft_windows import DraftWindows

    DraftWindows._to_heal = lambda *_: None
    return DraftWindows


@_defect("no rows of a window are kept, and none are computed again")
def _lose_rows() -> None:
    _heal_nothing().keep = lambda *_: {}


@_defect("blocks that hold zeros carry keys of a window")
def _key_zeros() -> None:
    windows = _heal_nothing()
    keep = windows.keep

    def keep_all(self: Any, request: Any, state: Any, positions: Any) -> Any:
        state.drafts_from = 0
        return keep(self, request, state, positions)

    windows.keep = keep_all


@_defect("a window's rows are found before they are computed")
def _key_too_soon() -> None:
    """Under the names of rows that a later step computes, as far as there are blocks for them."""
    from engine_patches.scheduler import hooks
    from engine_patches.scheduler.draft_windows import DraftWindows

    keep = DraftWindows.keep

    def keep_soon(self: Any, request: Any, state: Any, positions: Any) -> Any:
        rows = min(len(table.req_to_blocks[request.request_id]) * table.block_size for table in self._managers)
        most = min(rows, len(request.block_hashes) * self._grid.unit)
        return keep(self, request, state, [min(each + 2 * self._grid.unit, most) for each in positions])

    DraftWindows.keep = keep_soon
    hooks.preflight = mock.Mock(return_value="")  # which sees it, and refuses hints


@_defect("a hit takes any block of a window")
def _take_any_block() -> None:
    from engine_patches.scheduler.draft_windows import DraftWindows

    block = DraftWindows._block
    DraftWindows._block = lambda self, key: (
        block(self, key) or next((each for each in self._pool.blocks[1:] if each.ref_cnt == 0), None)
    )


@_defect("a hit takes what is held of a window")
def _take_nulls() -> None:
    from engine_patches.scheduler.draft_windows import DraftWindows

    block, keys_at = DraftWindows._block, DraftWindows.keys_at
    DraftWindows.keys_at = lambda self, request, position: (
        keys_at(self, request, position)
        or (tuple(key for manager in self._managers for key in self._keys(manager, request, position)))
    )
    DraftWindows._block = lambda self, key: block(self, key) or self._pool.null_block
