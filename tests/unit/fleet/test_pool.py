"""Workers come and go with the workers file, and with what their health checks find."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from proxy.boundaries.facts_learner import FactsLearner
from proxy.errors import NoWorker
from proxy.fleet import worker_metrics
from proxy.fleet.model_names import listed_names, name_keys
from proxy.fleet.part import Change, Part, Shelf
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import BREAKER_FAILURES, TRIAL_SECONDS, CircuitBreaker, Worker
from proxy.http.client import Broken, Exhausted, Silent, Unreachable
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.settings import Settings
from tests.harness.fake_engine import engine_info

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Servers:
    """Answers of workers by URL; a missing one is unreachable, an exception is raised."""

    def __init__(self, *urls: str) -> None:
        self.boots: dict[str, object] = dict.fromkeys(urls, 1.0)
        self.asked: list[str] = []

    def trust(self, address: str, userinfo: str | None) -> None:
        """As `Upstream` does."""

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        self.asked.append(url)
        host, path = url[: len(A)], url[len(A) :]
        boot = self.boots.get(host, Unreachable())
        if isinstance(boot, Exception):
            raise boot
        models = {"data": [{"id": "m"}]}
        pages = {"/metrics": f"process_start_time_seconds {boot}\n", "/v1/models": json.dumps(models)}
        return 200, pages.get(path, "").encode()


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

    def __init__(self, pool: Callable[[], WorkerPool]) -> None:
        self.removed: list[Worker] = []
        self.prepared: list[tuple[str, list[str]]] = []  # a worker, and those that could take its requests
        self._pool = pool

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        if change is Change.REMOVED:
            self.removed.append(worker)

    async def prepare(self, worker: Worker) -> None:
        self.prepared.append((worker.url, [each.url for each in self._pool().for_model("m")]))


def pool_of(
    servers: Servers, file=None, worker: tuple[str, ...] = (), woken: Callable[[], None] = lambda: None, **settings
) -> WorkerPool:
    shelf = Shelf(Metrics())
    heard = shelf.put(Heard(lambda: pool))
    settings = Settings(**{"replay_seconds": 0.0, "worker": worker, "workers_file": file, **settings})
    pool = WorkerPool(settings, servers, Metrics(), FactsLearner(), IdleWork(), shelf, woken)
    pool.heard = heard  # type: ignore[attr-defined]  # for the test
    return pool


async def test_a_worker_that_stays_in_the_file_stays_the_same_with_its_requests_and_its_quarantine(file):
    pool = pool_of(Servers(A, B), file)
    await pool.check_all()
    (kept,) = pool.workers
    kept.inflight = 3
    kept.cache.quarantine()
    write(file, B, A, limit=3)
    pool.refresh()
    assert [worker.url for worker in pool.workers] == [B, A] and pool.workers[1] is kept
    assert (kept.inflight, kept.has_room, kept.up) == (3, False, True)
    assert not kept.cache.hints_allowed and kept.cache.salt({"model": "m"})


async def test_a_worker_with_the_plugin_is_asked_for_few_of_its_metrics_for_as_long_as_it_knows_them():
    class WithPlugin(Servers):
        info, some = engine_info(), True

        async def fetch(self, method, url, body=b"", timeout=None):
            status, text = await super().fetch(method, url, body, timeout)
            path = url[len(A) :]
            if path == worker_metrics.OF_PLUGIN:
                text = b"process_start_time_seconds 1.0\n" if self.some else b""
                status = 200 if self.some else 404
            if path in ("/metrics", worker_metrics.OF_PLUGIN):
                text += self.info.encode()
            return status, text

    async def asked() -> list[str]:
        servers.asked.clear()
        await pool.check_all()
        return [url[len(A) :] for url in servers.asked if "metrics" in url]

    servers = WithPlugin(A)
    pool = pool_of(servers, worker=(A,))
    (worker,) = pool.workers
    assert await asked() == ["/metrics"]  # what it is, is not known before
    assert await asked() == [worker_metrics.OF_PLUGIN] and worker.engine is not None
    servers.some = False  # an older plugin
    assert await asked() == [worker_metrics.OF_PLUGIN, "/metrics"] and worker.engine is not None
    servers.some, servers.info = True, ""  # its patches are not live
    assert await asked() == [worker_metrics.OF_PLUGIN, "/metrics"] and worker.engine is None
    assert await asked() == ["/metrics"]
    assert worker.boot == f"{A}#1.0"


async def test_a_worker_that_leaves_the_file_is_down_and_whoever_cares_hears_of_it(file):
    pool = pool_of(Servers(A, B), file)
    await pool.check_all()
    (gone,) = pool.workers
    write(file, B)
    pool.refresh()
    assert pool.heard.removed == [gone] and not gone.up
    await pool.check_health(gone)  # a check that was under way
    assert not gone.up and gone not in pool.workers


def fail(pool: WorkerPool, worker: Worker, times: int = BREAKER_FAILURES) -> None:
    for number in range(times):
        pool.record_failure(worker, b"%d" % number)


async def test_a_worker_that_fails_gets_nothing_while_another_does_not():
    pool = pool_of(Servers(A, B), worker=(A, B))
    await pool.check_all()
    first, second = pool.workers
    fail(pool, first, BREAKER_FAILURES - 1)
    pool.record_success(first)
    fail(pool, first, BREAKER_FAILURES - 1)
    assert pool.for_model("m") == [first, second]
    fail(pool, first)
    await pool.check_all()  # its health is well, and says nothing of its requests
    assert pool.for_model("m") == pool.for_model("unknown") == [second]
    assert (first.up, first.is_sound) == (True, False)
    assert 'seamark_worker_up{worker="a:1"} 0.0' in generate_latest(pool._metrics.registry).decode()
    fail(pool, second)
    assert pool.for_model("m") == [first, second]  # rather than none
    pool.record_success(second)
    assert pool.for_model("m") == [second]


async def test_a_worker_that_failed_is_tried_with_one_request_and_is_back_with_its_success():
    woken: list[bool] = []
    pool = pool_of(Servers(A, B), worker=(A, B), woken=lambda: woken.append(True))
    await pool.check_all()
    first, second = pool.workers
    clock = [0.0]
    first.breaker = CircuitBreaker(lambda: clock[0])
    fail(pool, first)
    clock[0] += TRIAL_SECONDS
    first.max_inflight = first.inflight = 1
    assert pool.for_model("m") == [second]  # nobody waits for it
    first.inflight = 0
    assert pool.for_model("m") == [first]
    assert first.breaker.begin_trial() and pool.for_model("m") == [second]
    woken.clear()
    pool.record_success(first)
    assert pool.for_model("m") == [first, second] and woken


async def test_failures_from_before_a_restart_do_not_count_after_it(file):
    servers = Servers(A)
    pool = pool_of(servers, file)
    await pool.check_all()
    (worker,) = pool.workers
    for boot in range(2, 5):
        fail(pool, worker, BREAKER_FAILURES - 1)
        assert worker.is_sound
        servers.boots[A] = float(boot)
        await pool.check_all()


async def test_a_probe_that_this_machine_had_no_descriptor_for_says_nothing_of_the_worker():
    servers = Servers(A)
    pool = pool_of(servers, worker=(A, B))
    await pool.check_all()
    servers.boots.update({A: Exhausted(), B: Exhausted()})
    await pool.check_all()
    assert [worker.up for worker in pool.workers] == [True, False]


async def test_a_restart_empties_the_cache_and_leaves_the_worker_in_quarantine(file):
    servers = Servers(A)
    pool = pool_of(servers, file)
    await pool.check_all()
    (worker,) = pool.workers
    before = worker.boot
    worker.cache.quarantine()
    assert worker.cache.salt({"model": "m"})
    servers.boots[A] = 2.0
    await pool.check_all()
    assert worker.boot != before and worker.cache.salt({"model": "m"}) is None and not worker.cache.hints_allowed


async def test_a_restarted_worker_is_warmed_up_before_it_is_chosen_if_another_is_there():
    servers = Servers(A, B)
    pool = pool_of(servers, worker=(A, B), replay_seconds=60.0)
    prepared = pool.heard.prepared
    await pool.check_all()
    while any(worker.warming for worker in pool.workers) or len(prepared) < 2:
        await pool.check_health(pool.workers[1])
    prepared.clear()
    servers.boots[A] = 2.0
    await pool.check_all()
    while pool.workers[0].warming or not prepared:
        await pool.check_health(pool.workers[1])
    assert prepared == [(A, [B])]


async def test_a_list_of_models_that_makes_no_sense_harms_its_own_worker_alone(monkeypatch):
    servers = Servers(A, B)
    pool = pool_of(servers, worker=(A, B))
    fetch = servers.fetch

    async def odd(method: str, url: str, *more, **named) -> tuple[int, bytes]:
        status, text = await fetch(method, url, *more, **named)
        if url.startswith(A) and url.endswith("/v1/models"):
            text = json.dumps({"data": [{"id": "m"}, {"id": "n", "parent": ["m"]}]}).encode()
        return status, text

    await pool.check_all()
    servers.fetch = odd  # type: ignore[method-assign]
    await pool.check_all()
    first, second = pool.workers
    assert (first.up, second.up) == (False, True) and pool.for_model("m") == [second]
    pool.discover(())  # reads the names of all
    servers.boots[B] = 2.0
    await pool.check_all()
    assert pool.workers[1].up


@pytest.mark.parametrize("failure", [Unreachable(), Broken(), RuntimeError("odd")])
async def test_whatever_one_worker_does_the_others_are_checked(failure):
    servers = Servers(A, B)
    servers.boots[A] = failure
    pool = pool_of(servers, worker=(A, B))
    await pool.check_all()
    assert [worker.url for worker in pool.up] == [B]


async def test_a_worker_too_busy_for_a_probe_stays_up_while_it_answers_requests():
    servers = Servers(A)
    pool = pool_of(servers, worker=(A,), health_interval=1000)
    await pool.check_all()
    servers.boots[A] = Broken()
    pool.workers[0].answered()
    await pool.check_all()
    assert pool.up
    pool.workers[0].answered_at = float("-inf")
    await pool.check_all()
    assert not pool.up


async def test_a_model_that_no_worker_ever_served_goes_to_any_and_one_whose_workers_are_down_to_none():
    servers = Servers(A, B)
    pool = pool_of(servers, worker=(A, B))
    await pool.check_all()
    assert pool.for_model("other") == pool.workers
    pool._note(pool.workers[1], replace(pool.workers[1].probed, models=[{"id": "n"}]))
    pool.mark_down(pool.workers[1])
    with pytest.raises(NoWorker):
        pool.for_model("n")


def said(caplog) -> list[str]:
    """What was logged of workers since the last call."""
    messages = [record.getMessage() for record in caplog.records if record.name == "seamark.workers"]
    caplog.clear()
    return messages


async def test_why_a_worker_is_down_is_said_when_it_changes_and_not_with_each_probe(caplog):
    caplog.set_level(logging.INFO, "seamark.workers")
    servers = Servers()
    pool = pool_of(servers, worker=(A,))
    servers.boots[A] = Unreachable("connection refused")
    for _ in range(3):
        await pool.check_all()
    assert said(caplog) == ["worker a:1 is down: connection refused"]
    servers.boots[A] = Silent()
    for _ in range(3):
        await pool.check_all()
    assert said(caplog) == ["worker a:1 is down: no answer within 5 s"]
    servers.boots[A] = 1.0
    for _ in range(3):
        await pool.check_all()
    (line,) = said(caplog)
    assert line.startswith("worker a:1 is up: serves m; ")
    pool.mark_down(pool.workers[0], "connection refused")
    await pool.check_all()
    assert said(caplog) == ["worker a:1 is down: connection refused", line]


async def test_a_refusal_names_the_causes_of_the_workers_that_could_serve_the_model():
    servers = Servers(A, B)
    pool = pool_of(servers, worker=(A, B))
    with pytest.raises(NoWorker, match="It may still be loading"):
        pool.for_model("m")  # nothing is known yet
    await pool.check_all()
    pool._note(pool.workers[1], replace(pool.workers[1].probed, models=[{"id": "n"}]))
    servers.boots[B] = Unreachable("connection refused")
    await pool.check_all()
    with pytest.raises(NoWorker, match=r"No worker is ready for this model\. Worker b:1: connection refused\.$"):
        pool.for_model("n")
    assert pool.for_model("m") == [pool.workers[0]]


def test_a_refusal_names_a_few_causes_and_counts_the_rest():
    pool = pool_of(Servers(), worker=tuple(f"http://h:{number}" for number in range(1, 6)))
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
