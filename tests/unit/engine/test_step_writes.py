"""The layers know the writes of the step that runs, and of no other; a state that is not written ends the engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.footprint import WRITES
from engine_patches.forward.step_writes import (
    StatesNotWritten,
    Step,
    Write,
    running_step,
    track_steps,
    wrote_states,
)

FIRST = {0: 7}  # blocks by cache group


def test_writes_are_found_by_the_rows_of_the_batch():
    step = Step({"b": [Write(1, FIRST)], "gone": [Write(1, FIRST)]}, {}, ["a", "b", "b-of-the-last-step"])
    assert step.writes_by_row(2) == {1: [Write(1, FIRST)]}
    assert step.writes_by_row(1) == {}


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


def test_a_worker_without_recurrent_layers_has_to_keep_nothing():
    attention = runner()
    del attention.kv_cache_config.kv_cache_groups[0].layer_names[:]
    track_steps(lambda runner, output: None)(attention, SimpleNamespace(**{WRITES: {"b": [Write(4, FIRST)]}}))


def test_a_step_without_writes_has_to_keep_nothing():
    track_steps(lambda runner, output: None)(runner(), SimpleNamespace(**{WRITES: {}}))
