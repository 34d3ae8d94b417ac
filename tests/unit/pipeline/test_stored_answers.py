"""What is stored: one bound for all of it, and a share of it for each key."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.pipeline import stored_answers
from proxy.pipeline.stored_answers import (
    Entry,
    Source,
    StoredAnswers,
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
