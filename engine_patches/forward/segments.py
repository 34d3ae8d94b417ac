"""Recurrent states written inside the forward pass: a recurrent layer runs its part of a step segment by segment.

The rest of the model (projections, attention, experts) runs once over all tokens of the step. Only the core of a
recurrent layer runs up to the wanted position first and then on from there. Between two segments the layer's running
block holds exactly the state of that position, and is copied to the block that the scheduler reserved. It fits every
backend at any position, and computes what a chunk that ended there would have computed, bit for bit.

Rows that verify drafts are never cut. They keep a state for each of their tokens, and run in the first segment.

The way of a step: `step_writes.py` takes the writes from the scheduler's output; `plan_segments` and
`take_states_over` cut the step at them and put the segments on each cache group's metadata; the layers
(`layers.py`) run the segments they find there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine_patches.footprint import PLAN, RUNNING, SCAN_STATES, SEGMENTS
from engine_patches.forward.step_writes import Write, upload
from engine_patches.ledger import Function, replacement


@dataclass(frozen=True)
class Segment:
    """A part of a step's tokens, at most one run of them per request."""

    tokens: Any  # slice or index tensor into the step's tokens
    metadata: Any  # what the layer's backend made for these tokens
    sources: Any = None  # running blocks whose state is final for a write once this segment has run
    targets: Any = None  # the blocks that take them, same length

    def keep_states(self, kv_cache: Sequence[Any]) -> None:
        """Copy the states that are to be kept; each tensor of `kv_cache` is indexed by block first."""
        if self.targets is not None:
            for state in kv_cache:
                state[self.targets] = state[self.sources]


class _Level(NamedTuple):
    """One run of tokens of each of some rows; level k has the k-th run of every row that is cut at least k times."""

    rows: list[int]
    begins: list[int]  # first token of each row's run, in the step
    lengths: list[int]
    ends: list[int]  # sequence length of each row after its run, an upper bound for rows with drafts
    left: list[int]  # tokens of each row's chunk behind its run
    writes: list[tuple[int, Mapping[int, int]]]  # (row, blocks) of the states that are complete after it
    whole: bool  # all tokens of the step, in order


class _SegmentPlan(NamedTuple):
    """How a step is cut; every cache group makes its own segments of it."""

    levels: Sequence[tuple[_Level, Any]]  # with the metadata that the backend made for the level's tokens
    group_of_layer: Mapping[str, int]
    drafting: Sequence[int] = ()  # rows that verify drafts, ascending


@replacement
def plan_segments(
    self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, original: Function, **kwargs: Any
) -> Any:
    # Planned from what vLLM's own build was given: it may clear flags in place.
    metadata = original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
    step = RUNNING.step
    if step is not None and (writes := step.writes_by_row(common_attn_metadata.num_reqs)):
        levels = []
        drafting = drafting_rows(kwargs, common_attn_metadata.num_reqs)
        for level in _levels(common_attn_metadata, writes, drafting):
            part = metadata
            if not level.whole:
                options = _of_rows(kwargs, level.rows, drafting)
                part = original(self, 0, _batch_of(level, common_attn_metadata), *args, **options)
            levels.append((level, part))
        _attach(metadata, _SegmentPlan(levels, step.group_of_layer, drafting), self.layer_names[0])
    return metadata


@replacement
def take_states_over(self: Any, metadata: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    """Replacement of `update_block_table`, by which a cache group takes over the metadata of another."""
    updated = original(self, metadata, *args, **kwargs)
    segments: _SegmentPlan | None = getattr(metadata, PLAN, None)
    if segments is not None:
        levels = [(level, updated if level.whole else part) for level, part in segments.levels]
        _attach(updated, segments._replace(levels=levels), self.layer_names[0])
    if (states := getattr(metadata, SCAN_STATES, None)) is not None:
        setattr(updated, SCAN_STATES, states.plan.of_group(updated, self.layer_names[0]))
    return updated


def drafting_rows(options: Mapping[str, Any], num_rows: int) -> list[int]:
    """Rows that verify drafts; `options`: what vLLM gives a builder besides the batch."""
    drafts = options.get("num_decode_draft_tokens_cpu")  # -1 for all other rows
    return [] if drafts is None else [row for row, count in enumerate(drafts[:num_rows].tolist()) if count >= 0]


def _of_rows(options: dict[str, Any], rows: Sequence[int], drafting: Sequence[int]) -> dict[str, Any]:
    """What vLLM gives a builder besides the batch, for some of its rows."""
    import torch

    chosen = dict(options)
    if (drafts := options.get("num_decode_draft_tokens_cpu")) is not None:
        chosen["num_decode_draft_tokens_cpu"] = drafts[torch.tensor(rows)]
    if (accepted := options.get("num_accepted_tokens")) is not None:
        verifies = upload([int(row in drafting) for row in rows], accepted.device, torch.bool)
        accepted = accepted[upload(rows, accepted.device)]
        chosen["num_accepted_tokens"] = torch.where(verifies, accepted, torch.ones_like(accepted))  # 1: nothing to undo
    return chosen


def _levels(common: Any, writes: Mapping[int, Sequence[Write]], drafting: Sequence[int] = ()) -> list[_Level]:
    """Cut the rows of a step at their writes. `common`: what vLLM tells a backend about the batch."""
    starts: list[int] = common.query_start_loc_cpu.tolist()
    seq_lens: list[int] = common.seq_lens_cpu_upper_bound.tolist()
    chunks = [after - start for start, after in itertools.pairwise(starts)]
    runs: list[dict[int, tuple[int, int]]] = []  # level -> row -> (from, to), offsets into the row's chunk
    written: list[list[tuple[int, Mapping[int, int]]]] = []  # by level
    for row in range(common.num_reqs):
        if chunks[row] == 0:
            continue  # padding
        of_row = writes.get(row, ())
        cuts = sorted({write.offset for write in of_row} | {chunks[row]})
        for level, (begin, end) in enumerate(itertools.pairwise([0, *cuts])):
            if level == len(runs):
                runs.append({})
                written.append([])
            runs[level][row] = (begin, end)
            written[level] += [(row, write.blocks) for write in of_row if write.offset == end]

    def takes_many_tokens(run: tuple[int, tuple[int, int]]) -> bool:
        row, (begin, end) = run
        has_state = begin > 0 or seq_lens[row] > chunks[row]
        return row not in drafting and not (has_state and end - begin == 1)

    levels = []
    for of_rows, states in zip(runs, written, strict=True):
        # Backends expect rows that are one step of generation before all others.
        ordered = sorted(of_rows.items(), key=takes_many_tokens)
        levels.append(
            _Level(
                rows=[row for row, _ in ordered],
                begins=[starts[row] + begin for row, (begin, _) in ordered],
                lengths=[end - begin for _, (begin, end) in ordered],
                ends=[seq_lens[row] - chunks[row] + end for row, (_, end) in ordered],
                left=[chunks[row] - end for row, (_, end) in ordered],
                writes=states,
                whole=len(runs) == 1,
            )
        )
    return levels


def _batch_of(level: _Level, common: Any) -> Any:
    """What vLLM tells a backend about a batch, for the tokens of one level."""
    import torch

    device = common.query_start_loc.device
    starts = torch.tensor([0, *itertools.accumulate(level.lengths)], dtype=torch.int32)
    rows = torch.tensor(level.rows)
    fields = {field.name for field in dataclasses.fields(common)}
    changes = {
        "query_start_loc": upload(starts, device, torch.int32),
        "query_start_loc_cpu": starts,
        # The device's own: what is known here of rows with drafts in flight is an upper bound.
        "seq_lens": common.seq_lens[upload(level.rows, device)] - upload(level.left, device, common.seq_lens.dtype),
        "seq_lens_cpu_upper_bound": torch.tensor(level.ends, dtype=common.seq_lens_cpu_upper_bound.dtype),
        "num_reqs": len(level.rows),
        "num_actual_tokens": sum(level.lengths),
        "max_query_len": max(level.lengths),
        "block_table_tensor": common.block_table_tensor[upload(level.rows, device)],
        "is_prefilling": None if common.is_prefilling is None else common.is_prefilling[rows],
        "positions": None,
        "req_idx": None,
        "_num_computed_tokens_cache": None,
        "_token_to_req_indices_cache": None,
    }
    return common.replace(**{name: value for name, value in changes.items() if name in fields})


def _attach(metadata: Any, plan: _SegmentPlan, layer: str) -> None:
    """Put the segments of the cache group that `layer` is in on the group's metadata."""
    group = plan.group_of_layer[layer]
    running = running_blocks(metadata, plan.drafting)  # by row of the whole step
    segments = []
    for level, part in plan.levels:
        sources = targets = None
        if level.writes:
            written = upload([[row, blocks[group]] for row, blocks in level.writes], running.device)
            sources, targets = running[written[:, 0]].long(), written[:, 1]
        tokens, own = slice(None), metadata
        if not level.whole:
            tokens = _tokens(level, running.device)
            own = with_running_blocks(part, running[upload(level.rows, running.device)])
            if plan.drafting:
                own = _with_drafting_rows(own, metadata, level.rows, plan.drafting)
        segments.append(Segment(tokens, own, sources, targets))
    setattr(metadata, SEGMENTS, segments)
    setattr(metadata, PLAN, plan)


def _tokens(level: _Level, device: Any) -> Any:
    """The level's tokens in the step: a slice if they follow each other, else an index tensor."""
    import torch

    runs = list(zip(level.begins, level.lengths, strict=True))
    if all(begin + length == following for (begin, length), (following, _) in itertools.pairwise(runs)):
        return slice(runs[0][0], runs[-1][0] + runs[-1][1])
    return upload(torch.cat([torch.arange(begin, begin + length) for begin, length in runs]), device)


def running_blocks(metadata: Any, drafting: Sequence[int] = ()) -> Any:
    """The block that holds each row's running state, shape (rows,); `drafting`: rows that verify drafts."""
    import torch

    if hasattr(metadata, "state_indices_tensor_p"):  # Mamba1, Mamba2 and others on the common builder
        parts = (metadata.state_indices_tensor_d, metadata.state_indices_tensor_p)
        flat = [part[:, 0] if part.dim() == 2 else part for part in parts if part is not None]
        return torch.cat(flat)
    plain = metadata.non_spec_state_indices_tensor  # GDN
    if not drafting:
        return plain
    # GDN keeps rows that verify drafts apart, and a block for each of their tokens.
    others = [row for row in range(len(drafting) + len(plain)) if row not in drafting]
    place = {row: number for number, row in enumerate((*drafting, *others))}
    blocks = torch.cat([metadata.spec_state_indices_tensor[: len(drafting), 0], plain])
    return blocks[upload([place[row] for row in sorted(place)], blocks.device)]


def with_running_blocks(metadata: Any, blocks: Any) -> Any:
    """`metadata` of a segment, working on the states in `blocks`: the whole chunk's, not its own end's."""
    decodes = metadata.num_decodes
    if hasattr(metadata, "state_indices_tensor_p"):
        running = metadata.state_indices_tensor_d
        # Further columns belong to drafts. A row that verifies them is not cut, so they are right as they are.
        running = blocks[:decodes].unsqueeze(-1) if running is None else running.clone()
        running[:, 0] = blocks[:decodes]
        return dataclasses.replace(metadata, state_indices_tensor_d=running, state_indices_tensor_p=blocks[decodes:])
    changes = {"non_spec_state_indices_tensor": blocks}
    if metadata.prefill_state_indices is not None:
        changes["prefill_state_indices"] = blocks[decodes:]
    # Batches without a prefill are given as views of a buffer that the next segment would fill again.
    changes["non_spec_query_start_loc"] = metadata.non_spec_query_start_loc.clone()
    return dataclasses.replace(metadata, **changes)


def _with_drafting_rows(metadata: Any, whole: Any, rows: Sequence[int], drafting: Sequence[int]) -> Any:
    """`metadata` of a segment of GDN's or KDA's with these `rows` of a step, of which those `drafting` verify drafts.

    `whole`: the metadata of the step. `metadata` has the running blocks of all its rows as if none verified drafts.
    """
    if not getattr(metadata, "num_spec_decodes", 0):  # Kimi-K3's has no masks
        return metadata
    device = whole.spec_state_indices_tensor.device
    places = upload([drafting.index(row) for row in rows if row in drafting], device)
    others = upload([number for number, row in enumerate(rows) if row not in drafting], device)
    plain = metadata.non_spec_state_indices_tensor[others]
    changes = {"spec_state_indices_tensor": whole.spec_state_indices_tensor[places]}
    changes["non_spec_state_indices_tensor"] = plain
    if metadata.prefill_state_indices is not None:
        changes["prefill_state_indices"] = plain
    return dataclasses.replace(metadata, **changes)
