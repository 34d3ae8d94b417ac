"""Time saved less time spent; hits from before the pace was known are credited."""

from __future__ import annotations

import pytest

from proxy.fleet.worker_metrics import UNKNOWN, StepTimes
from proxy.observability.time_saved import TimeSaved

PACE = StepTimes(0.5, 0.001)


def test_nothing_is_known_until_a_worker_has_told_its_pace_and_then_earlier_hits_count():
    time = TimeSaved()
    time.reused("w", "m", 12_928)
    time.spent = 0.5
    assert time.settle("w", UNKNOWN) == {} and time.net is None and time.waiting == 12_928
    assert time.settle("w", PACE) == {"m": pytest.approx(12.928)}
    assert time.net == pytest.approx(12.428) and time.waiting == 0
    assert time.settle("w", PACE) == {} and time.saved == pytest.approx(12.928)


def test_each_worker_has_its_own_pace_and_each_model_its_own_sum():
    time = TimeSaved()
    for worker, model, tokens in (("v", "m", 100), ("w", "m", 200), ("w", "n", 300), ("w", "m", 50)):
        time.reused(worker, model, tokens)
    assert time.settle("w", PACE) == {"m": pytest.approx(0.25), "n": pytest.approx(0.3)}
    assert time.waiting == 100


def test_vllm_alone_finds_whole_blocks_at_most():
    time = TimeSaved()
    for tokens in (160, 400, 768):  # of one block of 384, none, one and two
        time.reused("w", "m", tokens, 384)
    time.reused("gone", "m", 384, 384)
    time.forget("gone")
    assert time.vllm_alone == 0.0
    time.settle("w", PACE)
    time.settle("gone", PACE)
    assert time.vllm_alone == pytest.approx(3 * 0.384) and time.saved == pytest.approx(1.328)


def test_a_gateway_that_spent_more_than_it_saved_says_so():
    time = TimeSaved()
    time.spent = 2.0
    assert time.settle("w", PACE) == {} and time.net == -2.0
