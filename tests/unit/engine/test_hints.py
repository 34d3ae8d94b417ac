"""A hint is a wish: what is wrong with it is dropped and counted, the rest is used; what came of it has one reason."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches.scheduler import hints, reasons
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.hints import (
    IGNORED_REASONS,
    MAX_COMPARED,
    MAX_COMPARED_OF_HINT,
    MAX_ENTRIES,
    MAX_PATTERN,
    NONE,
    first_end,
    hint_in,
    last_end,
    resolve,
    turn_end,
)
from engine_patches.scheduler.planner import Planner
from engine_patches.scheduler.reasons import BELOW_UNIT, COLD, EVICTED, HINT_IGNORED, HIT, NO_BOUNDARY, NOT_WORTH_IT
from engine_patches.scheduler.request_state import Wish

IDS = list(range(1, 1001))  # the token 500 is the 500th

PATTERN = ",".join(map(str, IDS[:MAX_PATTERN]))


def resolved(hint: Any, ids: Any = IDS) -> tuple[tuple[int, ...], Counter[str]]:
    ignored: Counter[str] = Counter()
    return resolve(hint, ids, 1000, lambda reason: ignored.update([reason])), ignored


def read(hint: Any) -> tuple[tuple[int, ...], Counter[str]]:
    """Positions at which a state is kept, and what was ignored."""
    positions, ignored = resolved(hint)
    kept = Planner(Grid(16, 16), 384).usable_positions(positions, lambda reason: ignored.update([reason]))
    return kept, ignored


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
    assert reason in IGNORED_REASONS and read([entry, 200]) == ((192,), Counter({reason: 1}))


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
            Counted.comparisons += 1
            return list.__getitem__(self, item)

    ids = Counted([5] * 200_000)
    assert last_end(ids, [4, 5]) == 0 and first_end(ids, [5, 4]) == 0
    assert Counted.comparisons < 3 * MAX_COMPARED
    Counted.comparisons = 0
    hint = ["last:" + ",".join(["5"] * 127 + ["4"]), "first:" + ",".join(["4"] + ["5"] * 127)] * 8
    assert resolve(hint, ids, len(ids), lambda reason: None) == (0,) * 16
    assert Counted.comparisons < 2 * MAX_COMPARED_OF_HINT


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
        assert carried({"boundaries": worded}, **others) is NONE and carried({}, xargs=[5], **others) == [5]
    assert carried() is NONE and carried(xargs=[5]) == [5]
    assert read(carried({"boundaries": [{"tokens": 3}] * 10_000})) == ((), Counter(too_many=1, below_unit=MAX_ENTRIES))


@pytest.mark.parametrize(
    "boundary",
    [
        {"tokens": True},
        {"tokens": "first:1"},
        {"behind": "first", "token_ids": []},
        {"behind": "first", "token_ids": ["1,2", None]},
        {"behind": "last", "token_ids": [1], "skip": -1},
        {"behind": "last", "token_ids": [1] * (MAX_PATTERN + 1)},
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
        ({96: NOT_WORTH_IT, 256: EVICTED}, 400, {"hinted_positions": (160,), "shared": 320}, 256, COLD),
        ({96: NOT_WORTH_IT, 256: EVICTED}, 400, {"hinted": False, "shared": 240}, 0, NOT_WORTH_IT),
        ({}, 400, {"hinted_positions": (160,), "shared": 176}, 160, COLD),  # nobody kept a state at 176
        ({}, 400, {"hinted_positions": (160, 320), "shared": 160}, 160, HIT),  # nobody has had what is behind
        ({}, 320, {"hinted": False, "shared": 320}, 304, HIT),
        ({}, 400, {"hinted": False, "shared": 320}, 0, NO_BOUNDARY),
        ({}, 400, {}, 0, HINT_IGNORED),
        ({}, 16, {}, 0, BELOW_UNIT),
    ],
)
def test_a_request_has_one_reason_the_deepest_cause(computed, tokens, wish, hit, reason):
    outcomes = reasons.Outcomes(Grid(16, 16))
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
    outcomes, first, other = reasons.Outcomes(Grid(16, 16, 16, 16)), request(), request(name="b")
    outcomes.computed(first, 144, EVICTED)
    for shared, missed in ((160, EVICTED), (144, COLD)):
        other.block_hashes = first.block_hashes[: shared // 16] + request(name="b").block_hashes[shared // 16 :]
        assert outcomes.reason_for(other, Wish((144,), hinted=True, shared=shared), 0) == missed
    assert outcomes.reason_for(first, Wish(hinted=True, shared=160), 144) == HIT, "all that it can have"
    chunked = reasons.Outcomes(Grid(16, 64))
    assert chunked.reason_for(first, Wish((128,), hinted=True, shared=176), 128) == HIT
    assert chunked.reason_for(first, Wish((128,), hinted=True, shared=192), 128) == COLD
