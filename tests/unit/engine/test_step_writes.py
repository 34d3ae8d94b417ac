"""The layers know the writes of the step that runs, and of no other; a state that is not written ends the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.footprint import RUNNING, WRITES
from engine_patches.forward.remote_reads import decline_late_reads
from engine_patches.forward.step_writes import (
    StatesNotWritten,
    Step,
    Write,
    running_step,
    skip_vllm_exports,
    track_batch,
    track_steps,
    writes_nothing,
    wrote_states,
)

WRITE = Write(4, {0: 7})  # blocks by cache group

LAYERS = {"layers.0": 0, "layers.1": 0, "layers.2": 1}  # the last one is no recurrent layer


def runner(*names: str) -> Any:
    """vLLM's, with a batch of such requests."""
    groups = [SimpleNamespace(layer_names=["layers.0", "layers.1"]), SimpleNamespace(layer_names=["layers.2"])]
    batch = SimpleNamespace(req_ids=[*names])
    return SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups), input_batch=batch)


def run(worker: Any, writes: Any, does: Any) -> Any:
    """One step that does so, and what it returns."""

    def execute_model(runner: Any, output: Any, *arguments: Any, **options: Any) -> Any:
        step = running_step()
        assert writes_nothing() is (step is not None and not writes)
        return does(step), arguments, options

    output = SimpleNamespace() if writes is None else SimpleNamespace(**{WRITES: writes})
    try:
        return track_steps(execute_model)(worker, output, 1, a=2)
    finally:
        assert running_step() is None, "after it nothing is known"


@pytest.mark.parametrize(
    ("rows", "layers", "fault"),
    [
        (2, ["layers.0", "layers.1"], ""),
        (2, ["layers.0"], r"layers\.1 kept no states.*SEAMARK_ENGINE=0"),
        (1, ["layers.0", "layers.1"], "1 requests of this step were not in its batch"),
    ],
)
def test_a_state_that_is_not_written_ends_the_engine(rows, layers, fault):
    def does(step: Step) -> None:
        assert step.writes_by_row(rows) == ({1: [WRITE]} if rows == 2 else {}) and step.group_of_layer == LAYERS
        for layer in layers:
            wrote_states(layer)

    if not fault:
        assert run(runner("a", "b"), {"b": [WRITE]}, does) == (None, (1,), {"a": 2})
        return
    with pytest.raises(StatesNotWritten, match=fault):
        run(runner("a", "b"), {"b": [WRITE]}, does)


def test_a_step_that_fails_or_writes_nothing_or_is_left_to_vllm_has_to_keep_nothing():
    def fails(step: Step) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        run(runner("b"), {"b": [WRITE]}, fails)
    run(runner("b"), {}, lambda step: None)
    assert run(runner("b"), None, lambda step: step) == (None, (1,), {"a": 2})
    wrote_states("layers.0")  # outside of a step


def test_layers_have_the_groups_of_the_cache_that_there_is_now():
    worker = runner()
    (first, *_), (second, *_) = (run(worker, {}, lambda step: step.group_of_layer) for _ in range(2))
    assert first == LAYERS and second is first, "they are found once"
    worker.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layers.9"])])
    assert run(worker, {}, lambda step: step.group_of_layer)[0] == {"layers.9": 0}


def test_a_runner_that_makes_a_batch_for_each_step_tells_its_requests(monkeypatch):
    made, worker = SimpleNamespace(req_ids=["b", "a"]), runner()
    del worker.input_batch
    assert list(run(worker, {}, lambda step: step.req_ids)[0]) == []
    prepare = track_batch(lambda *arguments, **options: made if (arguments, options) == (("r", 1), {"a": 2}) else None)
    for step in (None, Step({"a": [WRITE]}, {})):
        monkeypatch.setattr(RUNNING, "step", step)
        assert prepare("r", 1, a=2) is made
    assert step.writes_by_row(2) == {1: [WRITE]}


@pytest.mark.parametrize("runs", [True, False])
def test_vllm_exports_no_states_of_its_own_while_a_step_writes_them(monkeypatch, runs):
    monkeypatch.setattr(RUNNING, "step", Step({}, {}) if runs else None)
    build = skip_vllm_exports(lambda *given: given)
    assert build("builder", "m", "rows") == (None if runs else ("builder", "m", "rows"))


@pytest.mark.parametrize(
    ("known", "invalid", "lends", "late", "is_read"),
    [
        (True, False, False, False, True),
        (True, False, False, True, False),
        (False, False, False, True, True),  # its clock is not known yet: vLLM shakes hands first
        (True, True, False, True, True),  # vLLM gives it up itself
        (True, False, True, True, True),  # vLLM asks for the deadline itself
    ],
)
def test_only_a_read_of_blocks_that_may_have_been_freed_is_declined_and_vllm_hears_of_it(
    known, invalid, lends, late, is_read
):
    happened: list[Any] = []
    worker = SimpleNamespace(
        _remote_agents={"w": 1} if known else {},
        _invalid_remote_engines={"w"} if invalid else set(),
        _bidirectional_kv_xfer_enabled=lends,
        _recv_failures=["failures"],
        xfer_stats=SimpleNamespace(record_kv_expired_req=lambda: happened.append("expired")),
        _is_turn2_read_expired=lambda meta: late,
        _handle_failed_transfer=lambda *given, **more: happened.append((*given, more)),
    )
    meta = SimpleNamespace(remote=SimpleNamespace(engine_id="w"))
    decline_late_reads(lambda self, *given: happened.append(given))(worker, "r", meta)
    failed = ("r", None, ["failures"], {"record_failed_transfer": False})
    assert sorted(happened, key=str) == sorted([("r", meta)] if is_read else ["expired", failed], key=str)
