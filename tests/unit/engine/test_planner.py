"""Which states of a request are wanted."""

from types import SimpleNamespace

import pytest

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.planner import (
    EDGE,
    EXPECTED,
    HINTED,
    JUNCTION,
    LEARNED,
    SPARE,
    TAIL,
    CheckpointTarget,
    Planner,
)
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


PLANNER = Planner(GRID, 512)


def test_all_that_is_known_of_a_request_becomes_its_wish():
    ignored: list[str] = []
    wish = PLANNER.wish([-24, 170, 9, "last:7"], (976, 170, 9, 0), 1000, 320, (640, 1008), ignored.append)
    assert wish == Wish(
        hinted_positions=(160, 976),
        resolved=(976, 170, 9, 0),
        turn_end=976,
        shared=320,
        learned=320,
        expected=(640, 992),
    )
    assert ignored == ["below_unit"]


@pytest.mark.parametrize(
    ("alignment", "shared", "learned"),
    [(16, 112, 0), (16, 128, 128), (16, 0, 0), (256, 240, 0), (256, 256, 256), (64, 176, 128)],
)
def test_what_is_shared_is_learned_from_128_tokens_and_a_step_of_the_grid_on(alignment, shared, learned):
    assert not PLANNER.is_worth_learning(127)
    planner = Planner(Grid(16, alignment), 512)
    assert planner.is_worth_learning(shared) is (learned > 0)
    assert planner.wish(None, (), 1000, shared, (), print).learned == learned


@pytest.mark.parametrize(("entry", "learned"), [(319, 320), (320, 0), (351, 0), (352, 320), (304, 320)])
def test_a_hint_at_the_parting_or_a_little_behind_it_means_the_parting(entry, learned):
    assert PLANNER.wish([entry], (entry,), 1000, 320, (), print).learned == learned


def test_where_a_hash_covers_the_next_token_a_hint_right_at_the_parting_means_it_too():
    planner = Planner(Grid(16, 16, ahead=1), 512)
    assert planner.wish([320], (320,), 1000, 320, (), print).learned == 0
    assert planner.wish([319], (319,), 1000, 320, (), print).learned == 320


def test_the_same_prompt_again_is_left_at_its_last_whole_unit_but_one():
    assert PLANNER.wish([310], (310,), 321, 320, (), print).learned == 320
    assert PLANNER.wish([310], (310,), 320, 320, (), print).learned == 0  # hinted where it can be resumed
    assert PLANNER.wish([303], (303,), 320, 320, (), print).learned == 304


@pytest.mark.parametrize(
    ("start", "end", "resumable", "positions", "felt", "spare"),
    [
        (0, 600, 590, (), 0.0, 512),
        (0, 512, 590, (), 0.0, 512),
        (0, 511, 590, (), 0.0, 0),
        (0, 600, 511, (), 0.0, 0),
        (0, 1100, 1090, (), 0.0, 1024),
        (0, 1100, 600, (), 0.0, 512),
        (511, 1000, 1000, (), 0.0, 512),
        (512, 1000, 1000, (), 0.0, 0),
        (0, 600, 590, (512,), 0.0, 0),
        (0, 600, 590, (160, 496), 0.0, 512),
        (0, 600, 590, (496, 160), 16.0, 512),
        (0, 600, 590, (496, 160), 16.1, 0),
        (0, 600, 590, (528,), 500.0, 512),  # one behind it spares nothing before it
    ],
)
def test_a_spare_state_stands_at_the_last_edge_where_it_adds_to_what_is_there(
    start, end, resumable, positions, felt, spare
):
    assert PLANNER.spare(start, end, resumable, positions, felt) == spare
    assert Planner(Grid(16, 96), 512).spare(0, 600, 590, (), 0.0) == 480


@pytest.mark.parametrize(
    ("wish", "prompt", "turn"),
    [
        (Wish((160, 976), turn_end=976), 1000, TurnEnd(160, 976)),
        (Wish((160,)), 1000, TurnEnd(160, 992)),
        (Wish(learned=160), 1000, TurnEnd(160, 992)),
        (Wish((160, 320)), 1000, TurnEnd(160, 992)),
        (Wish((976,), turn_end=976), 1000, TurnEnd(0, 976)),
        (Wish((976,)), 1000, None),  # counted from the start, it may be what others share
        (Wish((912, 976), turn_end=976), 1000, None),  # so near, the first is no head of others
        (Wish((896, 976), turn_end=976), 1000, TurnEnd(896, 976)),
        (Wish((160,), learned=976), 1000, None),  # where it leaves an earlier prompt, it shares all
        (Wish((160,), expected=(640,)), 1000, TurnEnd(160, 992)),
        (Wish(), 1000, None),
        (Wish(), 100, None),
    ],
)
def test_the_turn_that_a_prompt_ends_with(wish, prompt, turn):
    assert PLANNER.last_turn(wish, request(prompt)) == turn


@pytest.mark.parametrize(
    ("kind", "position", "resumed_at", "hinted", "ends"),
    [
        *((kind, 320, 0, (), True) for kind in (TAIL, EDGE, EXPECTED, SPARE)),
        (JUNCTION, 320, 0, (), False),
        (HINTED, 320, 0, (320,), False),  # the only one
        (HINTED, 320, 0, (160, 320), True),
        (HINTED, 160, 0, (160, 320), False),
        (LEARNED, 320, 0, (), False),
        (LEARNED, 32, 0, (), False),  # it resumed from nothing
        (LEARNED, 320, 288, (), True),
        (LEARNED, 320, 272, (), False),
        (LEARNED, 320, 16, (), False),
    ],
)
def test_what_serves_one_conversation_alone(kind, position, resumed_at, hinted, ends):
    assert PLANNER.ends_a_turn(Wish(hinted), CheckpointTarget(position, kind), resumed_at) is ends


@pytest.mark.parametrize(("kind", "resumed_at", "saved"), [(HINTED, 159, 160), (LEARNED, 0, 160), (LEARNED, 80, 80)])
def test_a_learned_state_spares_what_it_adds_to_the_one_that_was_found(kind, resumed_at, saved):
    assert PLANNER.saved(CheckpointTarget(160, kind), resumed_at) == saved


@pytest.mark.parametrize(
    ("hinted", "expected", "kept"),
    [
        ((160,), (640,), True),
        ((160, 608), (640,), True),
        ((160, 624), (640,), False),  # as good as that
        ((160, 640), (640,), False),
        ((160, 656), (640,), True),  # one behind it serves nobody who leaves before
        ((160,), (704,), False),  # it cannot be resumed there
        ((160,), (0,), False),
    ],
)
def test_an_expected_state_is_kept_unless_another_is_as_good(hinted, expected, kept):
    found = PLANNER.targets(Wish(hinted, expected=expected), request(700))
    assert ([each for each in found if each.kind == EXPECTED] == [(expected[0], EXPECTED)]) is kept


def test_of_two_expected_states_side_by_side_the_first_serves():
    found = PLANNER.targets(Wish((160,), expected=(400, 416, 432)), request(700))
    assert [each.position for each in found if each.kind == EXPECTED] == [400, 432]


def test_a_prompt_that_is_cut_has_the_targets_of_the_whole_one():
    whole = PLANNER.targets(Wish((160,)), request(1000))
    assert PLANNER.targets(Wish((160,)), request(900), 1000) == whole != PLANNER.targets(Wish((160,)), request(900))


def test_the_end_of_a_turn_that_nobody_comes_back_to_is_not_kept():
    assert PLANNER.targets(Wish((160,), worthless_turn=992), request(1000)) == [(160, HINTED)]


def test_a_block_that_ends_two_steps_before_a_learned_position_is_kept_too():
    assert kinds(1500, (160, 1472), learned=1056) == {160: HINTED, 1024: EDGE, 1056: LEARNED, 1472: HINTED}
    assert kinds(1500, (160, 1472), learned=1040) == {160: HINTED, 1040: LEARNED, 1472: HINTED}
