"""Recurrent states of Mamba2 layers, read from a scan that nobody cuts.

Mamba2's kernels scan a prompt in chunks (64 to 256 tokens) and have the state at every chunk's end in hand anyway
(`return_intermediate_states`). A state wanted at such an end is copied. For one wanted inside a chunk, a second scan
runs from the last end before it over the few tokens up to it, beside the main one. So the step's own outputs are
computed as vLLM alone computes them, bit for bit.

A CPU's kernel knows no chunks. It takes the states that rows begin with, and leaves those of their ends in the same
place. So it runs over one part of a row after the other, and what is wanted of a row's state is copied in between.

The way of a step: `plan_scan_states` and `take_states_over` put `KeptStates` on each cache group's metadata;
`mamba2_with_states` hands them to the layer's scan, `scan_with_states`. A step whose metadata looks otherwise than
foreseen runs in segments (`segments.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from engine_patches.footprint import RUNNING
from engine_patches.forward.conv_states import KeptStates, Parts, StatePlan, Wanted, first_prompt, parts_of, plan_states
from engine_patches.forward.step_writes import PrefillRow, Write, upload
from engine_patches.ledger import LAYERS, Function, Platform, cure, inside


@dataclass(frozen=True)
class _Tails:
    """The second scan: a sequence of one chunk for each state that lies inside a chunk of the main one."""

    tokens: Any  # that it runs over, (tokens,)
    starts: Any  # of the sequences, and the end of the last: (tails + 1,), int32
    rows: Any  # 0, 1, 2, ..., (tails,), int32
    fresh: Any = None  # tails that begin where their row does, (n,); None if there are none
    fresh_rows: Any = None  # their rows, same length

    def states(self, scan: Function, chunk_states: Any, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """States at the tails' ends, (tails, heads, head size, state size), from those at the chunks before them."""
        if self.fresh is not None:
            initial = options.get("initial_states")
            if initial is None:
                chunk_states.index_fill_(0, self.fresh, 0)
            else:
                chunk_states[self.fresh] = initial[self.fresh_rows].to(chunk_states.dtype)
        x, dt, A, B, C = inputs
        x, dt, B, C = (tensor.index_select(0, self.tokens) for tensor in (x, dt, B, C))
        of_tails = {
            "cu_seqlens": self.starts,
            "cu_chunk_seqlens": self.starts,
            "seq_idx": self.rows,
            "last_chunk_indices": self.rows,
            "initial_states": chunk_states,
            "out": options["out"].new_empty(x.shape),
        }
        return scan(x, dt, A, B, C, **{**options, **of_tails})


@dataclass(frozen=True)
class ScanPlan(StatePlan):
    """Where a step's states are found: of its prefills alone, those at chunk ends before those with a tail."""

    chunks: Any  # last chunk that ends at or before each state's position, (states,)
    tails: _Tails | None  # None if all states lie at chunk ends

    def scan(self, scan: Function, ssm_state: Any, blocks: Any, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a step's scan and keep the wanted states. Returns what vLLM's scan returns: the rows' last states.

        `inputs`: x, dt, A, B, C. `ssm_state`: by block. `blocks`: that take the states.
        """
        slots, indices = options.pop("final_states_out", None), options.pop("final_state_indices", None)
        chunk_states = scan(*inputs, **{**options, "return_intermediate_states": True})
        states = chunk_states.index_select(0, self.chunks)
        if self.tails is not None:
            first = len(blocks) - len(self.tails.rows)
            states[first:] = self.tails.states(scan, states[first:], inputs, options)
        ssm_state[blocks] = states.to(ssm_state.dtype)
        final = chunk_states.index_select(0, options["last_chunk_indices"])
        if slots is None:
            return final
        slots[indices] = final.to(slots.dtype)  # as vLLM 0.33 asks for it
        return None


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


@cure(
    "cpu-checkpoint-kernel",
    "vllm._custom_ops:mamba_chunk_scan_fwd_cpu",
    why="the states that `cpu-checkpoint-scan` returns, and those that Seamark keeps, come from the CPU's kernel",
    upstream="as cpu-checkpoint-scan",
    until="never: Seamark copies its states between two runs of it",
    parameters="out, final_states, x, dt, A, B, C, D, z, cu_seqlens",
    on=Platform.CPU,
)
def kernel_in_runs(out: Any, row_states: Any, *inputs: Any, original: Function) -> None:
    if RUNNING.kernel is None:
        original(out, row_states, *inputs)
        return
    (runs, keep), RUNNING.kernel = RUNNING.kernel, None
    x, dt, A, B, C, D, z, _ = inputs
    for run in runs:
        part, states = run.tokens, row_states[run.rows]
        part_of_z = None if z is None else z[part]
        original(out[part], states, x[part], dt[part], A, B[part], C[part], D, part_of_z, run.starts)
        for chunk, state in enumerate(states.unbind(), run.first_chunk):
            keep(chunk, state)


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


@inside(
    "mamba2-scan",
    f"{LAYERS}.ops.ssd_combined:mamba_chunk_scan_combined_varlen",
    why="a scan has the state at the end of each of its chunks, and gives them away if asked",
    mentions=("return_intermediate_states=return_intermediate_states", "last_chunk_indices=last_chunk_indices"),
    rebind=(f"{LAYERS}.mamba_mixer2",),
)
def scan_with_states(*inputs: Any, original: Function, **options: Any) -> Any:
    if RUNNING.scan is None:
        return original(*inputs, **options)
    states, ssm_state = RUNNING.scan
    return states.plan.scan(original, ssm_state, states.blocks, inputs, options)


def run_layer(layer: Any, core: Function, states: KeptStates, metadata: Any, projected_states: Any) -> None:
    """Run `core()`, a Mamba2 layer's convolution and scan, and keep the states of it."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    inputs = projected_states.narrow(0, metadata.num_decode_tokens, metadata.num_prefill_tokens)
    inputs = inputs.narrow(1, layer.tped_intermediate_size, layer.tped_conv_size)
    conv_state, ssm_state = layer.kv_cache[:2]
    conv_state = conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2)
    states.keep_inputs(inputs, conv_state.narrow(-1, 0, layer.conv_kernel_size - 1))
    RUNNING.scan = states, ssm_state
    try:
        core()
    finally:
        RUNNING.scan = None


def _planned(metadata: Any, common: Any, _: Any, wanted: Wanted, groups: Mapping[str, int]) -> StatePlan | None:
    from vllm.platforms import current_platform

    if (first := first_prompt(metadata, common, wanted)) is None:
        return None
    before = metadata.num_decode_tokens
    starts: list[int] = common.query_start_loc_cpu.tolist()
    seq_lens: list[int] = common.seq_lens_cpu_upper_bound.tolist()
    rows = {}
    for row in range(first, common.num_reqs):
        tokens = starts[row + 1] - starts[row]
        rows[row] = PrefillRow(starts[row] - before, seq_lens[row] - tokens, tokens)
    places = {row: row - first for row in rows}
    wanted = sorted(wanted, key=lambda each: (each[0], each[1].offset))
    if current_platform.is_cpu():
        return plan_cpu_scan(rows, wanted, parts_of(common, wanted, groups, before, places))
    bounds = {row: _chunk_ends(prefill, metadata.chunk_size) for row, prefill in rows.items()}
    if metadata.seq_idx_p.shape[0] != sum(map(len, bounds.values())):
        return None
    states = _states_in(bounds, wanted)
    tails = [state for state in states if state.begin < state.write.offset]
    parts = parts_of(common, [(state.row, state.write) for state in states], groups, before, places)
    device = common.query_start_loc.device
    chunks = upload([state.chunk for state in states], device)
    return ScanPlan(*parts, chunks, _tails_of(tails, rows, places, device) if tails else None)


plan_scan_states = partial(plan_states, plan=_planned)  # of the Mamba2 backend


def _chunk_ends(row: PrefillRow, chunk_size: int) -> list[int]:
    """Ends of a row's chunks, in tokens of the row: chunks end at multiples of their size from the prompt's start."""
    first = chunk_size - row.computed % chunk_size
    return [*range(first, row.tokens, chunk_size), row.tokens]


class _ScanState(NamedTuple):
    row: int
    write: Write
    chunk: int  # last chunk that ends at or before it; the row's first if none does
    begin: int  # tokens of the row before the tail


def _states_in(bounds: Mapping[int, Sequence[int]], wanted: Wanted) -> list[_ScanState]:
    """The states, those at ends of chunks first. `bounds`: ends of each row's chunks, in tokens of the row."""
    chunks_before = dict(zip(bounds, itertools.accumulate(map(len, bounds.values()), initial=0), strict=False))
    states = []
    for row, write in wanted:
        ended = [end for end in bounds[row] if end <= write.offset]
        chunk = chunks_before[row] + max(len(ended) - 1, 0)
        states.append(_ScanState(row, write, chunk, ended[-1] if ended else 0))
    return sorted(states, key=lambda state: state.begin < state.write.offset)


def _tails_of(
    tails: Sequence[_ScanState], rows: Mapping[int, PrefillRow], places: Mapping[int, int], device: Any
) -> _Tails:
    import torch

    starts = [0, *itertools.accumulate(state.write.offset - state.begin for state in tails)]
    tokens = [rows[state.row].start + token for state in tails for token in range(state.begin, state.write.offset)]
    numbers = upload([*starts, *range(len(tails))], device, torch.int32)
    fresh = [(number, places[state.row]) for number, state in enumerate(tails) if not state.begin]
    fresh_, fresh_rows = upload(list(zip(*fresh, strict=True)), device) if fresh else (None, None)
    return _Tails(upload(tokens, device), numbers[: len(starts)], numbers[len(starts) :], fresh_, fresh_rows)
