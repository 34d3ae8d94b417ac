"""The gateway's metrics: what dashboards read before anything has happened, and what of a worker that is gone."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from prometheus_client.samples import Sample

from proxy.metrics import OVERHEAD_SECONDS, SECONDS, Metrics


def samples(metrics: Metrics, name: str) -> list[Sample]:
    return [each for family in metrics.registry.collect() for each in family.samples if each.name == name]


def bounds(metrics: Metrics, name: str) -> list[float]:
    return [float(each.labels["le"]) for each in samples(metrics, f"{name}_bucket")]


def test_each_gateway_has_metrics_of_its_own():
    first, second = Metrics(), Metrics()
    first.heartbeats.inc()
    values = [samples(each, "seamark_heartbeats_total")[0].value for each in (first, second)]
    assert values == [1, 0]


@pytest.mark.parametrize("buckets", [SECONDS, OVERHEAD_SECONDS])
def test_buckets_ascend_and_none_is_more_than_five_times_the_one_before(buckets):
    steps = [later / earlier for earlier, later in pairwise(buckets)]
    assert min(steps) > 1.2 and max(steps) <= 5


def test_times_are_told_from_the_gateways_own_to_those_of_a_cold_prefill():
    metrics = Metrics()
    metrics.first_token.labels("m", "hit").observe(0)
    metrics.overhead.labels("boundary").observe(0)
    assert bounds(metrics, "seamark_first_token_seconds") == [*SECONDS, math.inf]
    assert bounds(metrics, "seamark_queue_seconds") == [*SECONDS, math.inf]
    assert bounds(metrics, "seamark_overhead_seconds") == [*OVERHEAD_SECONDS, math.inf]
    assert (SECONDS[0], SECONDS[-1]) == (0.005, 180) and (OVERHEAD_SECONDS[0], OVERHEAD_SECONDS[-1]) == (0.0001, 2.5)


def test_without_a_redis_it_is_neither_up_nor_down():
    (up,) = samples(Metrics(), "seamark_redis_up")
    assert math.isnan(up.value)


def test_results_of_self_checks_are_there_before_the_first_one():
    """An alert on an increase would miss the first count of a series that it has never seen."""
    found = {each.labels["result"]: each.value for each in samples(Metrics(), "seamark_self_check_total")}
    assert found == dict.fromkeys(("same", "noise", "differs", "drafts", "drafts_worse", "no_hits", "no_counts"), 0)


def test_all_series_of_a_worker_that_is_gone_go_and_no_others():
    metrics = Metrics()
    for worker in ("http://a", "http://b"):
        metrics.requests.labels("m", worker, "chat", "200").inc()
        metrics.requests.labels("n", worker, "chat", "200").inc()
        metrics.inflight.labels(worker).set(1)
        metrics.drafts.labels(worker, "open").set(1)
        metrics.cached_tokens.labels("m", worker).inc()
    metrics.misses.labels("m", "new").inc()
    metrics.forget_worker("http://a")
    left = [each for family in metrics.registry.collect() for each in family.samples if "worker" in each.labels]
    assert {each.labels["worker"] for each in left} == {"http://b"}
    counted = [each for each in left if not each.name.endswith("_created")]
    assert len(counted) == 5 and samples(metrics, "seamark_miss_total")
    metrics.forget_worker("http://unheard")
