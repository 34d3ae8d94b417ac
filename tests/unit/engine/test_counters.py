"""What is counted between two reports, and the gauge of bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.scheduler import counters
from engine_patches.scheduler.counters import MAX_REQUESTS, REPORT_INTERVAL, AdmittedRequest, Counters


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(counters.time, "monotonic", lambda: clock.now)
    return clock


class Pool:
    """A block pool, as far as it is asked which keys it holds."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = set(keys)
        self.asked: list[bytes] = []
        self.cached_block_hash_to_block = self

    def get_one_block(self, key: bytes) -> object | None:
        self.asked.append(key)
        return key if key in self.keys else None


def test_each_count_is_reported_once(clock):
    counted = Counters()
    counted.state_written(b"a", "tail")
    counted.hint_ignored("malformed")
    counted.request_admitted(AdmittedRequest("r", "hit", 160, 176, (163, 0)))
    counted.resumed(b"a", 160, 0.5)
    counted.resumed(b"not ours", 320, 0.25)
    counted.follower_not_held()
    counted.follower_released(1.5)
    counts = counted.take()
    assert (dict(counts.written), dict(counts.ignored), dict(counts.outcomes)) == (
        {"tail": 1},
        {"malformed": 1},
        {"hit": 1},
    )
    assert list(counts.requests) == [("r", "hit", 160, 176, (163, 0))]
    assert dict(counts.followers) == {"not_worth_it": 1, "held": 1}
    assert (counts.hits, counts.hit_tokens, counts.saved_seconds, counts.spent_seconds) == (1, 160, 0.75, 1.5)
    assert counted.take().empty


@pytest.mark.parametrize(
    "count",
    [
        lambda counted: counted.state_written(b"a", "tail"),
        lambda counted: counted.hint_ignored("malformed"),
        lambda counted: counted.request_admitted(AdmittedRequest("r", "hit", 160, 176, (163, 0))),
        lambda counted: counted.follower_not_held(),
    ],
)
def test_any_count_makes_a_report_due_and_otherwise_time_does(clock, count):
    counted = Counters()
    assert counted.report_due  # nothing was reported yet
    counted.bytes_held(Pool())
    assert not counted.report_due
    count(counted)
    assert counted.report_due
    counted.take()
    assert not counted.report_due
    clock.now += REPORT_INTERVAL
    assert counted.report_due


def test_bytes_are_those_of_states_that_are_still_cached():
    counted, pool = Counters(), Pool(b"a", b"b", b"c")
    counted.state_bytes = 100
    for key in (b"a", b"b", b"c", b"evicted before"):
        counted.state_written(key, "hinted")
    assert counted.bytes_held(pool) == 300
    pool.keys.remove(b"b")
    counted.keys_removed([b"b", b"c", b"another"])  # another block has `c`, too
    assert counted.bytes_held(pool) == 200
    counted.resumed(b"b", 160, 0.0)
    assert counted.take().hits == 0


def test_a_cache_that_is_emptied_as_a_whole_holds_no_state():
    counted, pool = Counters(), Pool(b"a")
    counted.state_bytes = 100
    counted.state_written(b"a", "hinted")
    assert counted.bytes_held(pool) == 100
    assert counted.bytes_held(Pool()) == 0
    counted.resumed(b"a", 160, 0.0)
    assert counted.take().hits == 0


def test_a_report_looks_only_at_states_that_lost_a_block():
    counted, pool = Counters(), Pool(*(b"%d" % number for number in range(100)))
    for number in range(100):
        counted.state_written(b"%d" % number, "hinted")
    counted.bytes_held(pool)
    counted.keys_removed([b"7", b"8"])
    pool.asked.clear()
    counted.bytes_held(pool)
    assert sorted(pool.asked) == [b"7", b"8"]
    counted.bytes_held(pool)
    assert len(pool.asked) == 2


def test_memory_is_bounded(clock, monkeypatch):
    monkeypatch.setattr(counters, "MAX_KNOWN_KEYS", 2)
    counted = Counters()
    counted.state_bytes = 1
    for number in range(MAX_REQUESTS + 10):
        counted.state_written(b"%d" % number, "tail")
        counted.keys_removed([b"%d" % number])
        counted.request_admitted(AdmittedRequest(str(number), "cold", 0, 0, ()))
    assert len(counted._removed) == 2
    assert counted.bytes_held(Pool(*(b"%d" % number for number in range(MAX_REQUESTS + 10)))) == 2
    counts = counted.take()
    assert len(counts.requests) == MAX_REQUESTS and counts.requests[-1][0] == str(MAX_REQUESTS + 9)
