"""Where states can lie and which of a request are wanted, against what that means: each position one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.planner import (
    EDGE,
    EXPECTED,
    HINTED,
    JUNCTION,
    LEARNED,
    SPARE,
    TAIL,
    TURN_REACH,
    CheckpointTarget,
    Planner,
)
from engine_patches.scheduler.request_state import TurnEnd, Wish

# Mamba2 and states at chunk ends: as they are, where a unit is dropped, where hashes cover the next token.
GRIDS = [Grid(16, alignment, *rest) for alignment in (16, 64) for rest in ((0, 0), (16, 16), (0, 1))]

LENGTHS = range(400)


def deepest(grid: Grid, most: int) -> int:
    """The last position for a state up to there."""
    return max((state for state in range(grid.alignment, LENGTHS.stop, grid.alignment) if state <= most), default=0)


def matched(grid: Grid, tokens: int) -> int:
    """Tokens up to which vLLM's hashes of two prompts match that share so many: each covers what lies ahead of it."""
    return max(tokens - grid.ahead + grid.drop, 0) // grid.unit * grid.unit


@pytest.mark.parametrize("grid", GRIDS)
def test_what_hashes_deliver_is_what_tokens_allow(grid):
    for tokens in LENGTHS:
        assert grid.floor(tokens) == deepest(grid, tokens)
        assert grid.usable(tokens) == deepest(grid, tokens - grid.ahead)
        assert grid.deliverable(matched(grid, tokens), 2 * tokens + 2) == grid.usable(tokens)
        # The same prompt again computes its last token.
        again = deepest(grid, tokens - max(grid.ahead, 1))
        assert grid.deliverable(matched(grid, tokens), tokens) == again == grid.floor(grid.resumable(tokens))
    for whole in range(grid.unit, LENGTHS.stop, grid.unit):
        assert matched(grid, grid.shared(whole)) == whole > matched(grid, grid.shared(whole) - 1)
    assert grid.shared(0) == 0


def request(prompt: int, junction: int = 0) -> Any:
    return SimpleNamespace(num_prompt_tokens=prompt, shared_prefix_boundary=junction)


PLANNER = Planner(Grid(16, 16), 512)


UNITS = st.integers(0, 12).map(lambda units: 16 * units)


@given(
    grid=st.sampled_from([Grid(16, 16), Grid(16, 16, ahead=1), Grid(16, 32), Grid(16, 16, 16, 16)]),
    block=st.sampled_from([48, 64, 100]),
    prompt=st.integers(1, 200),
    hinted=st.sets(UNITS, max_size=3),
    learned=UNITS,
    expected=st.sets(UNITS, max_size=2),
    junction=st.integers(0, 200),
    worthless=UNITS,
)
@settings(max_examples=600)
def test_each_position_has_the_kind_that_its_meaning_gives_it(
    grid, block, prompt, hinted, learned, expected, junction, worthless
):
    known, near, last = {grid.floor(each) for each in hinted} - {0}, 2 * grid.alignment, prompt - max(grid.ahead, 1)
    learned = grid.floor(min(learned, last))
    expected = sorted(each for each in expected if each >= near)
    shared, places = sorted((known | {learned}) - {0}), range(grid.alignment, 300)
    edges, tail = range(block, last + 1, block), grid.floor(last)

    def is_at(place: int, tokens: int) -> bool:
        """Whether it is the last place for a state up to there."""
        return place == grid.floor(tokens)

    def kind_of(place: int) -> str:
        if place in known:
            return HINTED
        if place == learned:
            return LEARNED
        if place > last:
            return ""
        if not shared and is_at(place, junction):
            return JUNCTION
        is_near = any(tail - TURN_REACH <= each <= tail for each in shared)
        if place == tail and not is_near and (known or last >= block):
            return TAIL
        if edges and is_at(place, edges[-1]) and all(each > place and each >= tail - TURN_REACH for each in shared):
            return EDGE
        return EDGE if learned and is_at(place, learned // block * block) and learned - place >= near else ""

    kinds = {place: kind for place in places if place % grid.alignment == 0 and (kind := kind_of(place))}
    for place in expected:
        if place <= last and not any(0 <= place - each < near for each in kinds):
            kinds[place] = EXPECTED
    kinds.pop(worthless, None)
    wish = Wish(tuple(sorted(known)), learned=learned, expected=tuple(expected), worthless_turn=worthless)
    found = Planner(grid, block).targets(wish, request(prompt, junction))
    assert found == sorted(kinds.items())
    assert Planner(grid, block).targets(wish, request(prompt - 1, junction), prompt) == found, "cut, it is the same"


def test_all_that_is_known_of_a_request_becomes_its_wish():
    ignored: list[str] = []
    wish = PLANNER.wish([-24, 170, 9, "last:7"], (976, 170, 9, 0), 1000, 320, (640, 1008), ignored.append)
    known = {"resolved": (976, 170, 9, 0), "turn_end": 976, "shared": 320, "learned": 320, "expected": (640, 992)}
    assert wish == Wish(hinted_positions=(160, 976), **known) and ignored == ["below_unit"]


@pytest.mark.parametrize(
    ("grid", "entry", "prompt", "shared", "learned"),
    [
        (Grid(16, 16), 0, 1000, 128, 128),
        (Grid(16, 256), 0, 1000, 240, 0),  # and of a step of the grid
        *((Grid(16, 16), entry, 1000, 320, 0) for entry in (320, 351)),  # a hint a little behind it means it
        *((Grid(16, 16), entry, 1000, 320, 320) for entry in (304, 319, 352)),
        (Grid(16, 16), 310, 321, 320, 320),
        (Grid(16, 16), 310, 320, 320, 0),  # hinted where the same prompt can be resumed
        (Grid(16, 16, ahead=1), 320, 1000, 320, 0),
    ],
)
def test_a_parting_from_earlier_prompts_is_learned_if_it_is_worth_it_and_no_hint_means_it(
    grid, entry, prompt, shared, learned
):
    assert Planner(grid, 512).wish([entry], (entry,), prompt, shared, (), print).learned == learned


@given(UNITS, st.integers(0, 200), st.integers(0, 200), st.sets(UNITS, max_size=2), st.sampled_from([0.0, 32.0, 33.0]))
def test_a_spare_state_stands_at_the_last_edge_where_it_adds_to_what_is_there(start, end, resumable, positions, felt):
    edges = [edge for edge in range(64, 200, 64) if edge <= end and edge <= resumable]
    added = edges[-1] - max((each for each in positions if each <= edges[-1]), default=0) if edges else 0
    expected = edges[-1] if edges and edges[-1] > start and added > 0 and added >= felt else 0
    assert Planner(Grid(16, 16), 64).spare(start, end, resumable, positions, felt) == expected


@pytest.mark.parametrize(
    ("wish", "turn"),
    [
        (Wish((160, 976), turn_end=976), TurnEnd(160, 976)),
        (Wish((160,)), TurnEnd(160, 992)),
        (Wish(learned=160), TurnEnd(160, 992)),
        (Wish((976,), turn_end=976), TurnEnd(0, 976)),
        (Wish((976,)), None),  # counted from the start, it may be what others share
        (Wish((912, 976), turn_end=976), None),  # so near, the first is no head of others
        (Wish((160,), learned=976), None),  # where it leaves an earlier prompt, it shares all
        (Wish(), None),
    ],
)
def test_the_turn_that_a_prompt_ends_with(wish, turn):
    assert PLANNER.last_turn(wish, request(1000)) == turn
    assert PLANNER.last_turn(Wish(), request(100)) is None


@pytest.mark.parametrize(
    ("kind", "position", "resumed_at", "hinted", "ends"),
    [
        *((kind, 320, 0, (), True) for kind in (TAIL, EDGE, EXPECTED, SPARE)),
        (JUNCTION, 320, 0, (), False),
        (HINTED, 320, 0, (320,), False),  # the only one
        (HINTED, 320, 0, (160, 320), True),
        (LEARNED, 32, 0, (), False),  # it resumed from nothing
        (LEARNED, 320, 288, (), True),
        (LEARNED, 320, 272, (), False),
    ],
)
def test_what_serves_one_conversation_alone(kind, position, resumed_at, hinted, ends):
    target = CheckpointTarget(position, kind)
    assert PLANNER.ends_a_turn(Wish(hinted), target, resumed_at) is ends
    assert PLANNER.saved(target, resumed_at) == position - (resumed_at if kind == LEARNED else 0)


@pytest.mark.parametrize("wish", [{}, {"pin": True}, {"trial": True}], ids=["plain", "pinned", "on trial"])
def test_a_conversation_that_goes_on_passes_by_what_lies_between_its_head_and_its_end(wish):
    for before, passed in ((TurnEnd(160, 464), [] if wish else [480, 560]), (None, [])):
        known = Wish((160, 480, 560, 976), turn_end=976, goes_on_from=before, **wish)
        assert [p for p in known.positions if PLANNER.is_passed_by(known, CheckpointTarget(p, HINTED))] == passed
