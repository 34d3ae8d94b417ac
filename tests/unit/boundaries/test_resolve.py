"""Entries resolve as they are written, and as the naive search says."""

from __future__ import annotations

import random

import pytest

from engine_patches.scheduler import hints
from proxy.boundaries.resolve import (
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


def test_the_first_occurrence_is_not_skipped():
    with pytest.raises(ValueError, match="from the end"):
        encode_opener(Opener((7,)), "first", skip=1)


def test_less_than_a_million_occurrences_are_skipped():
    assert resolve(["last-999999:7", "last-1000000:7"], [7] * 1_000_001) == [2, 0]
