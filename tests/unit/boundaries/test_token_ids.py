"""Token ids compared as text say the same as compared as numbers."""

from __future__ import annotations

import random

import pytest

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


@pytest.mark.parametrize("answer", [b'{"token_ids":[1,22,3],"n":1}', b'[{"a":"]", "token_ids": [1, 22,\n3]}]'])
def test_ids_are_read_out_of_an_answer(answer):
    assert TokenIds.in_answer(answer, "token_ids").ids() == [1, 22, 3]


@pytest.mark.parametrize(
    "answer", [b"", b"{}", b'{"token_ids":null}', b'{"token_ids":[]}', b'{"token_ids":["a"]}', b'{"token_ids":[1']
)
def test_an_answer_without_ids_has_none(answer):
    assert TokenIds.in_answer(answer, "token_ids") is None


def test_a_batch_has_no_ids_of_its_own():
    assert TokenIds.in_answer(b'[{"token_ids":[1]},{"token_ids":[2]}]', "token_ids") is None
