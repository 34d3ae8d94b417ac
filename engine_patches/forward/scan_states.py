"""Recurrent states of Mamba2 layers, read from a scan that nobody cuts.

Mamba2's kernels scan a prompt in chunks (64 to 256 tokens) and have the state at every chunk's end in hand anyway
(`return_intermediate_states`). A state wanted at such an end is copied. For one wanted inside a chunk, a second scan
runs from the last end before it over the few tokens up to it, beside the main one. The convolution's part of a state is
its last inputs, which are simply there. So the step's own outputs are computed as vLLM alone computes them, bit for
bit, wherever states are taken. vllm#57329 reads vLLM's one checkpoint per request from the same place.

vLLM's scan for CPUs has no chunks, and its states are found otherwise (`cpu_scan.py`).

The way of a step: `plan_scan_states` and `states_of_group` put a `ScanStates` on each cache group's metadata;
`mamba2_with_states` hands it to the layer's scan, `scan_with_states`. A step whose metadata looks otherwise than
foreseen runs in segments (`segments.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine_patches.footprint import RUNNING, SCAN_STATES
from engine_patches.forward.conv_states import Windows
from engine_patches.forward.cpu_scan import CpuScanPlan, CpuScanStates, plan_cpu_scan
from engine_patches.forward.segments import plan_segments, plan_segments_of_group
from engine_patches.forward.step_writes import PrefillRow, Write, running_step, upload
from engine_patches.ledger import Function


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
class ScanPlan:
    """Where a step's states are found; the same for all cache groups. Tokens and rows count the step's prefills only.

    The states at chunk ends come before those with a tail.
    """

    targets: Sequence[Mapping[int, int]]  # block of each state, by cache group
    group_of_layer: Mapping[str, int]
    windows: Windows  # of the convolution
    chunks: Any  # last chunk that ends at or before each state's position, (states,)
    tails: _Tails | None  # None if all states lie at chunk ends

    def of_group(self, metadata: Any, layer: str) -> ScanStates:
        """The states in blocks of the cache group that `layer` is in, and that `metadata` was made for."""
        group = self.group_of_layer[layer]
        blocks = upload([target[group] for target in self.targets], self.windows.ends.device)
        return ScanStates(self, blocks, metadata.state_indices_tensor_p[self.windows.rows].long())


class ScanStates(NamedTuple):
    """What the layers of one cache group keep of a step's scan."""

    plan: ScanPlan
    blocks: Any  # that take the states, (states,)
    running: Any  # block of each state's running row, (states,)

    def keep_conv(self, inputs: Any, conv_state: Any) -> None:
        """Keep the convolution's part, as `Windows.keep`. To be called before the layer runs."""
        self.plan.windows.keep(inputs, conv_state, self.blocks, self.running)

    def scan(self, scan: Function, ssm_state: Any, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
        """Run a step's scan and keep the wanted states. Returns what vLLM's scan returns: the rows' last states.

        `inputs`: x, dt, A, B, C. `ssm_state`: by block.
        """
        slots, indices = options.pop("final_states_out", None), options.pop("final_state_indices", None)
        tails = self.plan.tails
        chunk_states = scan(*inputs, **{**options, "return_intermediate_states": True})
        states = chunk_states.index_select(0, self.plan.chunks)
        if tails is not None:
            first = len(self.blocks) - len(tails.rows)
            states[first:] = tails.states(scan, states[first:], inputs, options)
        ssm_state[self.blocks] = states.to(ssm_state.dtype)
        final = chunk_states.index_select(0, options["last_chunk_indices"])
        if slots is None:
            return final
        slots[indices] = final.to(slots.dtype)  # as vLLM 0.33 asks for it
        return None


AnyScanStates = ScanStates | CpuScanStates  # of a device that scans in chunks, or of a CPU


def plan_scan_states(original: Function) -> Function:
    """Replacement of `build` of the Mamba2 backend's metadata builder."""
    in_segments = plan_segments(original)

    def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        writes = step.writes_by_row(common_attn_metadata.num_reqs) if step is not None else None
        if step is None or not writes:
            return original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        metadata = original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        plan = _planned(metadata, common_attn_metadata, writes, step.group_of_layer)
        if plan is None:
            return in_segments(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        setattr(metadata, SCAN_STATES, plan.of_group(metadata, self.layer_names[0]))
        return metadata

    return build


def states_of_group(original: Function) -> Function:
    """Replacement of `update_block_table`, by which a cache group takes over the metadata of another."""
    in_segments = plan_segments_of_group(original)

    def update_block_table(self: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        updated = in_segments(self, metadata, *args, **kwargs)
        states: AnyScanStates | None = getattr(metadata, SCAN_STATES, None)
        if states is not None:
            setattr(updated, SCAN_STATES, states.plan.of_group(updated, self.layer_names[0]))
        return updated

    return update_block_table


def scan_with_states(original: Function) -> Function:
    """Replacement of `mamba_chunk_scan_combined_varlen`: while a layer runs that has states to keep, keeps them."""

    def mamba_chunk_scan_combined_varlen(*inputs: Any, **options: Any) -> Any:
        if RUNNING.scan is None:
            return original(*inputs, **options)
        states, ssm_state = RUNNING.scan
        return states.scan(original, ssm_state, inputs, options)

    return mamba_chunk_scan_combined_varlen


def run_layer(layer: Any, core: Function, states: AnyScanStates, metadata: Any, projected_states: Any) -> None:
    """Run `core()`, a Mamba2 layer's convolution and scan, and keep the states of it."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    inputs = projected_states.narrow(0, metadata.num_decode_tokens, metadata.num_prefill_tokens)
    inputs = inputs.narrow(1, layer.tped_intermediate_size, layer.tped_conv_size)
    conv_state, ssm_state = layer.kv_cache[:2]
    conv_state = conv_state if is_conv_state_dim_first() else conv_state.transpose(-1, -2)
    states.keep_conv(inputs, conv_state.narrow(-1, 0, layer.conv_kernel_size - 1))
    RUNNING.scan = states, ssm_state
    try:
        core()
    finally:
        RUNNING.scan = None


def _planned(
    metadata: Any, common: Any, writes: Mapping[int, Sequence[Write]], group_of_layer: Mapping[str, int]
) -> ScanPlan | CpuScanPlan | None:
    """What to keep of the step that `metadata` was made for; None if it is not divided as foreseen."""
    from vllm.platforms import current_platform

    first = common.num_reqs - metadata.num_prefills
    if not metadata.num_prefills or metadata.num_decodes != first or min(writes) < first:
        return None
    starts: list[int] = common.query_start_loc_cpu.tolist()
    seq_lens: list[int] = common.seq_lens_cpu_upper_bound.tolist()
    rows = []
    for row in range(first, common.num_reqs):
        tokens = starts[row + 1] - starts[row]
        of_row = sorted(writes.get(row, ()), key=lambda write: write.offset)
        rows.append(PrefillRow(starts[row] - metadata.num_decode_tokens, seq_lens[row] - tokens, tokens, of_row))
    if current_platform.is_cpu():
        return plan_cpu_scan(rows, group_of_layer)
    bounds = [_chunk_ends(row, metadata.chunk_size) for row in rows]
    if metadata.seq_idx_p.shape[0] != sum(map(len, bounds)):
        return None
    return _plan_of(rows, bounds, common.query_start_loc.device, metadata, group_of_layer)


def _chunk_ends(row: PrefillRow, chunk_size: int) -> list[int]:
    """Ends of a row's chunks, in tokens of the row: chunks end at multiples of their size from the prompt's start."""
    first = chunk_size - row.computed % chunk_size
    return [*range(first, row.tokens, chunk_size), row.tokens]


class _ScanState(NamedTuple):
    row: int
    end: int  # tokens of the row before it
    chunk: int  # last chunk that ends at or before it; the row's first if none does
    begin: int  # tokens of the row before the tail
    blocks: Mapping[int, int]


def _plan_of(
    rows: Sequence[PrefillRow],
    bounds: Sequence[Sequence[int]],
    device: Any,
    metadata: Any,
    group_of_layer: Mapping[str, int],
) -> ScanPlan:
    at_ends: list[_ScanState] = []
    inside: list[_ScanState] = []
    chunks_before = 0
    for number, (row, ends) in enumerate(zip(rows, bounds, strict=True)):
        for write in row.writes:
            ended = [index for index, end in enumerate(ends) if end <= write.offset]
            begin = ends[ended[-1]] if ended else 0
            state = _ScanState(number, write.offset, chunks_before + max(len(ended) - 1, 0), begin, write.blocks)
            (at_ends if begin == write.offset else inside).append(state)
        chunks_before += len(ends)
    states = at_ends + inside
    of_rows = [rows[state.row] for state in states]
    ends, starts, chunks, row_numbers = upload(
        [
            [row.start + state.end for state, row in zip(states, of_rows, strict=True)],
            [row.start for row in of_rows],
            [state.chunk for state in states],
            [state.row for state in states],
        ],
        device,
    )
    return ScanPlan(
        targets=[state.blocks for state in states],
        group_of_layer=group_of_layer,
        windows=Windows(
            ends,
            starts,
            row_numbers,
            resumed=metadata.has_initial_states_p[row_numbers],
            shortest=min(state.end for state in states),
        ),
        chunks=chunks,
        tails=_tails_of(inside, rows, device) if inside else None,
    )


def _tails_of(inside: Sequence[_ScanState], rows: Sequence[PrefillRow], device: Any) -> _Tails:
    import torch

    starts = [0, *itertools.accumulate(state.end - state.begin for state in inside)]
    tokens = [token + rows[state.row].start for state in inside for token in range(state.begin, state.end)]
    numbers = upload([*starts, *range(len(inside))], device, torch.int32)
    fresh = [(number, state.row) for number, state in enumerate(inside) if not state.begin]
    fresh_, fresh_rows = upload(list(zip(*fresh, strict=True)), device) if fresh else (None, None)
    return _Tails(upload(tokens, device), numbers[: len(starts)], numbers[len(starts) :], fresh_, fresh_rows)
