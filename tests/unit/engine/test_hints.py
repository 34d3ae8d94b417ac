"""What a hint says, where states can lie, which of a request are wanted, and the one reason of what came of it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches.scheduler import earlier_prompts, hints, planner
from engine_patches.scheduler.earlier_prompts import (
    BETWEEN_STATES,
    COLD,
    EVICTED,
    HINT_IGNORED,
    HIT,
    NO_BOUNDARY,
    NOT_WORTH_IT,
)
from engine_patches.scheduler.hints import MAX_ENTRIES, MAX_PATTERN, first_end, hint_in, last_end, resolve, turn_end
from engine_patches.scheduler.planner import EDGE, EXPECTED, HINTED, JUNCTION, LEARNED, TAIL, Grid, TurnEnd, Wish

IDS = list(range(1, 1001))  # the token 500 is the 500th

PATTERN = ",".join(map(str, IDS[:MAX_PATTERN]))


def resolved(hint: Any, ids: Any = IDS) -> tuple[tuple[int, ...], Counter[str]]:
    ignored: Counter[str] = Counter()
    return resolve(hint, ids, 1000, lambda reason: ignored.update([reason])), ignored


def read(hint: Any) -> tuple[tuple[int, ...], Counter[str]]:
    """Positions at which a state is kept, and what was ignored."""
    positions, ignored = resolved(hint)
    wish = planner.Planner(Grid(16, 16), 384).wish([], positions, 1000, 0, (), lambda reason: ignored.update([reason]))
    return wish.hinted_positions, ignored


def test_entries_are_resolved_in_their_order_to_the_token():
    hint = [163, -7, "last:500,501", "first:3", "last:4,6", "last-1:500", "nonsense", 1001, 1000, -1]
    positions, ignored = resolved(hint)
    assert positions == (163, 993, 501, 3, 0, 0, 0, 0, 1000, 999)
    assert ignored == Counter(not_found=2, malformed=1, out_of_range=1)
    assert resolved([163, -7, "last:1", "first:1"], ids=None) == ((163, 0, 0, 0), Counter(not_found=3))
    assert read([200, 100, 163, 175, 160, 16]) == ((16, 96, 160, 192), Counter()), "of one unit, in any order"
    counts = range(256, 256 + 16 * (MAX_ENTRIES - 1), 16)
    assert read([f"last:{PATTERN}", *counts]) == ((MAX_PATTERN, *counts), Counter()), "as many as are allowed"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        *((entry, "malformed") for entry in ("163", 163.0, True, None, "last:", "last:1,", "last:1, 2", "last:-1")),
        *((entry, "malformed") for entry in ("last:\u0661", "last--1:1", "last-:1", "first-1:1", "middle:1")),
        *((entry, "malformed") for entry in ("last:500\n", f"last:{PATTERN},1")),
        *((entry, "out_of_range") for entry in (-1000, -1001, 0, 1001, 10**30)),
        *((entry, "below_unit") for entry in (15, -990)),
        *((entry, "not_found") for entry in ("last:3,2", "first:1001")),
    ],
)
def test_a_bad_entry_costs_only_itself_and_is_counted(entry, reason):
    assert reason in hints.IGNORED_REASONS and read([entry, 200]) == ((192,), Counter({reason: 1}))


@pytest.mark.parametrize("more", [1, 10_000])
@pytest.mark.parametrize(("first", "end"), [(-7, 993), (5, 0), ("last:1,2", 0), (True, 0)])
def test_a_hint_is_not_read_to_its_end_and_has_a_turns_end_too(more, first, end):
    """This runs inside vLLM's `schedule()`, where an exception ends the engine."""
    hint = [first, *range(1, MAX_ENTRIES), *([-1] * more)]
    positions, ignored = resolved(hint)
    assert len(positions) == MAX_ENTRIES and ignored["too_many"] == 1 and turn_end(hint, positions) == end


@given(
    ids=st.lists(st.integers(0, 3), max_size=60),
    pattern=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    skipped=st.integers(0, 3),
)
@settings(max_examples=500)
def test_occurrences_are_those_of_a_naive_search(ids, pattern, skipped):
    size = len(pattern)
    ends = [at + size for at in range(len(ids) - size + 1) if ids[at : at + size] == pattern]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(hints, "_FIRST_SLICE", 2)
        patched.setattr(hints, "_LARGEST_SLICE", 8)
        assert last_end(ids, pattern, skipped) == ([0] * 4 + ends)[-1 - skipped]
        assert first_end(ids, pattern) == (ends or [0])[0]


def test_a_pattern_of_common_tokens_ends_the_search_early():
    class Counted(list):
        comparisons = 0

        def __getitem__(self, item):
            self.comparisons += 1
            return list.__getitem__(self, item)

    ids = Counted([5] * 200_000)
    assert last_end(ids, [4, 5]) == 0 and first_end(ids, [5, 4]) == 0
    assert ids.comparisons < 3 * hints.MAX_COMPARED
    ids.comparisons = 0
    hint = ["last:" + ",".join(["5"] * 127 + ["4"]), "first:" + ",".join(["4"] + ["5"] * 127)] * 8
    assert resolve(hint, ids, len(ids), lambda reason: None) == (0,) * 16
    assert ids.comparisons < 2 * hints.MAX_COMPARED_OF_HINT


def carried(*payloads: Any, kind: str = "kv.checkpoint", version: str = "1.7", xargs: Any = None) -> Any:
    """The hint of a request that came with these actions of vLLM's KV hints, and with `xargs`."""
    actions = [SimpleNamespace(action_type=kind, action_version=version, payload=payload) for payload in payloads]
    extra = None if xargs is None else {hints.FIELD: xargs}
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
    return hint_in(SimpleNamespace(kv_hints=SimpleNamespace(actions=actions), **vars(request)) if actions else request)


def test_an_action_of_vllms_kv_hints_says_the_same_as_a_hint_and_stands_in_its_place():
    first, last = {"behind": "first", "token_ids": [7, 8]}, {"behind": "last", "token_ids": [9]}
    worded = [{"tokens": 163}, {"tokens": -4}, first, {**last, "skip": 2}, {**last, "skip": 0, "of a later version": 1}]
    entries = [163, -4, "first:7,8", "last-2:9", "last:9"]
    assert carried({"boundaries": worded}, xargs=[5]) == entries
    assert carried({"boundaries": worded[:1]}, {"boundaries": worded[1:]}) == entries
    for others in ({"kind": "kv.fetch"}, {"version": "2.0"}):
        assert carried({"boundaries": worded}, **others) is hints.NONE and carried({}, xargs=[5], **others) == [5]
    assert carried() is hints.NONE and carried(xargs=[5]) == [5]
    assert read(carried({"boundaries": [{"tokens": 3}] * 10_000})) == ((), Counter(too_many=1, below_unit=MAX_ENTRIES))


@pytest.mark.parametrize(
    "boundary",
    [
        *({"tokens": tokens} for tokens in (True, "first:1")),
        *({"behind": "first", "token_ids": ids} for ids in ([], ["1,2", None], [1] * (MAX_PATTERN + 1))),
        {"behind": "last", "token_ids": [1], "skip": -1},
    ],
)
def test_a_boundary_that_an_action_does_not_word_is_malformed(boundary):
    assert read(carried({"boundaries": [boundary]})) == ((), Counter(malformed=1))
    assert read(carried(None)) == read(carried({"boundaries": boundary})) == ((), Counter(malformed=1))


def request(tokens: int = 400, name: str = "a", **more: Any) -> Any:
    hashes = [f"{name}{number}" for number in range(tokens // 16)]
    return SimpleNamespace(block_hashes=hashes, num_tokens=tokens, num_prompt_tokens=tokens, **more)


@pytest.mark.parametrize(
    ("computed", "tokens", "wish", "hit", "reason"),
    [
        ({160: EVICTED}, 400, {"hinted_positions": (160,)}, 0, EVICTED),
        ({160: EVICTED}, 400, {"hinted_positions": (160,)}, 160, HIT),
        ({160: EVICTED}, 160, {"hinted_positions": (160,)}, 0, COLD),  # its last token is always computed
        ({160: EVICTED, 320: NOT_WORTH_IT}, 400, {"hinted_positions": (160, 320)}, 160, NOT_WORTH_IT),  # the deepest
        ({96: NOT_WORTH_IT, 256: EVICTED}, 400, {"hinted_positions": (160,), "shared": 320}, 240, EVICTED),
        ({96: NOT_WORTH_IT, 256: EVICTED}, 400, {"hinted_positions": (160,), "shared": 320}, 256, BETWEEN_STATES),
        ({96: NOT_WORTH_IT, 256: EVICTED}, 400, {"hinted": False, "shared": 240}, 0, NOT_WORTH_IT),
        ({}, 400, {"hinted_positions": (160,), "shared": 176}, 160, BETWEEN_STATES),  # nobody kept a state at 176
        ({}, 400, {"hinted_positions": (160, 320), "shared": 160}, 160, HIT),  # nobody has had what is behind
        ({}, 320, {"hinted": False, "shared": 320}, 304, HIT),
        ({}, 400, {"hinted": False, "shared": 320}, 0, NO_BOUNDARY),
        ({}, 400, {}, 0, HINT_IGNORED),
        ({}, 16, {}, 0, earlier_prompts.BELOW_UNIT),
    ],
)
def test_a_request_has_one_reason_the_deepest_cause(computed, tokens, wish, hit, reason):
    outcomes = earlier_prompts.Outcomes(Grid(16, 16))
    for position, miss in computed.items():
        outcomes.computed(request(), position, COLD)
        outcomes.computed(request(), position, miss)  # what became of it last counts
    known = Wish(**{"hinted": True, **wish})
    assert outcomes.reason_for(request(tokens), known, hit) == reason
    if computed:
        assert outcomes.reason_for(request(tokens, "b"), known, 0) in (COLD, NO_BOUNDARY), "of another prompt"
    unread = request(tokens, skip_reading_prefix_cache=True)
    assert outcomes.reason_for(unread, known, 0) == HINT_IGNORED, "it is not looked up"


def test_a_prefix_goes_by_what_has_to_be_shared_beside_a_draft_head_and_inside_a_kernels_chunk():
    outcomes, first, other = earlier_prompts.Outcomes(Grid(16, 16, 16, 16)), request(), request(name="b")
    outcomes.computed(first, 144, EVICTED)
    for shared, missed in ((160, EVICTED), (144, COLD)):
        other.block_hashes = first.block_hashes[: shared // 16] + request(name="b").block_hashes[shared // 16 :]
        assert outcomes.reason_for(other, Wish((144,), hinted=True, shared=shared), 0) == missed
    assert outcomes.reason_for(first, Wish(hinted=True, shared=160), 144) == HIT, "all that it can have"
    chunked = earlier_prompts.Outcomes(Grid(16, 64))
    assert chunked.reason_for(first, Wish((128,), hinted=True, shared=176), 128) == HIT
    assert chunked.reason_for(first, Wish((128,), hinted=True, shared=192), 128) == BETWEEN_STATES


LENGTHS = range(400)


def deepest(grid: Grid, most: int) -> int:
    """The last position for a state up to there."""
    return max((state for state in range(grid.alignment, LENGTHS.stop, grid.alignment) if state <= most), default=0)


def matched(grid: Grid, tokens: int) -> int:
    """Tokens up to which vLLM's hashes of two prompts match that share so many: each covers what lies ahead of it."""
    return max(tokens - grid.ahead + grid.drop, 0) // grid.unit * grid.unit


@pytest.mark.parametrize("alignment", [16, 64])  # Mamba2 and states at chunk ends
@pytest.mark.parametrize("rest", [(0, 0), (16, 16), (0, 1)])  # as they are, a unit dropped, hashes of the next token
def test_what_hashes_deliver_is_what_tokens_allow(alignment, rest):
    grid = Grid(16, alignment, *rest)
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


def prompt_of(prompt: int, junction: int = 0) -> Any:
    return SimpleNamespace(num_prompt_tokens=prompt, shared_prefix_boundary=junction)


PLANNER = planner.Planner(Grid(16, 16), 512)

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
    reached = tail - planner.TURN_REACH

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
        is_near = any(reached <= each <= tail for each in shared)
        if place == tail and not is_near and (known or last >= block):
            return TAIL
        if edges and is_at(place, edges[-1]) and all(each > place and each >= reached for each in shared):
            return EDGE
        return EDGE if learned and is_at(place, learned // block * block) and learned - place >= near else ""

    kinds = {place: kind for place in places if place % grid.alignment == 0 and (kind := kind_of(place))}
    for place in expected:
        if place <= last and not any(0 <= place - each < near for each in kinds):
            kinds[place] = EXPECTED
    kinds.pop(worthless, None)
    wish = Wish(tuple(sorted(known)), learned=learned, expected=tuple(expected), worthless_turn=worthless)
    targets = planner.Planner(grid, block).targets
    assert targets(wish, prompt_of(prompt, junction)) == sorted(kinds.items())
    assert targets(wish, prompt_of(prompt - 1, junction), prompt) == sorted(kinds.items()), "cut, it is the same"


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
        *((Grid(16, 16), entry, 1000, 320, 0) for entry in (320, 335)),  # a hint means it
        *((Grid(16, 16), entry, 1000, 320, 320) for entry in (319, 336)),  # who leaves there cannot use its state
        (Grid(16, 16), 310, 321, 320, 320),
        (Grid(16, 16), 310, 320, 320, 0),  # hinted where the same prompt can be resumed
        (Grid(16, 16, ahead=1), 320, 1000, 320, 0),
    ],
)
def test_a_parting_from_earlier_prompts_is_learned_if_it_is_worth_it_and_no_hint_means_it(
    grid, entry, prompt, shared, learned
):
    assert planner.Planner(grid, 512).wish([entry], (entry,), prompt, shared, (), print).learned == learned


@given(UNITS, st.integers(0, 200), st.integers(0, 200), st.sets(UNITS, max_size=2), st.sampled_from([0.0, 32.0, 33.0]))
def test_a_spare_state_stands_at_the_last_edge_where_it_adds_to_what_is_there(start, end, resumable, positions, felt):
    edges = [edge for edge in range(64, 200, 64) if edge <= end and edge <= resumable]
    added = edges[-1] - max((each for each in positions if each <= edges[-1]), default=0) if edges else 0
    expected = edges[-1] if edges and edges[-1] > start and added > 0 and added >= felt else 0
    assert planner.Planner(Grid(16, 16), 64).spare(start, end, resumable, positions, felt) == expected


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
    assert PLANNER.last_turn(wish, prompt_of(1000)) == turn
    assert PLANNER.last_turn(Wish(), prompt_of(100)) is None


@pytest.mark.parametrize(
    ("kind", "position", "resumed_at", "hinted", "ends"),
    [
        *((kind, 320, 0, (), True) for kind in (TAIL, EDGE, EXPECTED, planner.SPARE)),
        (JUNCTION, 320, 0, (), False),
        (HINTED, 320, 0, (320,), False),  # the only one
        (HINTED, 320, 0, (160, 320), True),
        (LEARNED, 32, 0, (), False),  # it resumed from nothing
        (LEARNED, 320, 288, (), True),
        (LEARNED, 320, 272, (), False),
        (LEARNED, 976, 0, (160, 992), True),
        (LEARNED, 944, 0, (160, 992), False),
    ],
)
def test_what_serves_one_conversation_alone(kind, position, resumed_at, hinted, ends):
    target = planner.CheckpointTarget(position, kind)
    wish = Wish(hinted, turn_end=992 if 992 in hinted else 0)
    assert PLANNER.ends_a_turn(wish, target, resumed_at) is ends
    assert PLANNER.saved(target, resumed_at) == position - (resumed_at if kind == LEARNED else 0)


@pytest.mark.parametrize("wish", [{}, {"pin": True}, {"trial": True}], ids=["plain", "pinned", "on trial"])
def test_a_conversation_that_goes_on_passes_by_what_lies_between_its_head_and_its_end(wish):
    for before, passed in ((TurnEnd(160, 464), [] if wish else [480, 560]), (None, [])):
        known = Wish((160, 480, 560, 976), turn_end=976, goes_on_from=before, **wish)
        assert [p for p in known.positions if PLANNER.is_spare(known, planner.CheckpointTarget(p, HINTED))] == passed
