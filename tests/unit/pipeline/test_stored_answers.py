"""What is stored: one bound for all of it, a share of it for each key, and only what its worker would still say."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.metrics import Metrics
from proxy.pipeline import response_cache, stored_answers
from proxy.pipeline.response_cache import ResponseCache, has_fixed_weights
from proxy.pipeline.stored_answers import STALE_SECONDS, TIMES_WHAT_IS_FREE, Entry, Source, StoredAnswers
from tests.harness.sharing_clients import Client, a_worker

MOST = 60_000
KEYS = st.sampled_from([b"%d" % number for number in range(12)])
OWNERS = st.sampled_from(["ann", "ann", "bob", "eve", None])


class Storing(RuleBasedStateMachine):
    """Beside the naive model: each question is answered by looking through all that is there."""

    @initialize()
    def begins(self) -> None:
        self.patch, self.now, self.number = pytest.MonkeyPatch(), 0.0, 0
        self.patch.setattr(stored_answers.time, "monotonic", lambda: self.now)
        self.gone: list[bytes] = []  # in the model
        self.evicted = 0
        self.held = StoredAnswers(MOST, lambda: setattr(self, "evicted", self.evicted + 1))
        self.source = Source.of(a_worker(), "m")
        self.there: dict[bytes, Entry] = {}
        self.idle: list[bytes] = []  # the first of which nobody has asked for the longest
        self.lent: list[tuple[bytes, Entry]] = []
        self.under_way: Counter[str | None] = Counter()

    def entries(self, owner: str | None = "all") -> list[Entry]:
        found = {id(entry): entry for entry in [*self.there.values(), *(entry for _, entry in self.lent)]}
        return [entry for entry in found.values() if owner in ("all", entry.owner)]

    def holds(self, owner: str | None) -> int:
        return sum(entry.weight for entry in self.entries(owner)) + self.under_way[owner]

    def fixed(self, owner: str | None) -> int:
        return sum(entry.weight for entry in self.entries(owner) if entry.readers) + self.under_way[owner]

    def size(self) -> int:
        return sum(entry.weight for entry in self.entries()) + self.under_way.total()

    def may_fix(self, owner: str | None, size: int) -> bool:
        free = MOST - sum(entry.weight for entry in self.entries() if entry.readers) - self.under_way.total() - size
        return free >= 0 and (owner is None or self.fixed(owner) + size <= TIMES_WHAT_IS_FREE * free)

    def makes_room(self, owner: str | None, size: int) -> bool:
        while self.size() + size > MOST:
            goes = self.idle[0] if self.idle else None
            if goes is not None and self.now - self.there[goes].asked <= STALE_SECONDS:
                most = max((self.there[key].owner for key in self.idle), key=self.holds)
                of = most if self.holds(most) >= self.holds(owner) + size else owner
                goes = next((key for key in self.idle if self.there[key].owner == of), None)
            if goes is None:
                return False
            self.idle.remove(goes)
            self.gone.append(goes)
            del self.there[goes]
        return True

    def removes(self, key: bytes) -> None:
        if self.there.pop(key, None) is not None and key in self.idle:
            self.idle.remove(key)

    @rule(key=KEYS, owner=OWNERS, size=st.sampled_from([500, 3000, 8000, 13_000, 14_000]))
    def add(self, key: bytes, owner: str | None, size: int) -> None:
        self.number += 1  # no two weigh the same
        entry = Entry([(b"content-type", b"a/b")], (b"x" * (size + self.number),), self.source, owner)
        self.removes(key)
        fits = entry.weight <= MOST // 4 and self.makes_room(owner, entry.weight)
        if fits:
            self.there[key] = entry
            self.idle.append(key)
        assert self.held.add(key, entry) is fits

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.there)))
        entry = self.there[key]
        may = bool(entry.readers) or self.may_fix(entry.owner, entry.weight)
        assert self.held.lend(key, entry) is may
        if may:
            self.lent.append((key, entry))
            self.idle = [each for each in self.idle if each != key]

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def returned(self, data: st.DataObject) -> None:
        key, entry = self.lent.pop(data.draw(st.integers(0, len(self.lent) - 1)))
        self.held.returned(key, entry)
        if not entry.readers and self.there.get(key) is entry:
            self.idle.append(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        self.removes(key)
        self.held.remove(key)

    @rule(owner=OWNERS, size=st.sampled_from([700, 9000]))
    def take(self, owner: str | None, size: int) -> None:
        may = self.may_fix(owner, size) and self.makes_room(owner, size)
        assert self.held.take(owner, size) is may
        self.under_way[owner] += size * may

    @rule(owner=OWNERS)
    def give_back(self, owner: str | None) -> None:
        self.held.hold(owner, -self.under_way.pop(owner, 0))

    @rule(seconds=st.sampled_from([1.0, STALE_SECONDS, STALE_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def it_is_as_the_model_says(self) -> None:
        if self.number:
            assert {key: entry for number in range(12) if (entry := self.held.get(key := b"%d" % number))} == self.there
            assert self.held.size == self.size() <= MOST and self.evicted == len(self.gone)

    def teardown(self) -> None:
        for owner in ("ann", "bob", "eve", None):
            self.give_back(owner)
        for key, entry in self.lent:
            self.held.returned(key, entry)
        self.held.remove_all(None)
        self.patch.undo()
        assert self.held.size == 0 and len(self.held) == 0


TestStoring = Storing.TestCase
TestStoring.settings = settings(stateful_step_count=60)


@pytest.mark.parametrize(
    ("model", "cards", "fixed"),
    [
        ("m", [[{"id": "m"}]], True),
        ("m", [[{"id": "m"}], [{"id": "m", "parent": "base"}]], False),
        ("m", [], False),
        ("", [[{"id": "ada", "parent": "m"}]], True),
    ],
)
def test_an_adapter_may_be_replaced_and_a_base_model_may_not(model, cards, fixed):
    workers = [Worker(f"http://{at}", None, probed=Probed(models=each)) for at, each in enumerate(cards)]  # type: ignore[arg-type]
    assert has_fixed_weights(model, workers) is fixed


@pytest.mark.parametrize(
    ("name", "value", "stands"),
    [
        ("probed", Probed(boot="1", models=[{"id": "m", "created": 2}]), True),  # vLLM says now each time
        ("probed", Probed(boot="2", models=[{"id": "m"}]), False),
        ("probed", Probed(boot="1", models=[{"id": "m", "root": 7}]), False),
        ("renderer_ids", {"m": b"another"}, False),
        ("up", False, False),
    ],
)
@pytest.mark.parametrize(("age", "most"), [(10.0, None), (10.0, 10.0), (10.5, 10.0)])
def test_an_entry_stands_as_long_as_its_worker_and_for_whom_it_is_young_enough(
    monkeypatch, name, value, stands, age, most
):
    cache, worker, client = ResponseCache(2**20, Metrics()), a_worker(), Client("a")
    worker.renderer_ids = {"m": b"template"}
    cache.answers.add(b"k", stored := Entry([], (b"x",), Source.of(worker, "m")))
    monkeypatch.setattr(response_cache.time, "monotonic", lambda: stored.stored + age)
    setattr(worker, name, value)
    hit = cache.hit(b"k", client.request, most)
    assert (hit is not None) is (stands and (most is None or age <= most))
    assert (cache.answers.size > 0) is stands
