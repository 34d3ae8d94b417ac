"""The layers know the writes of the step that runs, and of no other."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.forward.step_writes import WRITES, Step, Write, running_step, track_steps

FIRST = {0: 7}  # blocks by cache group


def test_writes_are_found_by_the_rows_of_the_batch():
    step = Step({"b": [Write(1, FIRST)], "gone": [Write(1, FIRST)]}, {}, ["a", "b", "b-of-the-last-step"])
    assert step.writes_by_row(2) == {1: [Write(1, FIRST)]}
    assert step.writes_by_row(1) == {}


@pytest.mark.parametrize("fails", [False, True])
def test_a_steps_writes_are_known_while_it_runs_and_not_after(fails):
    known: list[Step | None] = []

    def execute_model(runner: Any, output: Any) -> None:
        known.append(running_step())
        if fails:
            raise RuntimeError("out of memory")

    group = SimpleNamespace(layer_names=["layers.0"])
    batch = SimpleNamespace(req_ids=["a"])
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[group]), input_batch=batch)
    output = SimpleNamespace(**{WRITES: {"a": [Write(4, FIRST)]}})
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        track_steps(execute_model)(runner, output)
    assert known == [Step({"a": [Write(4, FIRST)]}, {"layers.0": 0}, ["a"])]
    assert running_step() is None
