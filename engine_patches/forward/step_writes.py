"""The states that the running step has to write, as the scheduler's output brings them to the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine_patches.ledger import Function

WRITES = "seamark_writes"  # on a scheduler's output: the states that the step has to write


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

    def writes_by_row(self, num_rows: int) -> dict[int, Sequence[Write]]:
        """The writes of the batch's first `num_rows` rows, for the rows that have any."""
        return {row: self.writes[name] for row, name in enumerate(self.req_ids[:num_rows]) if name in self.writes}


_step: Step | None = None


def running_step() -> Step | None:
    """The step that runs now; None outside of one, and if the scheduler leaves the states to vLLM."""
    return _step


def track_steps(original: Function) -> Function:
    """Replacement of a model runner's `execute_model`: makes the step's writes known to the layers."""

    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
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


def track_batch(original: Function) -> Function:
    """Replacement of `prepare_inputs` of model runner V2, which makes a new batch for each step."""

    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        if _step is not None:
            _step.req_ids = batch.req_ids
        return batch

    return prepare_inputs


def skip_vllm_exports(original: Function) -> Function:
    """Replacement of `MambaPrefillCheckpointBuilder.build`: no export of vLLM's own while Seamark writes the states."""

    def build(self: Any, m: Any, request_rows: Any) -> Any:
        return None if _step is not None else original(self, m, request_rows)

    return build


def _groups_of_layers(runner: Any) -> Mapping[str, int]:
    config = runner.kv_cache_config
    known = getattr(runner, "_seamark_groups", None)
    if known is None or known[0] is not config:
        groups = {name: gid for gid, group in enumerate(config.kv_cache_groups) for name in group.layer_names}
        known = runner._seamark_groups = (config, groups)
    of_layers: Mapping[str, int] = known[1]
    return of_layers


def upload(numbers: Any, device: Any, dtype: Any = None) -> Any:
    """A tensor of (nested) integers on `device`, int64 unless told, without waiting for what runs there."""
    import torch
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(numbers, device=device, dtype=dtype or torch.int64)
