"""The states that the running step has to write, as the scheduler's output brings them to the layers.

The scheduler has registered their keys. So a step that leaves one unwritten, because vLLM runs a layer or a batch in a
way that the patches do not know, must not end as if nothing had happened: somebody would resume from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine_patches.footprint import GROUPS, RUNNING, WRITES
from engine_patches.ledger import LAYERS, RUNNER_V1, RUNNER_V2, Function, Platform, inside

WHAT_NOW = (
    "Their keys are registered, so the engine stops before anybody resumes from them. "
    "SEAMARK_ENGINE=0 runs vLLM without Seamark; please report vLLM's version and flags."
)


class StatesNotWritten(RuntimeError):
    """States whose keys are registered were not written; the engine must not go on with them."""


class Write(NamedTuple):
    """One state of one request to be kept."""

    offset: int  # tokens after the start of the request's chunk, 1..its length
    blocks: Mapping[int, int]  # cache group -> the block that takes the state


class PrefillRow(NamedTuple):
    """A prefill's part of a step, in tokens."""

    start: int  # first token; the step's prefills alone are counted
    computed: int  # before it
    tokens: int


@dataclass
class Step:
    """The writes of the running step, as the worker needs them."""

    writes: Mapping[str, Sequence[Write]]  # by request
    group_of_layer: Mapping[str, int]
    req_ids: Sequence[str] = ()  # of the batch's rows, in order
    _planned: set[str] = field(default_factory=set)  # requests
    written: set[str] = field(default_factory=set)  # layers that have written their part of all states

    def writes_by_row(self, num_rows: int) -> dict[int, Sequence[Write]]:
        """The writes of the batch's first `num_rows` rows, for the rows that have any."""
        names = self.req_ids[:num_rows]
        self._planned.update(names)
        return {row: self.writes[name] for row, name in enumerate(names) if name in self.writes}

    def check(self) -> None:
        """Raises `StatesNotWritten` if a request was not planned, or a layer did not write."""
        if not self.writes:
            return
        groups = {group for of_request in self.writes.values() for write in of_request for group in write.blocks}
        layers = {layer for layer, group in self.group_of_layer.items() if group in groups}
        if layers and (missing := self.writes.keys() - self._planned):
            raise StatesNotWritten(f"seamark: {len(missing)} requests of this step were not in its batch. {WHAT_NOW}")
        if missing := layers - self.written:
            raise StatesNotWritten(f"seamark: {', '.join(sorted(missing))} kept no states in this step. {WHAT_NOW}")


def wrote_states(layer: str) -> None:
    """A layer of the running step has written its part of all states."""
    if RUNNING.step is not None:
        RUNNING.step.written.add(layer)


def writes_nothing() -> bool:
    """Whether a step runs that has no states to write, as most have none."""
    return RUNNING.step is not None and not RUNNING.step.writes


@inside(
    "worker-steps",
    f"{RUNNER_V1}:GPUModelRunner.execute_model",
    why="the layers have to know which states a step writes",
    mentions=("self._update_states(scheduler_output)", "req_ids = self.input_batch.req_ids"),
)
@inside(
    "worker-steps-v2",
    f"{RUNNER_V2}:GPUModelRunner.execute_model",
    why="the layers have to know which states a step writes, with model runner V2 too",
    mentions=("input_batch = self.prepare_inputs(",),
    on=Platform.GPU,
)
def track_steps(self: Any, scheduler_output: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    writes = getattr(scheduler_output, WRITES, None)
    if writes is None:
        return original(self, scheduler_output, *args, **kwargs)
    RUNNING.step = step = Step(writes, _groups_of_layers(self))
    batch = getattr(self, "input_batch", None)
    if batch is not None:  # model runner V1: the batch outlives the step, its list of requests is kept up to date
        step.req_ids = batch.req_ids
    try:
        result = original(self, scheduler_output, *args, **kwargs)
        step.check()
        return result
    finally:
        RUNNING.step = None


@inside(
    "worker-batch-v2",
    f"{RUNNER_V2}:GPUModelRunner.prepare_inputs",
    why="model runner V2 makes a new batch for each step, and its rows are in an order of their own",
    mentions=("req_ids=req_ids",),
    on=Platform.GPU,
)
def track_batch(self: Any, *args: Any, original: Function, **kwargs: Any) -> Any:
    batch = original(self, *args, **kwargs)
    if RUNNING.step is not None:
        RUNNING.step.req_ids = batch.req_ids
    return batch


@inside(
    "no-second-export",
    f"{LAYERS}.checkpoint:MambaPrefillCheckpointBuilder.build",
    why="vLLM's own export of one state per request would write into a block that is not meant for it",
)
def skip_vllm_exports(self: Any, m: Any, request_rows: Any, *, original: Function) -> Any:
    return None if RUNNING.step is not None else original(self, m, request_rows)


def _groups_of_layers(runner: Any) -> Mapping[str, int]:
    config, groups = getattr(runner, GROUPS, (None, {}))
    if config is not runner.kv_cache_config:
        config = runner.kv_cache_config
        groups = {name: gid for gid, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
        setattr(runner, GROUPS, (config, groups))
    return groups


def upload(numbers: Any, device: Any, dtype: Any = None) -> Any:
    """A tensor of (nested) integers on `device`, int64 unless told, without waiting for what runs there."""
    import torch
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(numbers, device=device, dtype=dtype or torch.int64)
