"""States of a convolution: its last inputs before a position, which are simply there.

Nothing is cut. The inputs are taken before the layer runs, since that overwrites the running states, of which a state
near its row's start has a part. Mamba2's layers keep their convolution's part of a state in the same way
(`scan_states.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine_patches.footprint import RUNNING, SCAN_STATES
from engine_patches.forward.segments import drafting_rows, plan_segments
from engine_patches.forward.step_writes import Write, running_step, upload, wrote_states
from engine_patches.ledger import Function


@dataclass(frozen=True)
class Windows:
    """The inputs before each of some positions: tensors with a number for each state. Tokens count the layer's own."""

    ends: Any  # tokens before each position
    starts: Any  # first token of each state's row
    rows: Any
    resumed: Any  # whether a row begins with a state
    shortest: int  # tokens from a row's start to its first state, at least
    _windows: dict[int, Any] = field(default_factory=dict)  # by width

    def before(self, width: int) -> Any:
        """The `width` tokens before each position, (states, width); those before the first one are negative."""
        import torch

        if width not in self._windows:
            self._windows[width] = self.ends[:, None] + torch.arange(-width, 0, device=self.ends.device)
        return self._windows[width]

    def keep(self, inputs: Any, conv_state: Any, blocks: Any, running: Any) -> None:
        """Copy the inputs before each position into `conv_state[blocks]`; `running`: the blocks of the rows' states.

        `inputs`: (tokens, channels). `conv_state`: by block, channel and width, without the room for drafts behind.
        """
        import torch

        width = conv_state.shape[-1]
        window = self.before(width)
        if self.shortest >= width:
            last = inputs.index_select(0, window.flatten()).unflatten(0, window.shape)
            conv_state[blocks] = last.transpose(1, 2).to(conv_state.dtype)
            return
        before = window - self.starts[:, None]  # negative: in the running state
        new = inputs[window.clamp(min=0)].transpose(1, 2).to(conv_state.dtype)
        old = conv_state[running]
        old = old.gather(2, (before + width).clamp(0, width - 1)[:, None].expand_as(old))
        old = torch.where(self.resumed[:, None, None], old, 0)
        conv_state[blocks] = torch.where((before >= 0)[:, None], new, old)


@dataclass(frozen=True)
class ConvPlan:
    """Where the states of a step's convolutions are; the same for all cache groups."""

    targets: Sequence[Mapping[int, int]]  # block of each state, by cache group
    group_of_layer: Mapping[str, int]
    windows: Windows

    def of_group(self, metadata: Any, layer: str) -> ConvStates:
        """The states in blocks of the cache group that `layer` is in, and that `metadata` was made for."""
        group = self.group_of_layer[layer]
        blocks = upload([target[group] for target in self.targets], self.windows.ends.device)
        of_all = getattr(metadata, "state_indices_tensor", None)  # of the layer of n-gram embeddings
        running = metadata.state_indices_tensor_p if of_all is None else of_all
        return ConvStates(self, blocks, running[self.windows.rows].long())


class ConvStates(NamedTuple):
    """What the layers of one cache group keep of a step's inputs."""

    plan: ConvPlan
    blocks: Any  # that take the states, (states,)
    running: Any  # block of each state's running row, (states,)

    def keep(self, inputs: Any, conv_state: Any) -> None:
        """As `Windows.keep`."""
        self.plan.windows.keep(inputs, conv_state, self.blocks, self.running)


def plan_ngram_states(original: Function) -> Function:
    """Replacement of `build` of the metadata of the convolution beside n-gram embeddings, which runs over all rows."""

    def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        step = running_step()
        if step is not None and (writes := step.writes_by_row(common_attn_metadata.num_reqs)):
            drafting = drafting_rows(kwargs, common_attn_metadata.num_reqs)
            places = _places(common_attn_metadata, drafting)
            plan = _plan_of(common_attn_metadata, writes, step.group_of_layer, 0, places)
            setattr(metadata, SCAN_STATES, plan.of_group(metadata, self.layer_names[0]))
        return metadata

    return build


def plan_conv_states(original: Function) -> Function:
    """Replacement of `build` of all recurrent layers without one of their own: of short convolutions, and of others."""
    in_segments = plan_segments(original)

    def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        step = running_step()
        writes = step.writes_by_row(common_attn_metadata.num_reqs) if step is not None else None
        if step is None or not writes or type(self).__name__ != "ShortConvAttentionMetadataBuilder":
            return original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        metadata = original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        first = common_attn_metadata.num_reqs - metadata.num_prefills
        if not metadata.num_prefills or metadata.num_decodes != first or min(writes) < first:
            return in_segments(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        places = {row: row - first for row in range(first, common_attn_metadata.num_reqs)}
        before = metadata.num_decode_tokens
        plan = _plan_of(common_attn_metadata, writes, step.group_of_layer, before, places)
        setattr(metadata, SCAN_STATES, plan.of_group(metadata, self.layer_names[0]))
        return metadata

    return build


def keep_ngram_states(original: Function) -> Function:
    """Replacement of `Qwen4ExpPLELayer._short_conv_dilated_dispatch`, which is given inputs and states by channel."""

    def _short_conv_dilated_dispatch(
        self: Any, inputs: Any, residual: Any, outer_residual: Any, metadata: Any, conv_state: Any, conv_weights: Any
    ) -> None:
        states: ConvStates | None = getattr(metadata, SCAN_STATES, None)
        if states is not None:
            states.keep(inputs, conv_state.narrow(-1, 0, self.conv_state_len))
            wrote_states(self.prefix)
        original(self, inputs, residual, outer_residual, metadata, conv_state, conv_weights)

    return _short_conv_dilated_dispatch


def run_convolution(core: Function, states: ConvStates) -> None:
    """Run `core()`, a layer that convolves its prompts once, and keep the states of it."""
    RUNNING.convolution = states
    try:
        core()
        if RUNNING.convolution is not None:
            raise RuntimeError("seamark: vLLM's short convolution no longer calls its kernel by its name")
    finally:
        RUNNING.convolution = None


def keep_inputs(original: Function) -> Function:
    """Replacement of the kernels for prompts: while a layer runs that has states to keep, keeps them.

    They are given inputs by channel, (channels, tokens), and states by block, channel and width.
    """

    def causal_conv1d_fn(x: Any, weight: Any, bias: Any, conv_states: Any, *args: Any, **options: Any) -> Any:
        if RUNNING.convolution is not None:
            states, RUNNING.convolution = RUNNING.convolution, None
            states.keep(x.transpose(0, 1), conv_states.narrow(-1, 0, weight.shape[1] - 1))
        return original(x, weight, bias, conv_states, *args, **options)

    return causal_conv1d_fn


def _places(common: Any, drafting: Sequence[int]) -> dict[int, int]:
    """Where `state_indices_tensor` has each row that verifies no drafts; beside such, single tokens come first."""
    if not drafting:
        return {row: row for row in range(common.num_reqs)}
    starts: list[int] = common.query_start_loc_cpu.tolist()
    tokens = [after - start for start, after in itertools.pairwise(starts)]
    rows = [row for row in range(common.num_reqs) if row not in drafting and tokens[row]]  # without padding
    rows.sort(key=lambda row: tokens[row] > 1)
    return {row: place for place, row in enumerate(rows)}


def _plan_of(
    common: Any,
    writes: Mapping[int, Sequence[Write]],
    group_of_layer: Mapping[str, int],
    before: int,
    places: Mapping[int, int],
) -> ConvPlan:
    """Of a step with these `writes` by row. `before`: tokens before the first that the convolution is given."""
    starts: list[int] = common.query_start_loc_cpu.tolist()
    seq_lens: list[int] = common.seq_lens_cpu_upper_bound.tolist()
    wanted = [(row, write) for row, of_row in writes.items() for write in of_row]
    ends, begins, rows, resumed = upload(
        [
            [starts[row] - before + write.offset for row, write in wanted],
            [starts[row] - before for row, _ in wanted],
            [places[row] for row, _ in wanted],
            [seq_lens[row] > starts[row + 1] - starts[row] for row, _ in wanted],
        ],
        common.query_start_loc.device,
    )
    windows = Windows(ends, begins, rows, resumed.bool(), min(write.offset for _, write in wanted))
    return ConvPlan([write.blocks for _, write in wanted], group_of_layer, windows)
