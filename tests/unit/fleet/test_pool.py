"""Workers come and go with the workers file, and with what their health checks find."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from proxy.errors import NoWorker
from proxy.fleet import worker_metrics
from proxy.fleet.model_names import listed_names, name_keys
from proxy.fleet.part import Change, Part
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import BREAKER_FAILURES, TRIAL_SECONDS, CircuitBreaker, Worker
from proxy.http.client import Broken, Exhausted, Silent, Unreachable
from proxy.routing.queue import AdmissionQueue
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker, respond

A, B = "http://a:1", "http://b:1"


@dataclass
class Server(RecordingWorker):
    """Without the plugin, unless a test gives it one."""

    patched: bool = False
    cards: list[dict[str, object]] | None = None  # of its models, if they are odd
    older: bool = False  # it has no route for the plugin's own metrics
    asked: list[str] = field(default_factory=list)  # for metrics

    async def __call__(self, scope, receive, send) -> None:
        path, query = scope["path"], scope["query_string"].decode()
        if path.endswith("/metrics"):
            self.asked.append(f"{path}?{query}" if query else path)
        if path == "/v1/models" and self.cards is not None:
            await respond(send, json.dumps({"data": self.cards}).encode())
        elif path == "/seamark/metrics" and self.older:
            await respond(send, b"", status=404)
        else:
            await super().__call__(scope, receive, send)


@pytest.fixture
def a() -> Server:
    return Server(A)


@pytest.fixture
def b() -> Server:
    return Server(B)


def write(path, *urls: str, limit: int | None = None) -> None:
    more = f"max_inflight = {limit}\n" if limit is not None else ""
    path.write_text("".join(f'[[worker]]\nurl = "{url}"\n{more}' for url in urls))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))  # clocks of file systems are coarse


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "workers.toml"
    write(path, A)
    return path


class Heard(Part):
    """What a pool tells of its workers, and what it has prepared at them."""

    def __init__(self, pool: WorkerPool) -> None:
        self.removed: list[Worker] = []
        self.prepared: list[tuple[str, list[str]]] = []  # a worker, and those that could take its requests
        self._pool = pool

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        if change is Change.REMOVED:
            self.removed.append(worker)

    async def prepare(self, worker: Worker) -> None:
        self.prepared.append((worker.url, [each.url for each in self._pool.for_model("m")]))


@pytest.fixture
def gateway_of(in_memory) -> Callable[..., Awaitable[InMemoryGateway]]:
    """Composes gateways whose workers nobody looks at but a test."""
    return functools.partial(in_memory, is_started=False, replay_seconds=0.0)


@pytest.fixture
def woken(monkeypatch) -> list[bool]:
    """How often a queue was told to look for slots."""
    looks: list[bool] = []
    monkeypatch.setattr(AdmissionQueue, "wake", lambda queue: looks.append(True))
    return looks


@pytest.fixture
async def own(gateway_of, a, b) -> InMemoryGateway:
    return await gateway_of(a, b)


@pytest.fixture
async def both(own) -> WorkerPool:
    """Of two workers that have been looked at."""
    await own.gateway.pool.check_all()
    return own.gateway.pool


async def test_a_worker_that_stays_in_the_file_stays_the_same_with_its_requests_and_its_quarantine(
    gateway_of, a, b, file
):
    pool = (await gateway_of(a, b, worker=(), workers_file=file)).gateway.pool
    await pool.check_all()
    (kept,) = pool.workers
    kept.inflight = 3
    kept.cache.quarantine()
    write(file, B, A, limit=3)
    pool.refresh()
    assert [worker.url for worker in pool.workers] == [B, A] and pool.workers[1] is kept
    assert (kept.inflight, kept.has_room, kept.up) == (3, False, True)
    assert not kept.cache.hints_allowed and kept.cache.salt({"model": "m"})


async def test_a_worker_with_the_plugin_is_asked_for_few_of_its_metrics_for_as_long_as_it_knows_them(gateway_of, a):
    pool = (await gateway_of(a)).gateway.pool
    (worker,) = pool.workers

    async def asked() -> list[str]:
        a.asked.clear()
        await pool.check_all()
        return a.asked

    a.patched = True
    assert await asked() == ["/metrics", worker_metrics.OF_PLUGIN]  # what it is, is not known before
    assert await asked() == [worker_metrics.OF_PLUGIN] and worker.engine is not None
    a.older = True
    few = worker_metrics.OF_PLUGIN
    assert await asked() == [few, "/metrics", few] and worker.engine is not None
    a.older = False
    assert await asked() == ["/metrics", few] and worker.engine is not None
    a.patched = False  # its patches are not live
    assert await asked() == [few, "/metrics"] and worker.engine is None
    assert await asked() == ["/metrics"]
    assert worker.boot == f"{A}#{a.boot}"


async def test_a_worker_that_leaves_the_file_is_down_and_whoever_cares_hears_of_it(gateway_of, a, b, file):
    gateway = (await gateway_of(a, b, worker=(), workers_file=file)).gateway
    pool, heard = gateway.pool, gateway.shelf.put(Heard(gateway.pool))
    await pool.check_all()
    (gone,) = pool.workers
    write(file, B)
    pool.refresh()
    assert heard.removed == [gone] and not gone.up
    await pool.check_health(gone)  # a check that was under way
    assert not gone.up and gone not in pool.workers


def fail(pool: WorkerPool, worker: Worker, times: int = BREAKER_FAILURES) -> None:
    for number in range(times):
        pool.record_failure(worker, b"%d" % number)


async def test_a_worker_that_fails_gets_nothing_while_another_does_not(own, both):
    first, second = both.workers
    fail(both, first, BREAKER_FAILURES - 1)
    both.record_success(first)
    fail(both, first, BREAKER_FAILURES - 1)
    assert both.for_model("m") == [first, second]
    fail(both, first)
    await both.check_all()  # its health is well, and says nothing of its requests
    assert both.for_model("m") == both.for_model("unknown") == [second]
    assert (first.up, first.is_sound) == (True, False)
    assert (own.metric("seamark_worker_up", worker="a:1"), own.metric("seamark_worker_up")) == (0, 1)
    fail(both, second)
    assert both.for_model("m") == [first, second]  # rather than none
    both.record_success(second)
    assert both.for_model("m") == [second]


async def test_a_worker_that_failed_is_tried_with_one_request_and_is_back_with_its_success(woken, both):
    first, second = both.workers
    clock = [0.0]
    first.breaker = CircuitBreaker(lambda: clock[0])
    fail(both, first)
    clock[0] += TRIAL_SECONDS
    first.max_inflight = first.inflight = 1
    assert both.for_model("m") == [second]  # nobody waits for it
    first.inflight = 0
    assert both.for_model("m") == [first]
    assert first.breaker.begin_trial() and both.for_model("m") == [second]
    woken.clear()
    both.record_success(first)
    assert both.for_model("m") == [first, second] and woken


async def test_failures_from_before_a_restart_do_not_count_after_it(both, a):
    worker, _ = both.workers
    for boot in range(2, 5):
        fail(both, worker, BREAKER_FAILURES - 1)
        assert worker.is_sound
        a.boot = f"{boot}.0"
        await both.check_all()


async def test_a_probe_that_this_machine_had_no_descriptor_for_says_nothing_of_the_worker(own, both):
    own.upstream.faults[B] = Unreachable()
    await both.check_all()
    own.upstream.faults.update({A: Exhausted(), B: Exhausted()})
    await both.check_all()
    assert [worker.up for worker in both.workers] == [True, False]


async def test_a_restart_empties_the_cache_and_leaves_the_worker_in_quarantine(both, a):
    worker, _ = both.workers
    before = worker.boot
    worker.cache.quarantine()
    assert worker.cache.salt({"model": "m"})
    a.boot = "2.0"
    await both.check_all()
    assert worker.boot != before and worker.cache.salt({"model": "m"}) is None and not worker.cache.hints_allowed


async def test_a_restarted_worker_is_warmed_up_before_it_is_chosen_if_another_is_there(gateway_of, a, b):
    gateway = (await gateway_of(a, b, replay_seconds=60.0)).gateway
    pool = gateway.pool
    prepared = gateway.shelf.put(Heard(pool)).prepared
    await pool.check_all()
    while any(worker.warming for worker in pool.workers) or len(prepared) < 2:
        await pool.check_health(pool.workers[1])
    prepared.clear()
    a.boot = "2.0"
    await pool.check_all()
    while pool.workers[0].warming or not prepared:
        await pool.check_health(pool.workers[1])
    assert prepared == [(A, [B])]


async def test_a_list_of_models_that_makes_no_sense_harms_its_own_worker_alone(both, a, b):
    a.cards = [{"id": "m"}, {"id": "n", "parent": ["m"]}]
    await both.check_all()
    first, second = both.workers
    assert (first.up, second.up) == (False, True) and both.for_model("m") == [second]
    both.discover(())  # reads the names of all
    b.boot = "2.0"
    await both.check_all()
    assert both.workers[1].up


@pytest.mark.parametrize("failure", [Unreachable(), Broken(), RuntimeError("odd")])
async def test_whatever_one_worker_does_the_others_are_checked(own, failure):
    own.upstream.faults[A] = failure
    await own.gateway.pool.check_all()
    assert [worker.url for worker in own.gateway.pool.up] == [B]


async def test_a_worker_too_busy_for_a_probe_stays_up_while_it_answers_requests(gateway_of, a):
    own = await gateway_of(a, health_interval=1000)
    pool = own.gateway.pool
    await pool.check_all()
    own.upstream.faults[A] = Broken()
    pool.workers[0].answered()
    await pool.check_all()
    assert pool.up
    pool.workers[0].answered_at = float("-inf")
    await pool.check_all()
    assert not pool.up


async def test_a_model_that_no_worker_ever_served_goes_to_any_and_one_whose_workers_are_down_to_none(both, b):
    assert both.for_model("other") == both.workers
    b.models = ("n",)
    await both.check_all()
    both.mark_down(both.workers[1])
    with pytest.raises(NoWorker):
        both.for_model("n")


def said(caplog) -> list[str]:
    """What was logged of workers since the last call."""
    messages = [record.getMessage() for record in caplog.records if record.name == "seamark.workers"]
    caplog.clear()
    return messages


async def test_why_a_worker_is_down_is_said_when_it_changes_and_not_with_each_probe(gateway_of, a, caplog):
    caplog.set_level(logging.INFO, "seamark.workers")
    own = await gateway_of(a)
    pool, faults = own.gateway.pool, own.upstream.faults
    faults[A] = Unreachable("connection refused")
    for _ in range(3):
        await pool.check_all()
    assert said(caplog) == ["worker a:1 is down: connection refused"]
    faults[A] = Silent()
    for _ in range(3):
        await pool.check_all()
    assert said(caplog) == ["worker a:1 is down: no answer within 5 s"]
    faults.clear()
    for _ in range(3):
        await pool.check_all()
    (line,) = said(caplog)
    assert line.startswith("worker a:1 is up: serves m; ")
    pool.mark_down(pool.workers[0], "connection refused")
    await pool.check_all()
    assert said(caplog) == ["worker a:1 is down: connection refused", line]


async def test_a_refusal_names_the_causes_of_the_workers_that_could_serve_the_model(own, b):
    pool = own.gateway.pool
    with pytest.raises(NoWorker, match="It may still be loading"):
        pool.for_model("m")  # nothing is known yet
    b.models = ("n",)
    await pool.check_all()
    own.upstream.faults[B] = Unreachable("connection refused")
    await pool.check_all()
    with pytest.raises(NoWorker, match=r"No worker is ready for this model\. Worker b:1: connection refused\.$"):
        pool.for_model("n")
    assert pool.for_model("m") == [pool.workers[0]]


async def test_a_refusal_names_a_few_causes_and_counts_the_rest(gateway_of):
    pool = (await gateway_of(worker=tuple(f"http://h:{number}" for number in range(1, 6)))).gateway.pool
    for worker in pool.workers:
        pool.mark_down(worker, "no connection")
    text = str(no_worker("No worker is ready.", pool.workers))
    assert text.count("no connection") == 3 and text.endswith("; and 2 more.")


def test_names_are_of_one_model_if_a_worker_says_so_whatever_the_order_of_the_workers():
    cards = ([{"id": "b"}, {"id": "c"}], [{"id": "a"}, {"id": "b"}, {"id": "lora", "parent": "b"}], [{"id": "d"}])
    listed = [listed_names(each, one_engine=True) for each in cards]
    for order in itertools.permutations(listed):
        assert name_keys(order) == {"a": "a", "b": "a", "c": "a", "d": "d", "lora": "lora"}
    assert (listed[1].base, listed[1].templates["lora"]) == ("a", "a")
    assert len(set(name_keys([listed_names(cards[0], one_engine=False)]).values())) == 2  # a gateway has many models
