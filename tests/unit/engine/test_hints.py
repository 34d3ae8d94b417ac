"""A hint is a wish: what is wrong with it is dropped and counted, the rest is used."""

from collections import Counter

import pytest

from engine_patches.scheduler.hints import IGNORED_REASONS, MAX_ENTRIES, MAX_POSITIONS, usable_positions


def read(hint, prompt=1000, unit=16):
    ignored: Counter[str] = Counter()
    return usable_positions(hint, prompt, unit, lambda reason: ignored.update((reason,))), ignored


def test_positions_are_floored_to_the_match_unit():
    assert read([163, 470]) == ((160, 464), Counter())


def test_positions_of_one_unit_become_one_silently():
    assert read([160, 163, 175]) == ((160,), Counter())


def test_the_prompts_end_is_a_position():
    assert read([1000], prompt=1000) == ((992,), Counter())


@pytest.mark.parametrize(
    ("hint", "kept", "reason"),
    [
        ("163", (), "malformed"),
        (None, (), "malformed"),
        ({"tokens": 163}, (), "malformed"),
        (["163", 200], (192,), "malformed"),
        ([163.0, 200], (192,), "malformed"),
        ([True, 200], (192,), "malformed"),
        ([-5, 200], (192,), "out_of_range"),
        ([0, 200], (192,), "out_of_range"),
        ([200, 1001], (192,), "out_of_range"),
        ([200, 10**30], (192,), "out_of_range"),
        ([200, 100], (192,), "not_ascending"),
        ([200, 200], (192,), "not_ascending"),
        ([15, 200], (192,), "below_unit"),
    ],
)
def test_a_bad_entry_costs_only_itself_and_is_counted(hint, kept, reason):
    assert reason in IGNORED_REASONS
    assert read(hint) == (kept, Counter({reason: 1}))


def test_a_hint_is_not_read_to_its_end():
    positions, ignored = read([3] * 10_000)
    assert positions == () and ignored == Counter(too_many=1, below_unit=MAX_ENTRIES)


def test_a_request_gets_a_bounded_number_of_checkpoints():
    positions, ignored = read(list(range(16, 16 * 40, 16)))
    assert len(positions) == MAX_POSITIONS
    assert ignored == Counter(too_many=39 - MAX_POSITIONS)


def test_the_first_unit_and_the_last_token_are_positions():
    assert read([16, 1000]) == ((16, 992), Counter())
    assert read([15, 1001]) == ((), Counter(below_unit=1, out_of_range=1))
    assert read([1], unit=1) == ((1,), Counter())


def test_as_many_positions_and_entries_as_are_allowed_are_read():
    positions, ignored = read(list(range(16, 16 * (MAX_POSITIONS + 1), 16)))
    assert len(positions) == MAX_POSITIONS and not ignored
    assert read([3] * MAX_ENTRIES) == ((), Counter(below_unit=MAX_ENTRIES))
