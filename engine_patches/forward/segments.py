"""Recurrent states written inside the forward pass: a recurrent layer runs its part of a step piece by piece.

The rest of the model (projections, attention, experts) runs once over all tokens of the step; only the core of a
recurrent layer, which reads no weights worth the name, runs first up to the wanted position and then on from there.
Between two pieces the layer's running block holds exactly the state of that position, and is copied to the block that
the scheduler reserved. It needs nothing of the kernels but what chunked prefill needs anyway, so it fits every
backend at any position, and it computes what a chunk that ended there would have computed, bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

PIECES = "seamark_pieces"  # on the metadata of a recurrent layer: how its tokens are run

WRITES = "seamark_writes"  # on a scheduler's output: which states the step has to write


class Write(NamedTuple):
    """One state of one request to be kept."""

    offset: int  # tokens after the start of the request's chunk, 1..its length
    blocks: Mapping[int, int]  # cache group -> the block that takes the state


@dataclass
class Step:
    """The writes of the running step, as the worker needs them."""

    writes: Mapping[str, Sequence[Write]]  # by request
    group_of_layer: Mapping[str, int]
    req_ids: Sequence[str] = ()  # of the batch's rows, in order


_step: Step | None = None  # none outside of one, and where the scheduler leaves the states to vLLM


@dataclass(frozen=True)
class Segment:
    """A part of a step's tokens, at most one run of them per request."""

    tokens: Any  # slice or index tensor into the step's tokens
    metadata: Any  # what the layer's backend made for these tokens
    sources: Any = None  # running blocks whose state is final for a write once this piece has run
    targets: Any = None  # the blocks that take them, same length

    def keep_states(self, kv_cache: Sequence[Any]) -> None:
        """Copy what has to be kept; each tensor of `kv_cache` is indexed by block first."""
        if self.targets is not None:
            for state in kv_cache:
                state[self.targets] = state[self.sources]


def follow_steps(original: Callable) -> Callable:
    """Replacement of a model runner's `execute_model`: makes the step's writes known to the layers."""

    def execute_model(self, scheduler_output, *args, **kwargs):
        global _step
        writes = getattr(scheduler_output, WRITES, None)
        if writes is None:
            return original(self, scheduler_output, *args, **kwargs)
        _step = Step(writes, _groups_of_layers(self))
        batch = getattr(self, "input_batch", None)
        if batch is not None:  # model runner V1: the batch outlives the step, its list of requests is kept up to date
            _step.req_ids = batch.req_ids
        try:
            return original(self, scheduler_output, *args, **kwargs)
        finally:
            _step = None

    return execute_model


def note_batch(original: Callable) -> Callable:
    """Replacement of `prepare_inputs` of model runner V2, which makes a new batch for each step."""

    def prepare_inputs(self, *args, **kwargs):
        batch = original(self, *args, **kwargs)
        if _step is not None:
            _step.req_ids = batch.req_ids
        return batch

    return prepare_inputs


def leave_exports(original: Callable) -> Callable:
    """Replacement of `MambaPrefillCheckpointBuilder.build`: no export of vLLM's own while the states are ours."""

    def build(self, m, request_rows):
        return None if _step is not None else original(self, m, request_rows)

    return build


def _groups_of_layers(runner: Any) -> Mapping[str, int]:
    config = runner.kv_cache_config
    known = getattr(runner, "_seamark_groups", None)
    if known is None or known[0] is not config:
        groups = {name: gid for gid, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
        known = runner._seamark_groups = (config, groups)
    return known[1]


def plan_pieces(original: Callable) -> Callable:
    """Replacement of `build` of a recurrent backend's metadata builder."""

    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        # Planned from what vLLM's own build was given: it may clear flags in place.
        metadata = original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        step = _step
        if step is not None and step.writes:
            cuts = _cuts(step, common_attn_metadata)
            if cuts:
                plan = _Plan(common_attn_metadata, cuts)
                parts = [
                    (level, metadata if level.whole else original(self, 0, plan.common(level), *args, **kwargs))
                    for level in plan.levels
                ]
                _attach(metadata, plan, parts, step.group_of_layer[self.layer_names[0]])
        return metadata

    return build


def plan_pieces_of_group(original: Callable) -> Callable:
    """Replacement of `update_block_table`, by which a cache group takes over the metadata of another."""

    def update_block_table(self, metadata, *args, **kwargs):
        updated = original(self, metadata, *args, **kwargs)
        pieces = getattr(metadata, PIECES, None)
        if pieces is not None:
            plan, parts = pieces.plan, pieces.parts
            parts = [(level, updated if level.whole else part) for level, part in parts]
            _attach(updated, plan, parts, _step.group_of_layer[self.layer_names[0]])
        return updated

    return update_block_table


class _Level(NamedTuple):
    """One run of tokens for some rows of the batch."""

    rows: list[int]
    begins: list[int]  # first token of each row's run, in the step
    lengths: list[int]
    ends: list[int]  # sequence length of each row after its run
    writes: list[tuple[int, Mapping[int, int]]]  # (row, blocks) complete after it
    whole: bool  # all tokens of the step, in order


class Pieces(list):
    """The pieces of one cache group, with what is needed to make those of the next."""

    plan: _Plan
    parts: list[tuple[_Level, Any]]


def _cuts(step: Step, common: Any) -> dict[int, Sequence[Write]]:
    writes = step.writes
    return {row: writes[name] for row, name in enumerate(step.req_ids) if name in writes and row < common.num_reqs}


class _Plan:
    """How the rows of a step are cut into levels: level k runs the k-th stretch of every row that has one."""

    def __init__(self, common: Any, cuts: Mapping[int, Sequence[Write]]) -> None:
        self._common = common
        starts = common.query_start_loc_cpu.tolist()
        seq_lens = common.seq_lens_cpu_upper_bound.tolist()
        runs: list[dict[int, tuple[int, int]]] = []  # level -> row -> (from, to), offsets into the row's chunk
        written: list[list[tuple[int, Mapping[int, int]]]] = []
        for row in range(common.num_reqs):
            length = starts[row + 1] - starts[row]
            if length == 0:
                continue  # padding
            writes = cuts.get(row, ())
            ends = sorted({write.offset for write in writes} | {length})
            for level, end in enumerate(ends):
                if level == len(runs):
                    runs.append({})
                    written.append([])
                runs[level][row] = (ends[level - 1] if level else 0, end)
                written[level] += [(row, write.blocks) for write in writes if write.offset == end]
        self.levels = []
        for level, of_rows in enumerate(runs):
            # Backends expect rows that are one step of decoding before all others.
            rows = sorted(of_rows, key=lambda row: not _is_single(of_rows[row], starts, seq_lens, row))
            begins = [starts[row] + of_rows[row][0] for row in rows]
            lengths = [of_rows[row][1] - of_rows[row][0] for row in rows]
            ends = [seq_lens[row] - (starts[row + 1] - starts[row]) + of_rows[row][1] for row in rows]
            whole = len(runs) == 1
            self.levels.append(_Level(rows, begins, lengths, ends, written[level], whole))

    def common(self, level: _Level) -> Any:
        """What vLLM tells a backend about a batch, for the tokens of one level."""
        import torch

        common = self._common
        device = common.query_start_loc.device
        lengths = torch.tensor(level.lengths, dtype=torch.int32)
        starts = torch.zeros(len(level.rows) + 1, dtype=torch.int32)
        torch.cumsum(lengths, 0, out=starts[1:])
        ends = torch.tensor(level.ends, dtype=torch.int32)
        rows = torch.tensor(level.rows)
        fields = {field.name for field in dataclasses.fields(common)}
        changes = {
            "query_start_loc": starts.to(device, non_blocking=True),
            "query_start_loc_cpu": starts,
            "seq_lens": ends.to(device, common.seq_lens.dtype, non_blocking=True),
            "seq_lens_cpu_upper_bound": ends.to(common.seq_lens_cpu_upper_bound.dtype),
            "num_reqs": len(level.rows),
            "num_actual_tokens": sum(level.lengths),
            "max_query_len": max(level.lengths),
            "block_table_tensor": common.block_table_tensor[rows.to(device, non_blocking=True)],
            "is_prefilling": None if common.is_prefilling is None else common.is_prefilling[rows],
            "positions": None,
            "req_idx": None,
            "_num_computed_tokens_cache": None,
            "_token_to_req_indices_cache": None,
        }
        return common.replace(**{name: value for name, value in changes.items() if name in fields})


def _is_single(run: tuple[int, int], starts: list[int], seq_lens: list[int], row: int) -> bool:
    has_state = run[0] > 0 or seq_lens[row] > starts[row + 1] - starts[row]
    return has_state and run[1] - run[0] == 1


def _attach(metadata: Any, plan: _Plan, parts: list[tuple[_Level, Any]], group: int) -> None:
    """Put the pieces of one cache group on its metadata."""

    running = running_blocks(metadata)  # by row of the whole step
    pieces = Pieces()
    pieces.plan, pieces.parts = plan, parts
    for level, part in parts:
        targets = sources = None
        if level.writes:
            written = _upload([[row, blocks[group]] for row, blocks in level.writes], running.device)
            sources, targets = running[written[:, 0]].long(), written[:, 1]
        if level.whole:
            pieces.append(Segment(slice(None), metadata, sources, targets))
            continue
        rows = _upload(level.rows, running.device)
        pieces.append(
            Segment(_tokens(level, running.device), with_running_blocks(part, running[rows]), sources, targets)
        )
    setattr(metadata, PIECES, pieces)


def _upload(numbers: list, device: Any) -> Any:
    """A tensor on `device`, without waiting for what runs there."""
    import torch

    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _tokens(level: _Level, device: Any) -> Any:
    import torch

    runs = list(zip(level.begins, level.lengths, strict=True))
    if all(begin + length == following for (begin, length), (following, _) in itertools.pairwise(runs)):
        return slice(runs[0][0], runs[-1][0] + runs[-1][1])
    tokens = torch.cat([torch.arange(begin, begin + length) for begin, length in runs])
    return tokens.to(device, non_blocking=True)


def running_blocks(metadata: Any) -> Any:
    """The block that holds each row's running state, shape (rows,)."""
    import torch

    if hasattr(metadata, "state_indices_tensor_p"):  # Mamba1, Mamba2 and others on the common builder
        parts = (metadata.state_indices_tensor_d, metadata.state_indices_tensor_p)
        flat = [part[:, 0] if part.dim() == 2 else part for part in parts if part is not None]
        return torch.cat(flat)
    return metadata.non_spec_state_indices_tensor  # GDN


def with_running_blocks(metadata: Any, blocks: Any) -> Any:
    """`metadata` of a piece, working on the states in `blocks`: the whole chunk's, not its own end's."""
    decodes = metadata.num_decodes
    if hasattr(metadata, "state_indices_tensor_p"):
        return dataclasses.replace(
            metadata, state_indices_tensor_d=blocks[:decodes].unsqueeze(-1), state_indices_tensor_p=blocks[decodes:]
        )
    changes = {"non_spec_state_indices_tensor": blocks}
    if metadata.prefill_state_indices is not None:
        changes["prefill_state_indices"] = blocks[decodes:]
    # Batches without a prefill are given as views of a buffer that the next piece would fill anew.
    changes["non_spec_query_start_loc"] = metadata.non_spec_query_start_loc.clone()
    return dataclasses.replace(metadata, **changes)
