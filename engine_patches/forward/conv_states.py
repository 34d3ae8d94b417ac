"""States of a convolution: its last inputs before a position, which are simply there.

The inputs are taken before the layer runs, since that overwrites the running states, of which a state near its row's
start has a part. Mamba2's layers keep their convolution's part of a state in the same way (`scan_states.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from engine_patches.footprint import RUNNING, SCAN_STATES
from engine_patches.forward.segments import drafting_rows, plan_segments
from engine_patches.forward.step_writes import Write, upload, wrote_states
from engine_patches.ledger import LAYERS, Function, Platform, inside, replacement


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
class StatePlan:
    """Where a step's states are; the same for all cache groups."""

    targets: Sequence[Mapping[int, int]]  # block of each state, by cache group
    group_of_layer: Mapping[str, int]
    windows: Windows  # of the convolution

    def of_group(self, metadata: Any, layer: str) -> KeptStates:
        """The states in blocks of the cache group that `layer` is in, and that `metadata` was made for."""
        group = self.group_of_layer[layer]
        blocks = upload([target[group] for target in self.targets], self.windows.ends.device)
        of_all = getattr(metadata, "state_indices_tensor", None)  # of the layer of n-gram embeddings
        running = metadata.state_indices_tensor_p if of_all is None else of_all
        return KeptStates(self, blocks, running[self.windows.rows].long())


class KeptStates(NamedTuple):
    """What the layers of one cache group keep of a step."""

    plan: StatePlan
    blocks: Any  # that take the states, (states,)
    running: Any  # block of each state's running row, (states,)

    def keep_inputs(self, inputs: Any, conv_state: Any) -> None:
        """Keep the convolution's part, as `Windows.keep`. To be called before the layer runs."""
        self.plan.windows.keep(inputs, conv_state, self.blocks, self.running)


Wanted = Sequence[tuple[int, Write]]  # states of a step, by row

Parts = tuple[Sequence[Mapping[int, int]], Mapping[str, int], Windows]  # of a `StatePlan`

# Given the metadata that vLLM has made of a step, what of (the batch, and what else it gives by name), the states and
# the cache group of each layer: the plan, or None if the step is not divided as foreseen. Then it runs in segments.
Plan = Callable[[Any, Any, dict[str, Any], Wanted, Mapping[str, int]], StatePlan | None]


def plan_states(original: Function, plan: Plan) -> Function:
    """Replacement of `build` of a builder of metadata, whose layers find there what they have to keep."""
    in_segments = plan_segments(original)

    def build(self: Any, common_prefix_len: Any, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        metadata = original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        step = RUNNING.step
        writes = step.writes_by_row(common_attn_metadata.num_reqs) if step is not None else None
        if step is None or not writes:
            return metadata
        wanted = [(row, write) for row, of_row in sorted(writes.items()) for write in of_row]
        planned = plan(metadata, common_attn_metadata, kwargs, wanted, step.group_of_layer)
        if planned is None:
            return in_segments(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        setattr(metadata, SCAN_STATES, planned.of_group(metadata, self.layer_names[0]))
        return metadata

    return build


@replacement
def keep_ngram_states(self: Any, *, original: Function, **tensors: Any) -> None:
    """Replacement of `Qwen4ExpPLELayer._short_conv_dilated_dispatch`, which is given inputs and states by channel."""
    states: KeptStates | None = getattr(tensors["metadata"], SCAN_STATES, None)
    if states is not None:
        states.keep_inputs(tensors["inputs"], tensors["conv_state"].narrow(-1, 0, self.conv_state_len))
        wrote_states(self.prefix)
    original(self, **tensors)


def run_convolution(core: Function, states: KeptStates) -> None:
    """Run `core()`, a layer that convolves its prompts once, and keep the states of it."""
    RUNNING.convolution = states
    try:
        core()
        if RUNNING.convolution is not None:
            raise RuntimeError("seamark: vLLM's short convolution no longer calls its kernel by its name")
    finally:
        RUNNING.convolution = None


# Of the kernels of convolutions, by position: they take more by name, each other ones.
_BY_POSITION = "x: torch.Tensor,\n    weight: torch.Tensor,\n    bias: torch.Tensor | None,\n    conv_states:"


@inside(
    "short-conv-inputs",
    f"{LAYERS}.ops.causal_conv1d:causal_conv1d_fn",
    why="a convolution's state is taken from its inputs, which only its kernel is given",
    mentions=(_BY_POSITION,),
    rebind=(f"{LAYERS}.short_conv",),
)
@inside(
    "short-conv-inputs-cpu",
    f"{LAYERS}.ops.cpu.causal_conv1d:causal_conv1d_fn_cpu",
    why="the same on a CPU",
    mentions=(_BY_POSITION,),
    on=Platform.CPU,
)
def keep_inputs(
    x: Any, weight: Any, bias: Any, conv_states: Any, *args: Any, original: Function, **options: Any
) -> Any:
    """Replacement of the kernels for prompts: keeps the states of the layer that runs. Inputs: (channels, tokens)."""
    if RUNNING.convolution is not None:
        states, RUNNING.convolution = RUNNING.convolution, None
        states.keep_inputs(x.transpose(0, 1), conv_states.narrow(-1, 0, weight.shape[1] - 1))
    return original(x, weight, bias, conv_states, *args, **options)


def first_prompt(metadata: Any, common: Any, wanted: Wanted) -> int | None:
    """The row behind those that generate, which are the first; None if it is not so, or if one of them has a state."""
    first: int = common.num_reqs - metadata.num_prefills
    divided = metadata.num_prefills and metadata.num_decodes == first and min(row for row, _ in wanted) >= first
    return first if divided else None


def _of_all_rows(_: Any, common: Any, options: dict[str, Any], wanted: Wanted, groups: Mapping[str, int]) -> StatePlan:
    """A `Plan`. Beside rows that verify drafts, single tokens come first in `state_indices_tensor`."""
    drafting = drafting_rows(options, common.num_reqs)
    rows = list(range(common.num_reqs))
    if drafting:
        tokens = [after - start for start, after in itertools.pairwise(common.query_start_loc_cpu.tolist())]
        rows = [row for row in rows if row not in drafting and tokens[row]]  # without padding
        rows.sort(key=lambda row: tokens[row] > 1)
    places = {row: place for place, row in enumerate(rows)}
    return StatePlan(*parts_of(common, wanted, groups, 0, places))


def _of_prompts(metadata: Any, common: Any, _: Any, wanted: Wanted, groups: Mapping[str, int]) -> StatePlan | None:
    if (first := first_prompt(metadata, common, wanted)) is None:
        return None
    places = {row: row - first for row, _ in wanted}
    return StatePlan(*parts_of(common, wanted, groups, metadata.num_decode_tokens, places))


plan_ngram_states = partial(plan_states, plan=_of_all_rows)  # of the convolution beside n-gram embeddings
plan_conv_states = partial(plan_states, plan=_of_prompts)  # of short convolutions, which run over prompts by themselves


def parts_of(common: Any, wanted: Wanted, groups: Mapping[str, int], before: int, places: Mapping[int, int]) -> Parts:
    """What each `StatePlan` has. `before`: tokens before the first that the layers are given. `places`: of the rows."""
    starts: list[int] = common.query_start_loc_cpu.tolist()
    seq_lens: list[int] = common.seq_lens_cpu_upper_bound.tolist()
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
    return [write.blocks for _, write in wanted], groups, windows
