"""Which states of a request are wanted."""

from types import SimpleNamespace

import pytest

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.planner import EDGE, HINTED, JUNCTION, LEARNED, TAIL, CheckpointTarget, Planner
from engine_patches.scheduler.request_state import TurnEnd, Wish

GRID = Grid(16, 16)


def request(prompt, junction=0):
    return SimpleNamespace(num_prompt_tokens=prompt, shared_prefix_boundary=junction)


def targets(request, hinted):
    return Planner(GRID, 384).targets(Wish(hinted), request)


def test_the_last_state_of_a_prompt_can_be_used_by_the_same_prompt():
    for length, ahead, tail in (
        (163, 0, 160),
        (160, 0, 144),
        (163, 16, 144),
        (160, 16, 144),
        (161, 1, 160),
        (160, 1, 144),
    ):
        (target,) = Planner(Grid(16, 16, ahead=ahead), 384).targets(Wish((32,)), request(length))[-1:]
        assert (target.position, target.kind) == (tail, TAIL)


def test_without_a_hint_what_vllm_keeps_is_kept():
    assert targets(request(1000), ()) == [(768, EDGE), (992, TAIL)]
    assert targets(request(1000, junction=500), ()) == [(496, JUNCTION), (768, EDGE), (992, TAIL)]
    assert targets(request(300), ()) == []
    assert targets(request(300, junction=100), ()) == [(96, JUNCTION)]
    assert targets(request(16), ()) == []


@pytest.mark.parametrize("wish", [{}, {"pin": True}, {"trial": True}], ids=["plain", "pinned", "on trial"])
def test_a_conversation_that_goes_on_passes_by_what_lies_between_its_head_and_its_end(wish):
    def passed(**more):
        known = Wish((160, 480, 560, 976), turn_end=976, **wish, **more)
        return [
            each for each in known.positions if Planner(GRID, 384).is_passed_by(known, CheckpointTarget(each, HINTED))
        ]

    assert passed(goes_on_from=TurnEnd(160, 464)) == ([] if wish else [480, 560])
    assert passed() == []


def test_a_turn_boundary_makes_the_tail_redundant():
    assert targets(request(1000), (160, 976)) == [(160, HINTED), (976, HINTED)]
    assert targets(request(1000), (160,)) == [(160, HINTED), (992, TAIL)]


def test_a_position_at_the_very_end_does_not_serve_the_same_prompt_again():
    assert targets(request(160), (160,)) == [(144, TAIL), (160, HINTED)]


def test_a_tail_within_reach_of_a_turn_is_not_kept_too():
    for position, kept in ((928, False), (912, True)):  # the tail is at 992: 64 and 80 tokens behind
        kinds = [target.kind for target in targets(request(1000), (position,))]
        assert (TAIL in kinds) is kept


def test_without_a_hint_a_prompt_of_one_block_and_a_token_keeps_its_block():
    assert targets(request(384), ()) == []
    assert targets(request(385), ()) == [(384, TAIL)]


def test_a_junction_behind_the_last_computed_token_is_not_kept():
    assert targets(request(97, junction=96), ()) == [(96, JUNCTION)]
    assert targets(request(96, junction=96), ()) == []


def kinds(prompt, hinted=(), learned=0, junction=0, block=512):
    wish = Wish(hinted, learned=learned)
    return {target.position: target.kind for target in Planner(GRID, block).targets(wish, request(prompt, junction))}


def test_without_a_hint_states_stand_where_vllm_stops():
    assert kinds(1500) == {1024: EDGE, 1488: TAIL}
    assert kinds(1500, junction=700) == {688: JUNCTION, 1024: EDGE, 1488: TAIL}
    assert kinds(500) == {}


def test_a_position_that_others_share_replaces_the_last_whole_block():
    assert kinds(1500, (160,)) == {160: HINTED, 1488: TAIL}
    assert kinds(1500, learned=160) == {160: LEARNED, 1488: TAIL}
    assert kinds(1500, learned=160, junction=700) == {160: LEARNED, 1488: TAIL}


def test_the_end_of_a_turn_alone_leaves_the_last_whole_block():
    assert kinds(1500, (1472,)) == {1024: EDGE, 1472: HINTED}
    assert kinds(1500, (160, 1472)) == {160: HINTED, 1472: HINTED}
    assert kinds(1540, (1520,)) == {1520: HINTED}  # a block that ends behind the turn is of no use to others
    assert kinds(500, (480,)) == {480: HINTED}


def test_a_learned_position_joins_those_of_a_hint():
    assert kinds(1500, (1472,), learned=704) == {512: EDGE, 704: LEARNED, 1472: HINTED}
    assert kinds(1500, (512, 1472), learned=704) == {512: HINTED, 704: LEARNED, 1472: HINTED}
    assert kinds(1500, (1472,), learned=1024) == {1024: LEARNED, 1472: HINTED}
    assert kinds(1500, (1472,), learned=1040) == {1040: LEARNED, 1472: HINTED}  # too near
    assert kinds(1500, learned=1488) == {1024: EDGE, 1488: LEARNED}
    assert kinds(400, learned=160) == {160: LEARNED}


@pytest.mark.parametrize(
    ("boundary", "ahead", "alignment", "position"),
    [
        (163, 16, 16, 144),
        (160, 16, 16, 144),
        (163, 1, 16, 160),
        (160, 1, 16, 144),
        (163, 16, 64, 128),
        (160, 0, 16, 160),
    ],
)
def test_a_state_lies_where_those_who_share_the_boundary_can_use_it(boundary, ahead, alignment, position):
    ignored: list[str] = []
    planner = Planner(Grid(16, alignment, ahead=ahead), 384)
    assert planner.usable_positions([boundary], ignored.append) == (position,) and not ignored


def test_a_boundary_whose_state_would_lie_before_the_first_unit_is_too_short():
    ignored: list[str] = []
    planner = Planner(Grid(16, 16, ahead=16), 384)
    assert planner.usable_positions([31, 32], ignored.append) == (16,) and ignored == ["below_unit"]
