"""On vLLM's own scheduler, at a set pace: the gate makes no mean first token later, and shares what pays."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from engine_patches.scheduler.fan_out import (
    CLEAR_MARGIN,
    CLEAR_SAVING_SECONDS,
    CLEAR_TOKENS,
    MARGIN,
    MIN_SAVING_SECONDS,
)
from tests.harness.scheduler_process import run_forked
from tests.harness.simulated_fan_out import UNIT, Cell, mixed, table

MOST_WORSE = 1.02  # a mean first token with the gate over that without


@pytest.fixture(scope="module")
def simulated(model: Path):
    cells = [*table(), *mixed()]
    found = run_forked("simulated_fan_out", str(model), json.dumps([asdict(cell) for cell in cells]))
    return list(zip(cells, found, strict=True))


def ratio(sides) -> float:
    return sides["on"]["first_token"] / sides["off"]["first_token"]


def test_no_mean_first_token_is_later_with_the_gate_than_without(simulated):
    assert [(cell, ratio(sides)) for cell, sides in simulated if ratio(sides) > MOST_WORSE] == []


def test_a_prefix_is_computed_once_where_all_who_wait_save_more_than_a_pass(simulated):
    for cell, sides in simulated[: len(table())]:
        if not counts(cell):
            assert sides["on"]["computed"] == sides["off"]["computed"]
        else:
            assert sides["on"]["computed"] <= 1.02 * cell.ideal
            assert sides["off"]["computed"] >= 1.5 * cell.ideal
            assert ratio(sides) <= 0.8


def test_a_single_follower_with_little_to_gain_runs_along(simulated):
    alone = [(cell, sides) for cell, sides in simulated if cell.followers == 1 and not cell.strangers]
    assert [sides["on"] == sides["off"] for cell, sides in alone] == [not counts(cell) for cell, _ in alone]


def counts(cell: Cell) -> bool:
    """Whether all followers together save more than 1.5 passes, and time that counts: less where they save many."""
    found = cell.shared // UNIT * UNIT
    seconds = cell.followers * found * cell.token
    is_clear = found >= CLEAR_TOKENS and seconds >= CLEAR_MARGIN * cell.floor
    least = CLEAR_SAVING_SECONDS if is_clear else MIN_SAVING_SECONDS
    return seconds >= max(MARGIN * cell.floor, least)
