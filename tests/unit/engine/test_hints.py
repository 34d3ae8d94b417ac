"""A hint is a wish: what is wrong with it is dropped and counted, the rest is used."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from engine_patches.scheduler import hints
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

IDS = list(range(1, 1001))  # the token 500 is the 500th


def read(hint, prompt=1000, unit=16):
    ignored: Counter[str] = Counter()

    def ignore(reason):
        ignored.update((reason,))

    exact = resolve(hint, IDS[:prompt], prompt, ignore)
    return Planner(Grid(unit, unit), 384).usable_positions(exact, ignore), ignored


def resolved(hint, ids=IDS):
    ignored: Counter[str] = Counter()
    return resolve(hint, ids, 1000, lambda reason: ignored.update((reason,))), ignored


def test_positions_are_floored_to_the_match_unit():
    assert read([163, 470]) == ((160, 464), Counter())


def test_positions_of_one_unit_become_one_silently():
    assert read([160, 163, 175]) == ((160,), Counter())


def test_the_order_of_entries_is_free():
    assert read([200, 100, 200]) == ((96, 192), Counter())


def test_the_prompts_end_is_a_position():
    assert read([1000], prompt=1000) == ((992,), Counter())


def test_entries_are_resolved_in_their_order_to_the_token():
    hint = [163, -7, "last:500,501", "first:3", "last:4,6", "last-1:500", "nonsense", 1001]
    assert resolved(hint) == (
        (163, 993, 501, 3, 0, 0, 0, 0),
        Counter(not_found=2, malformed=1, out_of_range=1),
    )


def test_without_token_ids_only_counts_from_the_start_are_resolved():
    assert resolved([163, -7, "last:1", "first:1"], ids=None) == ((163, 0, 0, 0), Counter(not_found=3))


@pytest.mark.parametrize(
    ("hint", "kept", "reason"),
    [
        ("163", (), "malformed"),
        (None, (), "malformed"),
        ({"tokens": 163}, (), "malformed"),
        (["163", 200], (192,), "malformed"),
        ([163.0, 200], (192,), "malformed"),
        ([True, 200], (192,), "malformed"),
        ([-1000, 200], (192,), "out_of_range"),
        ([-1001, 200], (192,), "out_of_range"),
        ([0, 200], (192,), "out_of_range"),
        ([200, 1001], (192,), "out_of_range"),
        ([200, 10**30], (192,), "out_of_range"),
        ([15, 200], (192,), "below_unit"),
        ([-990, 200], (192,), "below_unit"),
        (["last:3,2", 200], (192,), "not_found"),
        (["first:1001", 200], (192,), "not_found"),
        (["last:", 200], (192,), "malformed"),
        (["last:1,", 200], (192,), "malformed"),
        (["last:1, 2", 200], (192,), "malformed"),
        (["last:-1", 200], (192,), "malformed"),
        (["last:\u0661", 200], (192,), "malformed"),
        (["last--1:1", 200], (192,), "malformed"),
        (["last-:1", 200], (192,), "malformed"),
        (["first-1:1", 200], (192,), "malformed"),
        (["middle:1", 200], (192,), "malformed"),
        (["last:500\n", 200], (192,), "malformed"),
        (["last:" + ",".join(["1"] * (MAX_PATTERN + 1)), 200], (192,), "malformed"),
    ],
)
def test_a_bad_entry_costs_only_itself_and_is_counted(hint, kept, reason):
    assert reason in IGNORED_REASONS
    assert read(hint) == (kept, Counter({reason: 1}))


def test_a_hint_is_not_read_to_its_end():
    assert read([3] * 10_000) == ((), Counter(too_many=1, below_unit=MAX_ENTRIES))
    assert read(list(range(16, 16 * 40, 16))) == (tuple(range(16, 16 * 17, 16)), Counter(too_many=1))


@pytest.mark.parametrize("more", [1, 2, 10_000])
@pytest.mark.parametrize(("first", "end"), [(-7, 993), (5, 0), ("last:1,2", 0)])
def test_a_hint_with_more_entries_than_are_read_has_a_turns_end_too(more, first, end):
    """This runs inside vLLM's `schedule()`, where an exception ends the engine."""
    ignored = Counter[str]()
    hint = [first, *range(1, MAX_ENTRIES), *([-1] * more)]
    resolved = resolve(hint, IDS, len(IDS), lambda reason: ignored.update([reason]))
    assert len(resolved) == MAX_ENTRIES and ignored["too_many"] == 1
    assert turn_end(hint, resolved) == end


def test_as_many_entries_and_ids_as_are_allowed_are_read():
    pattern = ",".join(map(str, IDS[:MAX_PATTERN]))
    counts = range(256, 256 + 16 * (MAX_ENTRIES - 1), 16)
    assert read([f"last:{pattern}", *counts]) == ((MAX_PATTERN, *counts), Counter())


def test_the_first_unit_and_the_last_token_are_positions():
    assert read([16, 1000]) == ((16, 992), Counter())
    assert read([15, 1001]) == ((), Counter(below_unit=1, out_of_range=1))
    assert read([1], unit=1) == ((1,), Counter())
    assert read([-1]) == ((992,), Counter())


def ends(ids, pattern):
    """Ends of all occurrences, the naive way."""
    size = len(pattern)
    return [start + size for start in range(len(ids) - size + 1) if ids[start : start + size] == pattern]


def test_occurrences_are_those_of_a_naive_search(monkeypatch):
    monkeypatch.setattr(hints, "_FIRST_SLICE", 2)
    monkeypatch.setattr(hints, "_LARGEST_SLICE", 8)
    draw, found, skipped_to = random.Random(0), 0, 0
    for _ in range(8000):
        letters = draw.randrange(1, 5)
        ids = [draw.randrange(letters) for _ in range(draw.randrange(0, 60))]
        pattern = [draw.randrange(letters) for _ in range(draw.randrange(1, 7))]
        skipped = draw.randrange(4)
        expected = [0] * 4 + ends(ids, pattern)
        assert last_end(ids, pattern, skipped) == expected[-1 - skipped], (ids, pattern, skipped)
        assert first_end(ids, pattern) == next(filter(None, expected), 0), (ids, pattern)
        found += bool(expected[-1])
        skipped_to += bool(skipped and expected[-1 - skipped])
    assert found > 2000 and skipped_to > 1000  # the cases are not all of one kind


def test_a_pattern_across_slices_of_the_real_size_is_found():
    for behind in (0, 500, 511, 512, 513, 1535, 1536, 70_000):
        ids = [*range(100), 7, 8, 9, *([5] * behind)]
        assert last_end(ids, [7, 8, 9]) == 103


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


@pytest.mark.parametrize(
    ("hint", "resolved", "end"),
    [
        ([100, -5, "last:1"], (100, 195, 60), 195),
        ([-200, -5, -100], (0, 195, 100), 195),
        ([100, True], (100, 0), 0),
        ([], (), 0),
        (7, (), 0),
    ],
)
def test_the_end_of_a_turn_is_what_a_hint_counts_from_the_prompts_end(hint, resolved, end):
    assert turn_end(hint, resolved) == end


def carried(*actions, xargs=None):
    """The hint of a request that came with these `(type, version, payload)` of vLLM's KV hints, and with `xargs`."""
    made = [
        SimpleNamespace(action_id=str(number), action_type=kind, action_version=version, payload=payload)
        for number, (kind, version, payload) in enumerate(actions)
    ]
    envelope = SimpleNamespace(protocol_version="0.1", message_id="m", actions=made) if actions else None
    extra = None if xargs is None else {hints.FIELD: xargs}
    return hint_in(SimpleNamespace(kv_hints=envelope, sampling_params=SimpleNamespace(extra_args=extra)))


BOUNDARIES = {
    "boundaries": [
        {"tokens": 163},
        {"tokens": -4},
        {"behind": "first", "token_ids": [7, 8]},
        {"behind": "last", "token_ids": [9], "skip": 2},
        {"behind": "last", "token_ids": [9], "skip": 0, "of a later version": 1},
    ]
}


def test_an_action_of_vllms_kv_hints_says_the_same_as_a_hint():
    assert carried(("kv.checkpoint", "1.0", BOUNDARIES)) == [163, -4, "first:7,8", "last-2:9", "last:9"]


def test_an_action_stands_in_place_of_what_the_client_sent():
    one, other = {"boundaries": [{"tokens": 32}]}, {"boundaries": [{"tokens": 64}]}
    assert carried(("kv.checkpoint", "1.0", one), ("kv.checkpoint", "1.7", other), xargs=[5]) == [32, 64]


@pytest.mark.parametrize("action", [("kv.fetch", "1.0", {}), ("kv.checkpoint", "2.0", BOUNDARIES)])
def test_actions_that_are_not_ours_are_passed_over(action):
    assert carried(action) is NONE
    assert carried(action, xargs=[5]) == [5]


def test_a_request_without_an_envelope_is_read_as_before():
    assert carried() is NONE
    assert hint_in(SimpleNamespace(sampling_params=SimpleNamespace(extra_args={hints.FIELD: [5]}))) == [5]


@pytest.mark.parametrize(
    "payload",
    [
        None,
        {},
        {"boundaries": 163},
        {"boundaries": [163]},
        {"boundaries": [{}]},
        {"boundaries": [{"tokens": True}]},
        {"boundaries": [{"tokens": "first:1"}]},
        {"boundaries": [{"behind": "middle", "token_ids": [1]}]},
        {"boundaries": [{"behind": "first", "token_ids": []}]},
        {"boundaries": [{"behind": "first", "token_ids": ["1,2", None]}]},
        {"boundaries": [{"behind": "last", "token_ids": [1], "skip": -1}]},
        {"boundaries": [{"behind": "last", "token_ids": [1] * (MAX_PATTERN + 1)}]},
    ],
)
def test_a_boundary_that_an_action_does_not_word_is_malformed(payload):
    assert read(carried(("kv.checkpoint", "1.0", payload))) == ((), Counter(malformed=1))


def test_an_action_is_not_read_to_its_end():
    many = {"boundaries": [{"tokens": 3}] * 10_000}
    assert read(carried(("kv.checkpoint", "1.0", many))) == ((), Counter(too_many=1, below_unit=MAX_ENTRIES))
