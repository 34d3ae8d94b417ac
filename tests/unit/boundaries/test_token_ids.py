"""Token ids compared as text say the same as compared as numbers."""

from __future__ import annotations

import random

from proxy.boundaries.token_ids import TokenIds, common_prefix

IDS = (1, 11, 111, 2, 22, 5)  # spelled so that one begins with another


def test_prefixes_and_lengths_are_those_of_the_numbers():
    draw = random.Random(0)
    for _ in range(2000):
        left = draw.choices(IDS, k=draw.randrange(12))
        right = left[: draw.randrange(13)] + draw.choices(IDS, k=draw.randrange(4))
        one, other = TokenIds.of(left), TokenIds.of(right)
        assert one.common_prefix(other) == common_prefix(left, right), (left, right)
        assert (len(one), one.ids()) == (len(left), left)


def test_no_ids_have_no_length_and_nothing_in_common():
    none, some = TokenIds(b""), TokenIds.of([1, 2])
    assert (len(none), none.ids(), len(some), some.ids()) == (0, [], 2, [1, 2])
    assert none.common_prefix(some) == some.common_prefix(none) == none.common_prefix(none) == 0
