"""Workers come and go with the workers file, and with what their health checks find."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from proxy.fleet.part import Part
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import BREAKER_FAILURES, TRIAL_SECONDS, CircuitBreaker, Worker
from proxy.http.client import Broken, Exhausted, Silent, Unreachable
from proxy.routing.queue import AdmissionQueue
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker, respond
from tests.harness.waiting import until

A, B = "http://a:1", "http://b:1"


@dataclass
class Server(RecordingWorker):
    """Without the plugin, unless a test gives it one."""

    patched: bool = False
    cards: list[dict[str, object]] | None = None  # of its models, if they are odd
    refuses: int = 0  # the status that its list of models has

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/v1/models" and (self.refuses or self.cards is not None):
            await respond(send, json.dumps({"data": self.cards}).encode(), status=self.refuses or 200)
        else:
            await super().__call__(scope, receive, send)


@pytest.fixture
def a() -> Server:
    return Server(A)


@pytest.fixture
def b() -> Server:
    return Server(B)


def write(path, *urls: str, more: str = "") -> None:
    path.write_text("".join(f'[[worker]]\nurl = "{url}"\n{more}\n' for url in urls))
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))  # clocks of file systems are coarse


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "workers.toml"
    write(path, A)
    return path


@pytest.fixture
def gateway_of(in_memory) -> Callable[..., Awaitable[InMemoryGateway]]:
    """Composes gateways whose workers nobody looks at but a test."""
    return functools.partial(in_memory, is_started=False, replay_seconds=0.0)


@pytest.fixture
def woken(monkeypatch) -> list[bool]:
    looks: list[bool] = []
    monkeypatch.setattr(AdmissionQueue, "wake", lambda queue: looks.append(True))
    return looks


@pytest.fixture
async def own(gateway_of, a, b) -> InMemoryGateway:
    return await gateway_of(a, b)


@pytest.fixture
async def both(own) -> WorkerPool:
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
    write(file, B, A, more="max_inflight = 3")
    pool.refresh()
    assert [worker.url for worker in pool.workers] == [B, A] and pool.workers[1] is kept
    assert (kept.inflight, kept.has_room, kept.up) == (3, False, True)
    assert not kept.cache.hints_allowed and kept.cache.salt({"model": "m"})


def fail(pool: WorkerPool, worker: Worker, times: int = BREAKER_FAILURES) -> None:
    for number in range(times):
        pool.record_failure(worker, b"%d" % number)


async def test_a_probe_that_this_machine_had_no_descriptor_for_says_nothing_of_the_worker(own, both):
    own.upstream.faults[B] = Unreachable()
    await both.check_all()
    own.upstream.faults.update({A: Exhausted(), B: Exhausted()})
    await both.check_all()
    assert [worker.why_down for worker in both.workers] == ["", "no connection"]


async def test_a_list_of_models_that_makes_no_sense_harms_its_own_worker_alone(both, a, b):
    a.cards = [{"id": "m"}, {"id": "n", "parent": ["m"]}]
    await both.check_all()
    first, second = both.workers
    assert (first.up, second.up) == (False, True) and both.for_model("m") == [second]
    both.discover(())  # reads the names of all
    b.boot = "2.0"
    await both.check_all()
    assert both.workers[1].up


def said(caplog) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.name == "seamark.workers"]
    caplog.clear()
    return messages


async def test_why_a_worker_is_down_is_said_when_it_changes_and_not_with_each_probe(gateway_of, a, caplog):
    caplog.set_level(logging.INFO, "seamark.workers")
    own = await gateway_of(a)
    for failure, line in (
        (Unreachable("connection refused"), "worker a:1 is down: connection refused"),
        (Silent(), "worker a:1 is down: no answer within 5 s"),
        (None, "worker a:1 is up: serves m; "),
    ):
        own.upstream.faults.clear()
        own.upstream.faults |= {A: failure} if failure is not None else {}
        for _ in range(3):
            await own.gateway.pool.check_all()
        (message,) = said(caplog)
        assert message.startswith(line)


async def test_whoever_waits_for_a_worker_is_woken_when_other_ones_are_ready_than_before(woken, both):
    first, _ = both.workers

    def looks() -> int:
        seen = len(woken)
        woken.clear()
        return seen

    await both.check_all()
    looks()
    await both.check_all()
    assert looks() == 0
    both.mark_down(first)
    assert looks() == 1
    both.mark_down(first, "again")
    both.record_success(first)
    assert looks() == 0 and first.why_down == "again"
    await both.check_all()
    assert looks() == 1
    clock = [0.0]
    first.breaker = CircuitBreaker(lambda: clock[0])
    fail(both, first)
    await both.check_health(first)
    assert looks() == 0
    clock[0] += TRIAL_SECONDS  # it may be tried with one of those that wait
    await both.check_health(first)
    assert looks() == 1
    both.record_success(first)
    assert looks() == 1


async def test_engines_behind_one_address_are_looked_at_once_they_are_known_and_go_together(gateway_of, a, file):
    a.patched, a.sources = True, {str(rank): {"endpoint": "tcp://*:5557"} for rank in range(2)}
    own = await gateway_of(a, worker=(), workers_file=file)
    pool = own.gateway.pool
    (whole,) = pool.workers
    await pool.check_all()
    assert not whole.up and whole not in pool.workers
    await until(lambda: all(worker.up for worker in pool.workers))
    assert [worker.rank for worker in pool.workers] == ["0", "1"] and len(set(pool.boots())) == 2
    a.sources, a.boot = None, "2.0"
    await pool.check_all()
    await until(lambda: [worker.url for worker in pool.up] == [A])
    assert own.metric("seamark_worker_up") == 1


@pytest.mark.parametrize(
    ("status", "url", "key", "words"),
    [
        (401, A, "", r"wants a key: --worker-api-key-file FILE, with vLLM's --api-key in it"),
        (403, A, "k", r"refuses the key in --worker-api-key-file \(/v1/models answers 403\)"),
        (401, "http://me:secret@a:1", "k", r"refuses the user and password in its URL \(/v1/models answers 401\)"),
        (500, A, "k", r"not well: /v1/models answers 500"),
    ],
)
async def test_why_a_worker_refuses_is_said_by_what_it_was_given(gateway_of, a, tmp_path, status, url, key, words):
    a.refuses = status
    given = {}
    if key:
        (tmp_path / "key").write_text(key)
        given["worker_api_key_file"] = tmp_path / "key"
    pool = (await gateway_of(a, worker=(url,), **given)).gateway.pool
    await pool.check_all()
    (worker,) = pool.workers
    assert re.fullmatch(words, worker.why_down), worker.why_down


async def test_a_worker_that_sleeps_is_well_and_gets_nothing_until_it_is_woken(both, a, caplog):
    caplog.set_level(logging.INFO, "seamark.workers")
    worker, other = both.workers
    known, a.sleeps = worker.probed, (1,)
    await both.check_all()
    assert (worker.up, worker.is_asleep, both.for_model("m")) == (False, True, [other])
    assert worker.boot == known.boot and said(caplog) == ["worker a:1 is asleep (level 1): POST /wake_up wakes it"]
    a.sleeps = (None,)
    await both.check_all()
    assert worker.up and not worker.is_asleep and said(caplog)[0].startswith("worker a:1 is up: ")


class Preparing(Part):
    def __init__(self) -> None:
        self.began: list[str] = []
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def prepare(self, worker: Worker) -> None:
        self.began.append(worker.url)
        await self.end


@pytest.mark.parametrize("failure", [None, RuntimeError("odd")])
async def test_a_worker_is_warmed_up_until_that_is_over_however_it_ends(gateway_of, a, woken, failure):
    gateway = (await gateway_of(a, replay_seconds=1000.0)).gateway
    (worker,), warmup = gateway.pool.workers, gateway.shelf.put(Preparing())
    await gateway.pool.check_all()
    await until(lambda: warmup.began)
    assert worker.warming and worker.up
    woken.clear()
    warmup.end.set_exception(failure) if failure is not None else warmup.end.set_result(None)
    await until(lambda: not worker.warming)
    assert woken and warmup.began == [A]


async def test_all_names_of_one_model_have_one_key(gateway_of):
    a, b = Server(A, models=("m", "alias")), Server(B, models=("m",), adapters={"lora": "/lora"})
    pool = (await gateway_of(a, b, Server("http://c:1", models=("n",)))).gateway.pool
    await pool.check_all()
    assert {pool.key_of(name) for name in ("m", "alias")} == {"alias"}
    assert (pool.key_of("lora"), pool.key_of("n"), pool.key_of(None), pool.key_of(7)) == ("lora", "n", None, None)
    assert pool.key_of("") == ""  # several models
    keys = {(A, B): "alias", ("http://c:1",): "n"}
    for name in (f"unknown-{number}" for number in range(40)):
        assert pool.key_of(name) == keys[tuple(worker.url for worker in pool.serving(name))]


async def test_a_worker_that_does_not_answer_for_its_models_is_known_as_before(own, both, b):
    for failure in (Unreachable(), Broken()):
        own.upstream.faults[B] = failure
        await both.ask_models(both.workers[1])
    own.upstream.faults.clear()
    b.refuses = 401
    await both.ask_models(both.workers[1])
    assert both.serving("m") == both.workers
