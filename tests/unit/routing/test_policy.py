"""The worker that holds the prefix, unless it is much busier."""

from __future__ import annotations

from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.routing.policy import (
    choose,
)
from proxy.routing.prefix_index import Holding
from tests.harness.probed import probed


def worker(name: str, inflight: int = 0) -> Worker:
    engine = EngineInfo("0.1.0", "0.32.0", match_unit=16, block_size=384)
    return Worker(f"http://{name}", renderer=None, probed=probed(name, engine), inflight=inflight)


def test_a_worker_whose_answers_differed_holds_nothing_that_counts():
    workers = [worker("a", inflight=1), worker("b")]
    workers[0].cache.quarantine()
    assert choose(workers, {"a": Holding(400, b"deep", is_told=True)}, load_slack=8).boot == "b"


def test_a_holder_that_is_too_busy_is_passed_over():
    workers = [worker("a"), worker("b", inflight=21)]
    assert choose(workers, {"b": Holding(400, b"deep", is_told=True)}, load_slack=8).boot == "a"


def test_of_several_holders_that_are_too_busy_the_next_one_is_chosen():
    workers = [worker("a"), worker("b", inflight=129), worker("c")]
    held = {"b": Holding(4000, b"deep", is_told=True), "c": Holding(400, b"short", is_told=True)}
    assert choose(workers, held, load_slack=0).boot == "c"
