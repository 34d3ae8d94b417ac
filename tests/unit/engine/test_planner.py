"""Which states of a request are wanted."""

from types import SimpleNamespace

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.planner import (
    EXPECTED,
    JUNCTION,
    Planner,
)
from engine_patches.scheduler.request_state import Wish

GRID = Grid(16, 16)


def request(prompt, junction=0):
    return SimpleNamespace(num_prompt_tokens=prompt, shared_prefix_boundary=junction)


def targets(request, hinted):
    return Planner(GRID, 384).targets(Wish(hinted), request)


def test_a_junction_behind_the_last_computed_token_is_not_kept():
    assert targets(request(97, junction=96), ()) == [(96, JUNCTION)]
    assert targets(request(96, junction=96), ()) == []


PLANNER = Planner(GRID, 512)


def test_of_two_expected_states_side_by_side_the_first_serves():
    found = PLANNER.targets(Wish((160,), expected=(400, 416, 432)), request(700))
    assert [each.position for each in found if each.kind == EXPECTED] == [400, 432]
