"""Time saved less time spent; hits from before the pace was known are credited."""

from __future__ import annotations

from proxy.fleet.worker_metrics import StepTimes
from proxy.observability.time_saved import TimeSaved

PACE = StepTimes(0.5, 0.001)


def test_a_gateway_that_spent_more_than_it_saved_says_so():
    time = TimeSaved()
    time.spent = 2.0
    assert time.settle("w", PACE) == {} and time.net == -2.0
