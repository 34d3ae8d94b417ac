"""Many clients on the response cache, for some seconds; what is wrong with a run of `make cache-chaos` is told."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.bench.response_cache_chaos import (
    CACHE_BYTES,
    Late,
    Run,
    at_once,
    beyond,
    complaints,
    memory_bound,
    render,
    run_for,
)
from tests.harness.forked_gateways import GatewayForks
from tests.harness.paced_worker import BROKEN

FINE = Run(
    seconds=8.0,
    told=Counter(hit=1, joined=1, miss=1, bypass=1),
    slots_most={"few": 2, "eve": 60},
    cache_most=CACHE_BYTES,
    still_works=True,
)


@pytest.mark.parametrize("seconds", [6.0, pytest.param(40.0, marks=pytest.mark.thorough)])
async def test_nobody_gets_anothers_answer_and_no_bound_is_exceeded_whatever_clients_do(tmp_path, seconds):
    with GatewayForks(tmp_path) as fleet:
        run = await run_for(fleet, tmp_path, seconds)
    assert complaints(run, with_times=False) == []  # how long they waited depends on the machine
    assert run.cached_frames and run.plain_frames and run.asked["broken"] and len(BROKEN) > 5


def test_a_run_that_is_fine_held():
    assert complaints(FINE) == [] and render(FINE, []).endswith("held")


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"wrong": ["honest: another request's"]}, "another request's"),
        ({"failed": Counter({"200 cut off": 3})}, "3 honest requests: 200 cut off"),
        ({"beyond_most": 0.26}, "260 ms"),
        ({"refused_after": 3.1}, "3.1 s"),
        ({"slots_most": {"few": 3}}, "3 requests of few"),
        ({"few_at_once": 3}, "3 answers"),
        ({"cache_most": CACHE_BYTES + 1}, "the cache held"),
        ({"memory": [memory_bound(FINE) + 2**20]}, "resident"),
        ({"files_after": 1}, "1 descriptors"),
        ({"inflight_after": 1.0}, "1 requests still count"),
        ({"still_works": False}, "no repeat"),
        ({"told": Counter(hit=1, joined=1, miss=1)}, "bypass"),
        ({"log": ["ERROR x"]}, "ERROR x"),
    ],
)
def test_what_is_wrong_is_told(wrong, told):
    (complaint,) = complaints(dataclasses.replace(FINE, **wrong))
    assert told in complaint


def test_answers_are_under_way_at_once_where_that_is_beyond_doubt():
    assert at_once([]) == 0 and at_once([(0.0, 0.3)] * 9) == 0
    assert at_once([(0.0, 2.0), (1.0, 3.0), (1.9, 4.0)]) == 2


def test_a_stream_stands_still_by_what_it_is_later_than_others_of_its_size_and_time_need_to_catch_up():
    others = [Late(100.0, 0.2, False), Late(100.0, 0.9, True), Late(200.0, 0.1, False)]
    assert beyond([Late(100.5, 0.6, False)], others) == pytest.approx(0.2)
    assert beyond([Late(100.5, 0.6, True)], others) == 0.0
    assert beyond([Late(100.5, 0.6, False), Late(200.0, 0.7, False)], others) == pytest.approx(0.5)
    assert beyond([Late(300.0, 0.3, False)], others) == pytest.approx(0.3)
