"""What is stored: one bound for all of it, and a share of it for each key."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from sys import getsizeof
from types import SimpleNamespace

import pytest

from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.pipeline import stored_answers
from proxy.pipeline.stored_answers import (
    ENTRY_BYTES,
    PIECE_BYTES,
    Entry,
    Source,
    StoredAnswers,
    from_piece,
    grouped,
    weight_of,
)

HEADERS = [(b"content-type", b"application/json")]


@pytest.fixture
def source() -> Source:
    worker = Worker("http://a", None, probed=Probed(boot="1", models=[{"id": "m"}]))  # type: ignore[arg-type]
    return Source.of(worker, "m")


class Stored(StoredAnswers):
    """It counts what it lets go."""

    def __init__(self, most: int, source: Source) -> None:
        super().__init__(most, self._lets_go)
        self.gone = 0
        self._source = source

    def _lets_go(self) -> None:
        self.gone += 1

    def put(self, name: str, owner: str | None = None, size: int = 1000) -> bool:
        return self.add(name.encode(), self.entry(owner, size))

    def entry(self, owner: str | None = None, size: int = 1000) -> Entry:
        return Entry(HEADERS, (b"x" * size,), self._source, owner)

    def names(self, of: str | None = None) -> set[str]:
        return {key.decode() for key, entry in self._entries.items() if of is None or entry.owner == of}


def test_what_entries_weigh_is_no_less_than_what_they_take(source):
    held = Stored(2**30, source)
    made = [(str(number).encode() * 8, b"x" * (number % 700)) for number in range(5000)]
    held.put("warm")
    gc.collect()
    tracemalloc.start()
    try:
        for key, body in made:
            headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % (1000 + len(body)))]
            held.add(bytes(bytearray(key)), Entry(headers, (bytes(bytearray(body)),), source))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.3 * held.size < taken <= held.size


def test_the_least_recently_used_goes_first_and_what_is_too_large_is_not_stored(source):
    held = Stored(40_000, source)
    for name in "abc":
        held.put(name, size=8000)
    asked = held.get(b"a")
    assert asked is not None and held.lend(b"a", asked)
    held.returned(b"a", asked)
    assert held.take(None, 12_000)  # for an answer under way
    assert held.names() == {"a", "c"} and held.size <= 40_000
    assert not held.put("large", size=10_000) and not held.take(None, 40_000)


@pytest.mark.parametrize("size", [500, 3000, 9000])
def test_one_key_that_stores_without_end_costs_no_other_its_answers(source, size):
    held = Stored(100_000, source)
    for number in range(8):
        held.put(f"ann {number}", "ann")
        held.put(f"bob {number}", "bob")
    for number in range(200):
        held.put(f"flood {number}", "eve", size)
        assert held.size <= 100_000
    assert len(held.names("ann")) == len(held.names("bob")) == 8 and held.names("eve") and held.gone > 100
    assert f"flood {199}" in held.names("eve")


def test_a_key_that_comes_late_gets_its_share_of_one_that_has_all(source):
    held = Stored(100_000, source)
    for number in range(100):
        held.put(f"flood {number}", "eve")
    for number in range(100):
        held.put(f"ann {number}", "ann")
    held_by = {
        name: sum(entry.weight for entry in held._entries.values() if entry.owner == name) for name in ("ann", "eve")
    }
    assert abs(held_by["ann"] - held_by["eve"]) < 2 * (1000 + 2 * ENTRY_BYTES)


def test_answers_under_way_count_as_their_keys_and_leave_room_for_others(source):
    held = Stored(100_000, source)
    for number in range(4):
        held.put(f"ann {number}", "ann")
    taken = 0
    while held.take("eve", 1000):
        taken += 1000
    assert len(held.names("ann")) == 4 and 60_000 < taken < 70_000
    assert held.take("bob", 1000) and held.put("of bob", "bob")
    held.hold("eve", -taken)
    held.hold("bob", -1000)
    assert held.size == sum(entry.weight for entry in held._entries.values())


def test_what_nobody_has_asked_for_in_a_long_time_goes_whosever_it_is(source, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(stored_answers.time, "monotonic", lambda: now[0])
    held = Stored(40_000, source)
    for number in range(4):
        held.put(f"ann {number}", "ann")
    now[0] += stored_answers.STALE_SECONDS + 1
    for number in range(100):
        held.put(f"eve {number}", "eve")
    assert not held.names("ann")


def test_what_somebody_reads_stays_counted_until_it_has_been_read(source):
    held = Stored(40_000, source)
    held.put("read", size=8000)
    entry = held.get(b"read")
    assert entry is not None and held.lend(b"read", entry) and held.lend(b"read", entry)
    for number in range(30):
        held.put(f"other {number}")
    assert "read" in held.names()  # it would free nothing
    held.remove(b"read")
    assert held.get(b"read") is None and held.size > entry.weight + 1000
    before = held.size
    held.returned(b"read", entry)
    assert held.size == before
    held.returned(b"read", entry)
    assert held.size == before - entry.weight


def test_a_key_that_reads_none_of_what_it_asks_for_leaves_room_for_others(source):
    held = Stored(100_000, source)
    for number in range(100):
        held.put(f"eve {number}", "eve")
    lent = sum(held.lend(key, entry) for key, entry in [*held._entries.items()])
    assert 0 < lent < len(held)
    assert held.put("ann", "ann") and held.take("ann", 1000)


def test_the_counts_are_those_of_what_is_there_whatever_happens(source):
    draw = random.Random(5)
    held = Stored(60_000, source)
    lent: list[tuple[bytes, Entry]] = []
    taken: Counter[str] = Counter()
    for step in range(3000):
        owner, name = draw.choice("abc"), str(draw.randrange(40))
        match draw.randrange(6):
            case 0 | 1:
                held.put(name, owner, draw.randrange(12_000))
            case 2 if (entry := held.get(name.encode())) is not None and held.lend(name.encode(), entry):
                lent.append((name.encode(), entry))
            case 3 if lent:
                held.returned(*lent.pop(draw.randrange(len(lent))))
            case 4 if held.take(owner, 700):
                taken[owner] += 700
            case 5 if taken[owner]:
                held.hold(owner, -taken.pop(owner))
        there = {id(entry): entry for entry in [*held._entries.values(), *(entry for _, entry in lent)]}
        assert held.size == sum(entry.weight for entry in there.values()) + taken.total() <= 60_000, step
        assert held._fixed == sum(entry.weight for entry in there.values() if entry.readers) + taken.total()
        assert held._idle.keys() == {key for key, entry in held._entries.items() if not entry.readers}
    for key, entry in lent:
        held.returned(key, entry)
    for owner in [*taken]:
        held.hold(owner, -taken.pop(owner))
    for key in [*held._entries]:
        held.remove(key)
    assert held.size == held._fixed == 0 and not (held._held_of or held._fixed_of or held._idle_of)


def test_pieces_are_put_together_up_to_a_bound_and_no_byte_is_lost():
    draw = random.Random(1)
    pieces = [bytes([number % 256]) * draw.choice((1, 300, 40_000, 2**18)) for number in range(200)]
    together = [*grouped(pieces)]
    assert b"".join(together) == b"".join(pieces) and len(together) < len(pieces)
    assert all(len(piece) <= PIECE_BYTES or piece in pieces for piece in together)
    assert from_piece([], 0) == (b"", 0) and from_piece(pieces, len(pieces)) == (b"", len(pieces))


@pytest.mark.parametrize(
    ("before", "now", "stands"),
    [
        ({}, {}, True),
        ({}, {"up": False}, False),
        ({}, {"boot": "2"}, False),
        ({}, {"card": {"id": "m", "root": "/other"}}, False),
        ({}, {"card": {"id": "m", "parent": "base"}}, False),
        ({}, {"card": {"id": "m", "max_model_len": 7}}, False),
        ({}, {"card": {"id": "m", "created": 7}}, True),
        ({}, {"card": {"id": "another"}}, False),
        ({}, {"template": b"t"}, True),
        ({"template": b"t"}, {"template": b"t"}, True),
        ({"template": b"t"}, {}, True),
        ({"template": b"t"}, {"template": b"other"}, False),
    ],
)
def test_a_source_is_still_what_it_was(before, now, stands):
    worker = Worker("http://a", None)  # type: ignore[arg-type]

    def runs(up: bool = True, boot: str = "1", card: dict | None = None, template: bytes | None = None) -> None:
        worker.up, worker.probed = up, Probed(boot=boot, models=[{"id": "n"}, card or {"id": "m"}])
        worker.renderer_ids = {} if template is None else {"m": template}

    runs(**before)
    source = Source.of(worker, "m")
    assert source.is_still("m")
    runs(**now)
    assert source.is_still("m") is stands


def test_an_entry_weighs_what_its_parts_do(source):
    bare = Entry([], (), source).weight
    assert bare == 1400 + getsizeof([]) + getsizeof(())
    header = (b"content-type", b"application/json")
    held = getsizeof([header]) - getsizeof([]) + getsizeof(header) + sum(map(getsizeof, header)) + 8
    assert Entry([header], (), source).weight == bare + held
    pieces = (b"x" * 10, b"")
    assert Entry([], pieces, source).weight == bare + sum(map(getsizeof, pieces)) + 2 * 8
    assert weight_of(pieces[0]) == getsizeof(pieces[0]) + 8
    assert Entry([], pieces, source, weight=7).weight == bare + 7


def test_an_answer_may_take_a_quarter_to_the_byte(source):
    weight = Entry(HEADERS, (b"x" * 1000,), source).weight
    for most, fits in ((4 * weight, True), (4 * weight - 1, False)):
        held = Stored(most, source)
        assert held.largest == most // 4 and held.put("a") is fits and len(held) == fits


def test_answers_fit_to_the_byte(source):
    weight = Entry(HEADERS, (b"x" * 1000,), source).weight
    for most, kept in ((5 * weight, 5), (5 * weight - 1, 4)):
        held = Stored(most, source)
        for name in "abcde":
            held.put(name)
        assert len(held) == kept and held.gone == 5 - kept and held.size == kept * weight
        assert held.get(b"e") is not None and (held.get(b"a") is not None) == (kept == 5)


def test_one_in_the_place_of_another_counts_once(source):
    held = Stored(100_000, source)
    held.put("a")
    before = held.size
    held.put("a")
    assert held.size == before and len(held) == 1 and held.gone == 0
    held.put("a", size=90_000)  # no room: and the former one is another answer than what would come now
    assert held.size == len(held) == 0
    held.remove(b"a")
    assert held.size == 0


@pytest.mark.parametrize(("owner", "most"), [(None, 10_000), ("ann", 6666)])
def test_a_key_leaves_half_of_what_it_has_under_way_free(source, owner, most):
    """Twice what is free at most: two thirds of all; without keys there is nobody to leave it to."""
    for size, fits in ((most, True), (most + 1, False)):
        held = Stored(10_000, source)
        assert held.take(owner, size) is fits and held.size == size * fits
    held = Stored(10_000, source)
    assert held.take("bob", 4000) and held.take("ann", 4000) and not held.take("ann", 1)


def test_what_is_lent_cannot_go_and_counts_as_such_once(source):
    held = Stored(20_000, source)
    held.put("a", "ann")
    entry = held.get(b"a")
    weight = entry.weight
    assert held.lend(b"a", entry) and held.lend(b"a", entry) and entry.readers == 2
    assert held.take("bob", 2 * (20_000 - weight) // 3) and not held.take("bob", 10)
    held.hold("bob", -(2 * (20_000 - weight) // 3))
    held.returned(b"a", entry)
    assert entry.readers == 1 and held._fixed == weight
    held.returned(b"a", entry)
    assert entry.readers == 0 and held._fixed == 0 and held.size == weight and held.get(b"a") is entry


def test_of_equals_the_others_oldest_goes(source):
    weight = Entry(HEADERS, (b"x" * 1000,), source).weight
    held = Stored(4 * weight, source)
    for name, owner in (("a1", "ann"), ("b1", "bob"), ("b2", "bob"), ("a2", "ann")):
        held.put(name, owner)
    held.put("c", "cleo")
    assert held.names() == {"b1", "b2", "a2", "c"}  # of those who hold most, the first
    held.put("b3", "bob")  # which is to hold more than any other one
    assert held.names("bob") == {"b2", "b3"} and held.names("ann") == {"a2"}


@pytest.mark.parametrize(("hours", "goes"), [(1.0, False), (1.001, True)])
@pytest.mark.parametrize("is_asked", [True, False])
def test_an_answer_is_stale_an_hour_after_it_was_asked_for(source, monkeypatch, hours, goes, is_asked):
    now = [0.0]
    monkeypatch.setattr(stored_answers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    weight = Entry(HEADERS, (b"x" * 1000,), source).weight
    held = Stored(4 * weight, source)
    held.put("a", "ann")
    now[0] = 1800.0
    if is_asked:
        entry = held.get(b"a")
        assert held.lend(b"a", entry)
        held.returned(b"a", entry)
    else:
        now[0] = 0.0
    for name in ("e1", "e2", "e3"):
        held.put(name, "eve")
    now[0] = 3600.0 * hours + (1800.0 if is_asked else 0.0)
    held.put("e4", "eve")
    assert (held.names("ann") == set()) is goes


def test_answers_go_by_the_boot_that_computed_them(source):
    other = Worker("http://b", None, probed=Probed(boot="2", models=[{"id": "m"}]))  # type: ignore[arg-type]
    held = Stored(100_000, source)
    held.put("a")
    held.add(b"b", Entry(HEADERS, (b"x",), Source.of(other, "m")))
    held.remove_all(other.boot)
    assert held.names() == {"a"}
    held.remove_all("3")
    assert held.names() == {"a"}
    held.remove_all(None)
    assert held.names() == set() and held.size == 0 and held.gone == 0


@pytest.mark.parametrize(
    ("sizes", "at", "end"),
    [
        ([65_536], 0, 1),
        ([70_000, 1], 0, 1),
        ([65_535, 1, 1], 0, 2),
        ([65_536, 1], 0, 1),
        ([1, 65_536], 0, 1),
        ([7, 1, 2, 3], 1, 4),
        ([7, 1], 2, 2),
    ],
)
def test_pieces_go_together_up_to_64_kib(sizes, at, end):
    pieces = [b"%d" % (number % 10) * size for number, size in enumerate(sizes)]
    body, next_one = from_piece(pieces, at)
    assert next_one == end and body == b"".join(pieces[at:end])
    assert end != at + 1 or body is pieces[at]
