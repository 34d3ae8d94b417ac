"""What is counted between two reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.scheduler import counters
from engine_patches.scheduler.counters import MAX_REQUESTS, REPORT_INTERVAL, AdmittedRequest, Counters, DraftedRequest


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
        lambda counted: counted.follower_released(0.5),
        lambda counted: counted.prompt_pinned("r", "pinned"),
        lambda counted: counted.request_drafted(DraftedRequest("r", 5, 2)),
        lambda counted: counted.cache_hit(16),
        lambda counted: counted.load_declined(),
        lambda counted: counted.disk_used({"damaged": 1}, 0, 0),
        lambda counted: counted.disk_used({}, 100, 0),
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


def test_what_a_disk_holds_is_no_count_and_stays():
    counted = Counters()
    counted.disk_used({"damaged": 1, "foreign": 2}, 100, 700)
    counted.disk_used({"damaged": 1}, 50, 600)
    counts = counted.take()
    assert dict(counts.files_refused) == {"damaged": 2, "foreign": 2} and counts.file_bytes == 150
    assert counted.disk_bytes == 600 and counted.take().file_bytes == 0


def test_hits_of_vllms_cache_and_loads_that_were_declined_add_up():
    counted = Counters()
    for tokens in (160, 32):
        counted.cache_hit(tokens)
        counted.load_declined()
        counted.resumed(tokens, 0.5, True)
    counted.follower_released(1.5)
    counted.follower_released(0.5)
    counts = counted.take()
    assert (counts.cache_hit_tokens, counts.loads_declined, counts.spent_seconds) == (192, 2, 2.0)
    assert (counts.hits, counts.hit_tokens, counts.saved_seconds) == (2, 192, 1.0)


def test_what_is_told_of_single_requests_comes_in_order():
    counted = Counters()
    for number in range(2):
        counted.prompt_pinned(f"r{number}", "pinned")
        counted.window_found(f"r{number}", "held")
        counted.request_drafted(DraftedRequest(f"r{number}", 5, number))
    counts = counted.take()
    assert list(counts.pinned) == [("r0", "pinned"), ("r1", "pinned")]
    assert list(counts.window_of) == [("r0", "held"), ("r1", "held")] and counts.windows == {"held": 2}
    assert list(counts.drafted) == [("r0", 5, 0), ("r1", 5, 1)]


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        (lambda counted, name: counted.request_admitted(AdmittedRequest(name, "cold", 0, 0, ())), "requests"),
        (lambda counted, name: counted.prompt_pinned(name, "pinned"), "pinned"),
        (lambda counted, name: counted.window_found(name, "held"), "window_of"),
        (lambda counted, name: counted.request_drafted(DraftedRequest(name, 5, 2)), "drafted"),
    ],
)
def test_memory_is_bounded(told, kept):
    counted = Counters()
    for number in range(MAX_REQUESTS + 10):
        told(counted, str(number))
    names = [each[0] for each in getattr(counted.take(), kept)]
    assert len(names) == MAX_REQUESTS and (names[0], names[-1]) == ("10", str(MAX_REQUESTS + 9))
