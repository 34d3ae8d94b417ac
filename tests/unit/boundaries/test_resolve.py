"""Entries resolve as they are written, and as the naive search says."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_patches.scheduler import hints
from proxy.boundaries.resolve import (
    MAX_ENTRIES,
    MAX_IDS,
    encode_end,
    encode_ids,
    encode_opener,
    first_of,
    last_of,
    resolve,
)
from proxy.boundaries.template_facts import Opener


def ends(ids: list[int], pattern: list[int]) -> list[int]:
    """Where each occurrence ends, by trying every place."""
    size = len(pattern)
    return [at + size for at in range(len(ids) - size + 1) if ids[at : at + size] == pattern]


def test_occurrences_are_those_of_the_naive_search():
    rng = random.Random(5)
    for _ in range(2000):
        ids = [rng.randrange(3) for _ in range(rng.randrange(40))]
        pattern = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        found = ends(ids, pattern)
        assert first_of(ids, pattern) == (found[0] if found else 0)
        for skip in range(4):
            assert last_of(ids, pattern, skip) == (found[-1 - skip] if len(found) > skip else 0)


def test_the_engine_reads_the_same_entries_in_the_same_way():
    rng = random.Random(6)
    for _ in range(2000):
        ids = [rng.randrange(3) for _ in range(rng.randrange(40))]
        pattern = ",".join(str(rng.randrange(3)) for _ in range(rng.randrange(4)))
        words = rng.choice(["first", "last", "last-0", "last-1", "last-3", "first-1", "last-", "at"])
        hint = [
            rng.randrange(-45, 45),
            f"{words}:{pattern}",
            f"last:{pattern}",
            rng.choice([None, True, 2.0, [1], "7"]),
        ]
        assert tuple(resolve(hint, ids)) == hints.resolve(hint, ids, len(ids), lambda reason: None)


@pytest.mark.parametrize(
    ("entry", "position"),
    [
        (4, 4),
        (6, 6),
        (7, 0),  # behind the prompt
        (-1, 5),
        (-6, 0),  # nothing stands before it
        (0, 0),
        ("first:7,8", 2),
        ("last:7,8", 5),
        ("last-1:7,8", 2),
        ("last-2:7,8", 0),
        ("last:8,8", 0),
        ("last:9", 6),
    ],
)
def test_an_entry_names_a_position_in_the_prompt(entry, position):
    assert resolve([entry], [7, 8, 1, 7, 8, 9]) == [position]


@pytest.mark.parametrize(
    "entry",
    [
        *("last:", "last", "7", "last: 7", "last:7 ,8", "last:-7", "first-1:7", "last--1:7", "last:7,", "LAST:7"),
        *("last:٧", "last:" + ",".join(["7"] * (MAX_IDS + 1)), True, 1.0, None, [7]),
    ],
)
def test_what_is_no_entry_has_no_position(entry: Any):
    assert resolve([entry, 1], [7] * 300) == [0, 1]


def test_positions_keep_the_order_of_the_entries_and_end_with_the_sixteenth():
    assert resolve([5, -4, "first:7", 1], [7, 8, 9, 10, 11]) == [5, 1, 1, 1]
    assert len(resolve([1] * 20, [7])) == MAX_ENTRIES


def test_an_opener_is_written_as_an_entry_that_finds_it():
    opener = Opener((7, 8))
    ids = [1, 7, 8, 2, 7, 8, 3]
    assert resolve([encode_opener(opener), encode_opener(opener, "first"), encode_opener(opener, skip=1)], ids) == [
        6,
        3,
        3,
    ]


def test_a_long_opener_is_written_by_its_end():
    ids = list(range(1000, 1000 + MAX_IDS + 20))
    entry = encode_opener(Opener(tuple(ids)))
    assert entry.count(",") == MAX_IDS - 1
    assert resolve([entry], [*ids, 5]) == [len(ids)]


def test_the_first_occurrence_is_not_skipped():
    with pytest.raises(ValueError, match="from the end"):
        encode_opener(Opener((7,)), "first", skip=1)


@pytest.mark.parametrize(("end", "entry"), [(8, -8), (1, -1), (0, -1)])
def test_the_end_of_a_turn_lies_at_least_one_token_before_the_prompts_end(end, entry):
    assert encode_end(end) == entry


@pytest.mark.parametrize(
    ("ids", "options", "entry"),
    [
        ((7,), {}, "last:7"),
        ((7, 8), {"where": "first"}, "first:7,8"),
        ((7, 8), {"skip": 0}, "last:7,8"),
        ((7, 8), {"skip": 3}, "last-3:7,8"),
        ([7, 8], {"where": "first", "skip": 0}, "first:7,8"),
    ],
)
def test_ids_are_written_as_the_engine_reads_them(ids, options, entry):
    assert encode_ids(ids, **options) == entry == encode_opener(Opener(tuple(ids)), **options)


def test_as_many_ids_are_written_as_an_entry_may_have():
    for size in (MAX_IDS, MAX_IDS + 1):
        written = encode_ids(range(size)).removeprefix("last:").split(",")
        assert written == [str(number) for number in range(size)][-MAX_IDS:]
    whole = list(range(MAX_IDS + 2))
    assert resolve([encode_ids(whole[1:-1])], whole) == [MAX_IDS + 1]


def test_less_than_a_million_occurrences_are_skipped():
    assert resolve(["last-999999:7", "last-1000000:7"], [7] * 1_000_001) == [2, 0]
