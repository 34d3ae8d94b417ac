"""Defects for engines that draft tokens, to show that the checks see them."""

from __future__ import annotations

from typing import Any
from unittest import mock

ADMITTED_ALONE = "hints are admitted and nothing else is done"

A_UNIT_EARLY = "a state is a unit early"

ACCEPTED_IGNORED = "counts of accepted drafts are ignored"

NO_COPY = "nothing is copied after sampling"

# Of heads with a window.
ROWS_NOT_KEPT = "a draft head's rows are not kept, and a hit without them is taken"

NOT_ZEROED = "new blocks are not zeroed"

NO_PREFLIGHT = "the preflight fails, so that hints are refused"

# Of the scheduler alone, for its audit.
REPLAY_TRUSTED = "computed again, an answer's blocks are registered as if it were generated"

SHORT_REPLAYS = "a preempted request may compute as few tokens again as a step verifies"

ALL = (ADMITTED_ALONE, A_UNIT_EARLY, ACCEPTED_IGNORED, NO_COPY)

OF_THE_SCHEDULER = (A_UNIT_EARLY, REPLAY_TRUSTED, SHORT_REPLAYS)


def plant(defect: str) -> None:
    """Plant a defect in this process, before its engine is made."""
    if defect == ADMITTED_ALONE:
        from engine_patches.scheduler import hooks
        from engine_patches.scheduler.checkpoints import Checkpoints
        from engine_patches.scheduler.grid import Grid

        hooks.Grid = lambda unit, alignment, *_: Grid(unit, alignment)
        hooks.Checkpoints = lambda verified, **more: Checkpoints(**more)
    elif defect == A_UNIT_EARLY:
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
    elif defect == NO_PREFLIGHT:
        from engine_patches.scheduler import preflight

        preflight.run = mock.Mock(side_effect=preflight.PreflightFailed(defect))
    elif defect == NOT_ZEROED:
        from vllm.v1.worker.utils import KVBlockZeroer

        KVBlockZeroer.zero_block_ids = lambda *_: None
    elif defect == REPLAY_TRUSTED:
        from engine_patches.scheduler import state_writes

        state_writes._generates = lambda request, start, _: start >= request.num_prompt_tokens
    elif defect == SHORT_REPLAYS:
        from engine_patches.scheduler import chunks

        chunks.no_short_replay = lambda request, start, num_new_tokens, verified: num_new_tokens
    else:
        raise ValueError(defect)


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
