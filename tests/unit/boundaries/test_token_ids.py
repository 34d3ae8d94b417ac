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


def test_what_is_not_a_list_of_numbers_alone_is_none():
    for told in (b"12]", b'["1"]', b"[1.5]", b"[-1]", b"[[1]]", b"[1 2", b"{}"):
        assert TokenIds.in_answer(b'{"token_ids":%b}' % told, "token_ids") is None, told
    assert TokenIds.in_answer(b'{"token_ids":[1,2]}', "tokens") is None
    assert TokenIds.in_answer(b'{"token_ids":  [ 1 ,\t2\r\n]}', "token_ids").raw == b"1,2"


def test_no_ids_have_no_length_and_nothing_in_common():
    none, some = TokenIds(b""), TokenIds.of([1, 2])
    assert (len(none), none.ids(), len(some), some.ids()) == (0, [], 2, [1, 2])
    assert none.common_prefix(some) == some.common_prefix(none) == none.common_prefix(none) == 0


@pytest.mark.parametrize(
    ("left", "right", "shared"),
    [("", "", 0), ("a", "b", 0), ("ab", "ab", 2), ("ab", "a", 1), ("abc", "abd", 2), ("a" * 9 + "b", "a" * 9 + "c", 9)],
)
def test_the_common_beginning_of_two_texts(left, right, shared):
    assert common_prefix(left, right) == common_prefix(right, left) == shared
    assert common_prefix([*left], [*right]) == shared
