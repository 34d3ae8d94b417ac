"""Which worker was sent which prefix, how long it is, and how much of it its engine holds."""

from __future__ import annotations

import pytest
from prometheus_client import Counter

from proxy.boundaries.boundary import Boundary
from proxy.routing.prefix_index import ENTRY_BYTES, Holding, PrefixIndex

SYSTEM, TURN = Boundary("system", b"s", "first:1", tokens=100), Boundary("turn", b"t", -5, tokens=400)

GUESSED = Boundary("system", b"s", "first:1", estimate=90)


@pytest.fixture
def prefix_index() -> PrefixIndex:
    return PrefixIndex(100 * ENTRY_BYTES)


def test_a_length_that_a_later_request_brings_is_told_as_well(prefix_index):
    prefix_index.record([GUESSED], "a")
    prefix_index.record([SYSTEM], "b")
    assert prefix_index.longest((b"s",), ["a", "b"]) == {
        "a": Holding(100, b"s", is_told=True),
        "b": Holding(100, b"s", is_told=True),
    }


def test_what_an_engine_told_is_not_overwritten_by_the_next_request(prefix_index):
    prefix_index.record([SYSTEM], "a")
    prefix_index.set_held(b"s", "a", 96)
    prefix_index.set_held(b"s", "b", 96)  # was never sent it
    prefix_index.record([SYSTEM], "a")
    prefix_index.set_length(b"s", 100)
    assert prefix_index.longest((b"s",), ["a", "b"]) == {"a": Holding(96, b"s", is_told=True)}


def test_the_index_is_bounded():
    prefix_index = PrefixIndex(10 * ENTRY_BYTES)
    for number in range(100):
        prefix_index.record([Boundary("system", bytes([number]), 16, 16)], "a")
    assert len(prefix_index) == 10
    assert prefix_index.longest((bytes([99]),), ["a"]) and not prefix_index.longest((bytes([1]),), ["a"])


def test_what_had_to_go_for_others_is_counted_and_what_was_used_last_stays():
    evicted = Counter("evicted", "", registry=None)
    prefix_index = PrefixIndex(2 * ENTRY_BYTES, evicted)
    for name in (b"a", b"b", b"a", b"c"):
        prefix_index.record([Boundary("system", name, 16, 16)], "w")
    assert [bool(prefix_index.holds(name, "w")) for name in (b"a", b"b", b"c")] == [True, False, True]
    assert (len(prefix_index), evicted._value.get()) == (2, 1)
    small = PrefixIndex(1)
    for name in (b"a", b"b"):
        small.record([Boundary("system", name, 16, 16)], "w")
    assert len(small) == 1 and small.holds(b"b", "w")  # one is kept, whatever its size
