"""The layers know the writes of the step that runs, and of no other; a state that is not written ends the engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.footprint import RUNNING, WRITES
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

FIRST = {0: 7}  # blocks by cache group


LAYERS = {"layers.0": 0, "layers.1": 0, "layers.2": 1}  # the last one is no recurrent layer


def runner() -> Any:
    groups = [SimpleNamespace(layer_names=["layers.0", "layers.1"]), SimpleNamespace(layer_names=["layers.2"])]
    batch = SimpleNamespace(req_ids=["a", "b"])
    return SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups), input_batch=batch)


def step_that(does: Callable[[Step], None]) -> None:
    """Run one step in which request `b` writes a state."""

    def execute_model(runner: Any, output: Any) -> None:
        step = running_step()
        assert step is not None
        does(step)

    track_steps(execute_model)(runner(), SimpleNamespace(**{WRITES: {"b": [Write(4, FIRST)]}}))


def write_all(step: Step) -> None:
    assert step.writes_by_row(2) == {1: [Write(4, FIRST)]} and step.group_of_layer == LAYERS
    wrote_states("layers.0")
    wrote_states("layers.1")


def test_a_steps_writes_are_known_while_it_runs_and_not_after():
    step_that(write_all)
    assert running_step() is None


def test_no_write_is_known_after_a_step_that_failed():
    def fail(step: Step) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        step_that(fail)
    assert running_step() is None


def test_a_layer_that_kept_no_states_ends_the_engine():
    def forget(step: Step) -> None:
        step.writes_by_row(2)
        wrote_states("layers.0")

    with pytest.raises(StatesNotWritten, match=r"layers\.1 kept no states.*SEAMARK_ENGINE=0"):
        step_that(forget)


def test_a_request_that_is_in_no_batch_ends_the_engine():
    def forget(step: Step) -> None:
        step.writes_by_row(1)
        wrote_states("layers.0")
        wrote_states("layers.1")

    with pytest.raises(StatesNotWritten, match="1 requests"):
        step_that(forget)


def test_a_step_without_writes_has_to_keep_nothing():
    track_steps(lambda runner, output: None)(runner(), SimpleNamespace(**{WRITES: {}}))


def test_outside_of_a_step_nothing_is_known_and_nothing_is_noted():
    wrote_states("layers.0")
    assert running_step() is None and not writes_nothing()


def test_a_step_that_the_scheduler_leaves_to_vllm_is_none():
    given: list[Any] = []

    def execute_model(*arguments: Any, **options: Any) -> str:
        given.append((arguments, options, running_step()))
        return "output"

    worker, output = runner(), SimpleNamespace()
    assert track_steps(execute_model)(worker, output, 1, a=2) == "output"
    assert given == [((worker, output, 1), {"a": 2}, None)]


def test_layers_have_the_groups_of_the_cache_that_there_is_now():
    seen: list[Any] = []

    def execute_model(runner: Any, output: Any) -> None:
        step = running_step()
        assert step is not None
        seen.append(step.group_of_layer)

    worker = runner()
    run = track_steps(execute_model)
    for _ in range(2):
        run(worker, SimpleNamespace(**{WRITES: {}}))
    assert seen[0] == LAYERS and seen[1] is seen[0], "they are found once"
    worker.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layers.9"])])
    run(worker, SimpleNamespace(**{WRITES: {}}))
    assert seen[2] == {"layers.9": 0}


def test_a_runner_that_makes_a_batch_for_each_step_tells_its_requests(monkeypatch):
    made = SimpleNamespace(req_ids=["b", "a"])
    given: list[Any] = []
    prepare = track_batch(lambda *arguments, **options: given.append((arguments, options)) or made)
    monkeypatch.setattr(RUNNING, "step", None)
    assert prepare("runner", 1, a=2) is made
    step = Step({"a": [Write(1, FIRST)]}, {})
    monkeypatch.setattr(RUNNING, "step", step)
    assert prepare("runner", 1, a=2) is made and step.writes_by_row(2) == {1: [Write(1, FIRST)]}
    assert given == [(("runner", 1), {"a": 2})] * 2


def test_a_runner_without_a_batch_of_its_own_begins_with_no_requests():
    worker = runner()
    del worker.input_batch
    seen: list[Any] = []
    run = track_steps(lambda runner, output: seen.append(running_step().req_ids))
    run(worker, SimpleNamespace(**{WRITES: {}}))
    assert list(seen[0]) == []


@pytest.mark.parametrize("runs", [True, False])
def test_vllm_exports_no_states_of_its_own_while_a_step_writes_them(monkeypatch, runs):
    monkeypatch.setattr(RUNNING, "step", Step({}, {}) if runs else None)
    build = skip_vllm_exports(lambda *given: given)
    assert build("builder", "m", "rows") == (None if runs else ("builder", "m", "rows"))


def test_a_layer_of_a_group_without_writes_has_to_keep_nothing():
    """Of a cache group whose states nobody asked for."""
    step = Step({"b": [Write(4, {1: 7})]}, {"layers.0": 0, "layers.2": 1}, ["b"])
    step.writes_by_row(1)
    step.wrote("layers.2")
    step.check()
    missing = Step({"b": [Write(4, {0: 7, 1: 7})]}, {"layers.0": 0, "layers.2": 1}, ["b"])
    missing.writes_by_row(1)
    missing.wrote("layers.2")
    with pytest.raises(StatesNotWritten, match=r"seamark: layers\.0 kept no states"):
        missing.check()
