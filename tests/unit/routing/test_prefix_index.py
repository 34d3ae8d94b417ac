"""Which worker was sent which prefix, how long it is, and how much of it its engine holds."""

from __future__ import annotations

import pytest
from prometheus_client import Counter

from proxy.boundaries.boundary import Boundary
from proxy.routing.prefix_index import ENTRY_BYTES, HOLDER_BYTES, Holding, PrefixIndex

SYSTEM, TURN = Boundary("system", b"s", "first:1", tokens=100), Boundary("turn", b"t", -5, tokens=400)

GUESSED = Boundary("system", b"s", "first:1", estimate=90)


@pytest.fixture
def prefix_index() -> PrefixIndex:
    return PrefixIndex(100 * ENTRY_BYTES)


def test_the_deepest_prefix_of_each_worker_is_known(prefix_index):
    prefix_index.record([SYSTEM, TURN], "a")
    prefix_index.record([SYSTEM], "b")
    assert prefix_index.longest((b"s", b"t", b"new"), ["a", "b", "c"]) == {
        "a": Holding(400, b"t", is_told=True),
        "b": Holding(100, b"s", is_told=True),
    }


def test_a_length_that_nobody_has_told_is_a_guess(prefix_index):
    prefix_index.record([GUESSED], "a")
    assert prefix_index.longest((b"s",), ["a"]) == {"a": Holding(90, b"s", is_told=False)}
    sent = prefix_index.sent((b"s",), ["a"])
    assert sent is not None and (sent.tokens, sent.size) == (0, 90)


def test_a_prefix_without_length_and_estimate_is_held_all_the_same(prefix_index):
    prefix_index.record([Boundary("system", b"s", "first:1")], "a")
    assert prefix_index.longest((b"s",), ["a"]) == {"a": Holding(1, b"s", is_told=False)}


def test_a_length_that_is_told_replaces_what_was_guessed_to_be_held(prefix_index):
    prefix_index.record([GUESSED], "a")
    prefix_index.record([GUESSED], "b")
    prefix_index.forget([b"s"], "b")
    sent = prefix_index.sent((b"s",), ["a"])
    prefix_index.set_length(b"s", 70)
    prefix_index.set_length(b"s", 0)  # nothing is told by that
    prefix_index.set_length(b"never", 70)
    assert prefix_index.longest((b"s",), ["a", "b"]) == {"a": Holding(70, b"s", is_told=True)}
    assert sent is not None and sent.tokens == 70  # a request that was sent before sees it


def test_a_length_that_a_later_request_brings_is_told_as_well(prefix_index):
    prefix_index.record([GUESSED], "a")
    prefix_index.record([SYSTEM], "b")
    assert prefix_index.longest((b"s",), ["a", "b"]) == {
        "a": Holding(100, b"s", is_told=True),
        "b": Holding(100, b"s", is_told=True),
    }


def test_what_the_engine_was_not_told_of_was_sent_and_is_not_held(prefix_index):
    learned = Boundary("learned", b"l", None, estimate=50)  # no hint tells of such a one: its engine finds it by itself
    prefix_index.record([GUESSED, TURN, learned], "a", ("first:1",))
    assert [prefix_index.holds(key, "a") for key in (b"s", b"t", b"l")] == [90, 0, 50]
    assert prefix_index.sent((b"s", b"t"), ["a"]).tokens == 400
    prefix_index.record([TURN], "a", (400,))  # an older engine, which is sent positions
    prefix_index.record([GUESSED], "a", ())
    assert [prefix_index.holds(key, "a") for key in (b"s", b"t")] == [90, 400]


def test_a_guess_replaces_nothing_that_was_told(prefix_index):
    prefix_index.record([SYSTEM], "a")
    prefix_index.record([GUESSED], "b")
    assert prefix_index.holds(b"s", "b") == 100 and prefix_index.sent((b"s",), ["b"]).tokens == 100


def test_a_restarted_worker_holds_nothing_but_is_remembered_to_have(prefix_index):
    prefix_index.record([SYSTEM], "a#boot1")
    assert prefix_index.longest((b"s",), ["a#boot2"]) == {}
    assert prefix_index.sent((b"s",), ["a#boot2"]) is None
    assert prefix_index.ever_sent((b"s", b"never")).tokens == 100
    assert prefix_index.ever_sent((b"never",)) is None


def test_what_an_engine_no_longer_holds_is_remembered_to_have_been_sent(prefix_index):
    prefix_index.record([SYSTEM, TURN], "a")
    prefix_index.record([TURN], "b")
    prefix_index.forget([b"t", b"never"], "a")
    held = prefix_index.longest((b"s", b"t"), ["a", "b"])
    assert {boot: holding.tokens for boot, holding in held.items()} == {"a": 100, "b": 400}
    prefix_index.forget_all("a")
    assert prefix_index.longest((b"s", b"t"), ["a"]) == {}
    assert prefix_index.sent((b"s", b"t"), ["a"]).tokens == prefix_index.ever_sent((b"s", b"t")).tokens == 400
    assert prefix_index.sent((b"s",), ["b", "c"]) is None


def test_what_an_engine_told_is_not_overwritten_by_the_next_request(prefix_index):
    prefix_index.record([SYSTEM], "a")
    prefix_index.set_held(b"s", "a", 96)
    prefix_index.set_held(b"s", "b", 96)  # was never sent it
    prefix_index.record([SYSTEM], "a")
    prefix_index.set_length(b"s", 100)
    assert prefix_index.longest((b"s",), ["a", "b"]) == {"a": Holding(96, b"s", is_told=True)}


def test_what_another_gateway_tells_is_taken_over_and_not_told_on(prefix_index):
    heard = []
    prefix_index.on_held = lambda *told: heard.append(told)
    prefix_index.on_forget = lambda keys, boot: heard.append((list(keys), boot))
    prefix_index.record_remote(b"s", 96, "a")
    assert prefix_index.longest((b"s",), ["a"]) == {"a": Holding(96, b"s", is_told=True)}
    prefix_index.forget([b"s"], "a", remote=True)
    assert prefix_index.longest((b"s",), ["a"]) == {} and not heard
    prefix_index.record([GUESSED], "a")
    assert not heard  # a guess is nobody's business
    prefix_index.set_held(b"s", "a", 96)
    prefix_index.forget([b"s"], "a")
    assert heard == [(b"s", 96, "a"), ([b"s"], "a")]


def test_many_workers_of_one_prefix_count_towards_the_bound():
    prefix_index = PrefixIndex(10 * ENTRY_BYTES)
    for number in range(1000):
        prefix_index.record([Boundary("system", b"%d" % (number % 10), 16, 16)], f"worker {number // 10}")
    assert prefix_index._bytes <= 10 * ENTRY_BYTES
    assert prefix_index._bytes == sum(
        ENTRY_BYTES + (len(prefix.held) - 1) * HOLDER_BYTES for prefix in prefix_index._prefixes.values()
    )


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


def test_holders_take_room_once_each_and_give_it_back_with_their_prefix():
    size = 2 * ENTRY_BYTES + HOLDER_BYTES
    prefix_index = PrefixIndex(size)
    for boot in ("v", "w", "w", "v"):
        prefix_index.record([Boundary("system", b"a", 16, 16)], boot)
    prefix_index.record([Boundary("system", b"b", 16, 16)], "v")
    assert len(prefix_index) == 2
    prefix_index.record([Boundary("system", b"c", 16, 16)], "v")
    assert [bool(prefix_index.holds(name, "v")) for name in (b"a", b"b", b"c")] == [False, True, True]
    prefix_index.record([Boundary("system", b"c", 16, 16)], "w")
    assert len(prefix_index) == 2


def test_an_engine_tells_lengths_of_prefixes_that_are_known_and_holdings_of_those_that_were_sent():
    told = []
    prefix_index = PrefixIndex(100 * ENTRY_BYTES)
    prefix_index.on_held = lambda *each: told.append(each)
    prefix_index.record([GUESSED], "a")
    prefix_index.set_length(b"s", 0)
    prefix_index.set_length(b"new", 100)
    assert len(prefix_index) == 1 and prefix_index.longest((b"s",), ["a"]) == {"a": Holding(90, b"s", is_told=False)}
    prefix_index.set_length(b"s", 1)
    assert prefix_index.longest((b"s",), ["a"]) == {"a": Holding(1, b"s", is_told=True)}
    prefix_index.set_held(b"s", "b", 64)
    prefix_index.set_held(b"new", "a", 64)
    assert (prefix_index.holds(b"s", "b"), prefix_index.holds(b"new", "a"), told) == (0, 0, [])
    prefix_index.set_held(b"s", "a", 64)
    prefix_index.set_held(b"s", "a", 0)
    assert prefix_index.holds(b"s", "a") == 0 and told == [(b"s", 64, "a")]


def test_what_is_forgotten_is_told_on_unless_another_gateway_told_it():
    told = []
    prefix_index = PrefixIndex(100 * ENTRY_BYTES)
    prefix_index.on_forget = lambda keys, boot: told.append((list(keys), boot))
    prefix_index.record([SYSTEM, TURN], "a")
    prefix_index.record([SYSTEM], "b")
    prefix_index.forget([b"new"], "a")
    prefix_index.forget([b"s"], "a", remote=True)
    assert not told and prefix_index.holds(b"s", "a") == 0 and prefix_index.holds(b"s", "b") == 100
    prefix_index.forget([b"s", b"t"], "a")
    assert told == [([b"t"], "a")]
    prefix_index.forget_all("b")
    prefix_index.forget_all("b")
    assert told[1:] == [([b"s"], "b")]


def test_the_deepest_beginning_that_was_sent_is_found_among_some_workers_or_all():
    prefix_index = PrefixIndex(100 * ENTRY_BYTES)
    prefix_index.record([SYSTEM, TURN], "a")
    prefix_index.record([SYSTEM], "b")
    sent = [prefix_index.sent((b"s", b"t", b"new"), boots) for boots in (["a", "b"], ["b"], ["c"])]
    assert [prefix.tokens if prefix is not None else None for prefix in sent] == [400, 100, None]
    ever = prefix_index.ever_sent((b"s", b"t", b"new"))
    assert ever is not None and ever.tokens == 400 and prefix_index.ever_sent((b"new",)) is None
