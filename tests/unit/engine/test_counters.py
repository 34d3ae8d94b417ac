"""What is counted between two reports."""

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


def test_each_count_is_reported_once(clock):
    counted = Counters()
    counted.state_written("tail")
    counted.hint_ignored("malformed")
    counted.request_admitted(AdmittedRequest("r", "hit", 160, 176, (163, 0)))
    counted.resumed(160, 0.5, True)
    counted.resumed(320, 0.25, False)
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
        lambda counted: counted.state_written("tail"),
        lambda counted: counted.hint_ignored("malformed"),
        lambda counted: counted.request_admitted(AdmittedRequest("r", "hit", 160, 176, (163, 0))),
        lambda counted: counted.follower_not_held(),
    ],
)
def test_any_count_makes_a_report_due_and_otherwise_time_does(clock, count):
    counted = Counters()
    assert counted.report_due  # nothing was reported yet
    counted.take()
    assert not counted.report_due
    count(counted)
    assert counted.report_due
    counted.take()
    assert not counted.report_due
    clock.now += REPORT_INTERVAL
    assert counted.report_due


def test_memory_is_bounded():
    counted = Counters()
    for number in range(MAX_REQUESTS + 10):
        counted.request_admitted(AdmittedRequest(str(number), "cold", 0, 0, ()))
    counts = counted.take()
    assert len(counts.requests) == MAX_REQUESTS and counts.requests[-1][0] == str(MAX_REQUESTS + 9)
