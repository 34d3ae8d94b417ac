"""Entries resolve as they are written, and as the naive search says."""

from __future__ import annotations

import random

import pytest

from engine_patches.scheduler import hints
from proxy.boundaries.resolve import MAX_ENTRIES, MAX_IDS, encode_opener, first_of, last_of, resolve
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
    [(4, 4), (7, 0), (-1, 5), (-6, 0), (0, 0), ("first:7,8", 2), ("last:7,8", 5), ("last-1:7,8", 2), ("last:9", 6)]
    + [(odd, 0) for odd in ("last:", "last: 7", "last:-7", "first-1:7", "last:7,", "LAST:7", "last:٧", True, 1.0, [7])],
)
def test_an_entry_names_a_position_in_the_prompt_or_none(entry, position):
    assert resolve([entry, 1], [7, 8, 1, 7, 8, 9]) == [position, 1]
    assert len(resolve([1] * 20, [7])) == MAX_ENTRIES


def test_an_opener_is_written_as_an_entry_that_finds_it_a_long_one_by_its_end():
    ids = [1, 7, 8, 2, 7, 8, 3]
    entries = [encode_opener(Opener((7, 8)), *more) for more in ((), ("first",))] + [
        encode_opener(Opener((7, 8)), skip=1)
    ]
    assert resolve(entries, ids) == [6, 3, 3]
    long = [*range(1000, 1000 + MAX_IDS + 20)]
    assert resolve([encode_opener(Opener(tuple(long)))], [*long, 5]) == [len(long)]
    assert encode_opener(Opener(tuple(long))).count(",") == MAX_IDS - 1


def test_less_than_a_million_occurrences_are_skipped():
    assert resolve(["last-999999:7", "last-1000000:7"], [7] * 1_000_001) == [2, 0]
