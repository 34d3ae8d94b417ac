"""Recurrent states of Mamba2 layers on a CPU, whose kernel knows no chunks and stops where a state is wanted.

The kernel takes the states that rows begin with, and leaves those of their ends in the same place. So it runs over one
chunk of a row after the other, and what is wanted of a row's state is copied in between. There a cut changes no
rounding, and vLLM gets the last states as ever. The convolution's part of a state is its last inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from engine_patches.footprint import RUNNING
from engine_patches.forward.conv_states import Parts, StatePlan, Wanted
from engine_patches.forward.step_writes import PrefillRow
from engine_patches.ledger import Function

Keep = Callable[[int, Any], None]  # given a chunk's number and the state at its end, which will not last


class KernelRun(NamedTuple):
    """Chunks of different rows, which follow each other: the kernel runs over all of them at once."""

    tokens: slice
    rows: slice
    starts: Any  # of the chunks, and the end of the last: tokens behind the run's first, (chunks + 1,), int32
    first_chunk: int


def kernel_runs(bounds: Sequence[int], row_of: Sequence[int]) -> list[KernelRun]:
    """Runs over chunks. `bounds`: where each begins, and where the last one ends (tokens). `row_of`: each one's row."""
    import torch

    runs = []
    first = 0
    while first < len(row_of):
        last = first + 1
        while last < len(row_of) and row_of[last] != row_of[last - 1]:
            last += 1
        starts = torch.tensor([bound - bounds[first] for bound in bounds[first : last + 1]], dtype=torch.int32)
        rows = slice(row_of[first], row_of[last - 1] + 1)
        runs.append(KernelRun(slice(bounds[first], bounds[last]), rows, starts, first))
        first = last
    return runs


def scan_in_runs(scan: Callable[[], Any], runs: Sequence[KernelRun], keep: Keep) -> Any:
    """What `scan()` returns, a scan of vLLM's; `keep` is called for each chunk, in order."""
    RUNNING.kernel = runs, keep
    try:
        result = scan()
        if RUNNING.kernel is not None:
            raise RuntimeError("seamark: vLLM's scan on a CPU no longer calls its kernel by its name")
        return result
    finally:
        RUNNING.kernel = None


def kernel_in_runs(original: Function) -> Function:
    """Replacement of the kernel of that scan."""

    def mamba_chunk_scan_fwd_cpu(
        out: Any, row_states: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, cu_seqlens: Any
    ) -> None:
        if RUNNING.kernel is None:
            original(out, row_states, x, dt, A, B, C, D, z, cu_seqlens)
            return
        (runs, keep), RUNNING.kernel = RUNNING.kernel, None
        for run in runs:
            part, states = run.tokens, row_states[run.rows]
            part_of_z = None if z is None else z[part]
            original(out[part], states, x[part], dt[part], A, B[part], C[part], D, part_of_z, run.starts)
            for chunk, state in enumerate(states.unbind(), run.first_chunk):
                keep(chunk, state)

    return mamba_chunk_scan_fwd_cpu


@dataclass(frozen=True)
class CpuScanPlan(StatePlan):
    """Where a step's states are found. Tokens and rows count the step's prefills only."""

    runs: Sequence[KernelRun]
    state_at: Mapping[int, int]  # number of the state, by that of the chunk that ends there

    def scan(
        self, scan: Function, ssm_state: Any, blocks: Any, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        """As `ScanPlan.scan`."""
        targets: list[int] = blocks.tolist()

        def keep(chunk: int, state: Any) -> None:
            if chunk in self.state_at:
                ssm_state[targets[self.state_at[chunk]]] = state

        return scan_in_runs(partial(scan, *inputs, **options), self.runs, keep)


def plan_cpu_scan(rows: Mapping[int, PrefillRow], wanted: Wanted, parts: Parts) -> CpuScanPlan:
    """How the kernel has to run for the states of these prefills; `parts`: of the plan."""
    bounds = [0]
    row_of: list[int] = []
    state_at: dict[int, int] = {}
    for number, (row, prefill) in enumerate(rows.items()):
        offsets = {write.offset for of_row, write in wanted if of_row == row}
        for offset in sorted({*offsets, prefill.tokens}):
            if offset in offsets:
                state_at[len(row_of)] = len(state_at)
            row_of.append(number)
            bounds.append(prefill.start + offset)
    return CpuScanPlan(*parts, kernel_runs(bounds, row_of), state_at)
