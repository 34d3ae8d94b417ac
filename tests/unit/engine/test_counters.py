"""What is counted between two reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.scheduler import counters
from engine_patches.scheduler.counters import REPORT_INTERVAL, AdmittedRequest, Counters, DraftedRequest


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(counters.time, "monotonic", lambda: clock.now)
    return clock


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
