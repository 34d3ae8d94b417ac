"""Workers come and go, are trusted or not, and what runs beside the requests goes on."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock, call

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer
from proxy.chat.chat import CHAT, RESPONSES, Chat
from proxy.fleet import part as part_of
from proxy.fleet import worker as worker_module
from proxy.fleet.part import Part, Shelf
from proxy.fleet.pool import WorkerPool
from proxy.fleet.probe import Probed
from proxy.fleet.worker import BREAKER_FAILURES, ON, OPEN, TRIAL, CircuitBreaker, GateReport, Worker
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
from proxy.http.client import Broken, Exhausted, Silent, Unreachable
from proxy.metrics import Metrics
from proxy.routing.queue import AdmissionQueue
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.probed import probed
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


@pytest.fixture
def gateway_of(in_memory) -> Callable[..., Awaitable[InMemoryGateway]]:
    """Composes gateways whose workers nobody looks at but a test."""
    return functools.partial(in_memory, is_started=False, replay_seconds=0.0)


@pytest.fixture
def woken(monkeypatch) -> Mock:
    monkeypatch.setattr(AdmissionQueue, "wake", wake := Mock())
    return wake


@pytest.fixture
async def own(gateway_of, a, b) -> InMemoryGateway:
    own: InMemoryGateway = await gateway_of(a, b)
    await own.gateway.pool.check_all()
    return own


@pytest.fixture
def both(own) -> WorkerPool:
    return own.gateway.pool


async def test_a_worker_that_stays_in_the_file_stays_the_same_with_its_requests_and_its_quarantine(
    gateway_of, a, b, tmp_path
):
    file = tmp_path / "workers.toml"
    file.write_text(f'[[worker]]\nurl = "{A}"\n')
    pool = (await gateway_of(a, b, worker=(), workers_file=file)).gateway.pool
    await pool.check_all()
    (kept,) = pool.workers
    kept.inflight = 3
    kept.quarantine()
    for urls in ((B,), (B, A)):  # taken out while it answers, and put back
        file.write_text("".join(f'[[worker]]\nurl = "{url}"\nmax_inflight = 3\n' for url in urls))
        pool.refresh()
    await pool.check_all()
    assert [worker.url for worker in pool.workers] == [B, A] and pool.workers[1] is kept
    assert (kept.inflight, kept.has_room, kept.up) == (3, False, True)
    assert not kept.hints_allowed and kept.salt({"model": "m"})


HERE, THERE = "http://127.0.0.1:1", "http://localhost:1"


@pytest.mark.parametrize(
    ("urls", "created", "are_one"),
    [
        ((A, B), "1.7641234567891235e+09", True),
        ((A, B), "", False),  # two may have started at one time
        ((HERE, THERE), "", True),
        ((HERE, "http://[::1]:1"), "", True),
        ((HERE, "http://127.0.0.2:1"), "", False),
        ((HERE, "http://localhost:2"), "", False),
    ],
)
async def test_two_addresses_of_one_server_are_one_worker_whichever_answers(gateway_of, urls, created, are_one):
    server = Server(urls[0], more_metrics=f"vllm:prefix_cache_hits_created {created}\n" if created else "")
    own = await gateway_of(server, worker=urls)
    own.upstream.workers[urls[1]] = server
    pool = own.gateway.pool

    async def shown() -> list[str]:
        for _ in range(2):
            await pool.check_all()
        assert own.metric("seamark_worker_up") == len(pool.up)
        return [worker.url for worker in pool.workers]

    assert await shown() == list(urls[: 2 - are_one])
    for gone, there in (urls, urls[::-1]) if are_one else ():
        own.upstream.faults = {gone: Unreachable()}
        assert await shown() == [there] and pool.up
        own.upstream.faults = {}
        assert await shown() == [there]
    own.upstream.workers[urls[1]] = Server(urls[1], boot="2.0")
    assert await shown() == list(urls)


async def test_of_a_name_with_both_families_one_that_never_answered_is_no_worker_while_the_other_does(gateway_of):
    families = ("http://10.0.0.1:8000", "http://[fd00::1]:8000")
    own = await gateway_of(Server(families[0]), worker=(A,))
    pool = own.gateway.pool
    pool.discover(families)
    for _ in range(2):
        await pool.check_all()
    assert [worker.url for worker in pool.workers] == [A, families[0]]
    own.upstream.workers[families[1]] = Server(families[1], boot="2.0")
    await pool.check_all()
    assert [worker.url for worker in pool.up] == list(families)


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
    assert (first.up, second.up) == (False, True) and both.for_model("m", both.serving("m")) == [second]
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
        seen = woken.call_count
        woken.reset_mock()
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
    for number in range(BREAKER_FAILURES):
        both.record_failure(first, b"%d" % number)
    await both.check_health(first)
    assert looks() == 0
    clock[0] += worker_module.TRIAL_SECONDS  # it may be tried with one of those that wait
    await both.check_health(first)
    assert looks() == 1
    both.record_success(first)
    assert looks() == 1


async def test_engines_behind_one_address_are_looked_at_once_they_are_known_and_go_together(gateway_of, a):
    a.patched, a.sources = True, {str(rank): {"endpoint": "tcp://*:5557"} for rank in range(2)}
    own = await gateway_of(a)
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
        (401, A, "", "wants a key: --worker-api-key-file FILE, with vLLM's --api-key in it"),
        (403, A, "k", "refuses the key in --worker-api-key-file (/v1/models answers 403)"),
        (401, "http://me:secret@a:1", "k", "refuses the user and password in its URL (/v1/models answers 401)"),
        (500, A, "k", "not well: /v1/models answers 500"),
    ],
)
async def test_why_a_worker_refuses_is_said_by_what_it_was_given(gateway_of, a, tmp_path, status, url, key, words):
    a.refuses = status
    (tmp_path / "key").write_text(key)
    given = {"worker_api_key_file": tmp_path / "key"} if key else {}
    pool = (await gateway_of(a, worker=(url,), **given)).gateway.pool
    await pool.check_all()
    assert pool.workers[0].why_down == words


async def test_a_worker_that_sleeps_is_well_and_gets_nothing_until_it_is_woken(both, a, caplog):
    caplog.set_level(logging.INFO, "seamark.workers")
    worker, other = both.workers
    known, a.sleeps = worker.probed, (1,)
    await both.check_all()
    assert (worker.up, worker.is_asleep, both.for_model("m", both.serving("m"))) == (False, True, [other])
    assert worker.boot == known.boot and said(caplog) == ["worker a:1 is asleep (level 1): POST /wake_up wakes it"]
    a.sleeps = (None,)
    await both.check_all()
    assert worker.up and not worker.is_asleep and said(caplog)[0].startswith("worker a:1 is up: ")


@pytest.mark.parametrize("failure", [None, RuntimeError("odd")])
async def test_a_worker_is_warmed_up_until_that_is_over_however_it_ends(gateway_of, a, woken, failure):
    gateway = (await gateway_of(a, replay_seconds=1000.0)).gateway
    (worker,), began, may_end = gateway.pool.workers, [], asyncio.Event()

    async def prepare(worker: Worker) -> None:
        began.append(worker.url)
        await may_end.wait()
        if failure is not None:
            raise failure

    gateway.shelf.put(Part()).prepare = prepare
    await gateway.pool.check_all()
    await until(lambda: began)
    assert worker.warming and worker.up
    woken.reset_mock()
    may_end.set()
    await until(lambda: not worker.warming)
    assert woken.called and began == [A]


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


BODY = {"model": "m"}


ENGINE = EngineInfo("0.3.0", "0.32.0", 16, 384)


def worker_of(name: str, **told: str) -> Worker:
    engine = replace(ENGINE, **told)
    return Worker(f"http://{name}", WorkerRenderer(None, "http://w", 1.0), probed=probed(name, engine, "m"))


def test_a_first_doubt_parts_requests_from_what_was_there_and_a_second_from_the_cache():
    worker, own = worker_of("w", drafts=ON), {**BODY, "cache_salt": "own"}
    assert worker.takes_hints and worker.match_unit == 16
    assert worker.salt(own) is None
    worker.quarantine()
    apart = worker.salt(BODY)
    assert (worker.takes_hints, worker.match_unit) == (False, 16) and len(apart) >= 16
    assert (worker.salt({**BODY, "cache_salt": None}), worker.salt(own)) == (apart, "own" + apart)
    assert [worker.salt({**BODY, "cache_salt": refused}) for refused in ("", 5, ["own"])] == [None] * 3, "vLLM says why"
    worker.restore()
    assert worker.takes_hints and worker.salt(BODY) == apart, "what was doubted stays out of use"
    worker.restarted()
    assert worker.salt(BODY) is None
    for _ in range(2):
        worker.quarantine()
    worker.restarted()  # that alone does not bring trust back
    assert not worker.takes_hints and not worker.cache_allowed and len({worker.salt(BODY) for _ in range(3)}) == 3


@pytest.mark.parametrize(("other", "hint"), [("", ("first:1", -5)), ("update the plugin", ())])
def test_only_a_worker_with_a_plugin_of_this_release_gets_the_hint(other, hint):
    told = WorkerMetrics(engine=None if other else ENGINE, other_release=other)
    worker = Worker("http://w", None, probed=Probed(metrics=told), renderer_ids={"m": b"renderer"})
    boundaries = Boundary("system", b"s", "first:1", 40), Boundary("turn", b"t", -5)
    assert worker.hint(Found(boundaries, renderer_id=b"renderer")) == hint and worker.refused == other


def test_of_several_engines_behind_an_address_each_ones_feed_tells_its_gate():
    worker = worker_of("w#1", drafts=OPEN)
    assert worker.draft_state == TRIAL
    worker.hear_of_drafts(GateReport(OPEN, "", read_at=1.0))
    worker.learn(replace(worker.probed, at=2.0))
    assert worker.draft_state == OPEN


def test_a_breaker_waits_twice_as_long_only_after_a_trial_that_failed_and_a_minute_at_most():
    clock = SimpleNamespace(now=0.0)
    breaker = CircuitBreaker(lambda: clock.now)
    tries = [breaker.failed(request) for request in range(BREAKER_FAILURES)]
    assert tries == [False] * (BREAKER_FAILURES - 1) + [True]
    clock.now = 4.0
    assert not breaker.failed(9) and not breaker.wants_trial  # one that was sent before it opened
    waits = []
    for _ in range(6):
        began = clock.now
        while not breaker.wants_trial:
            clock.now += 0.5
        waits.append(clock.now - began)
        breaker.on_trial = True
        assert not breaker.wants_trial and not breaker.failed(9)
        breaker.on_trial = False
    assert waits == [5, 10, 20, 40, 60, 60]
    breaker.reset()
    assert not breaker.wants_trial
    assert [breaker.failed(request) for request in range(3)] == [False, False, True]
    for seconds, wants in ((4.5, False), (0.5, True)):
        clock.now += seconds
        assert breaker.wants_trial is wants


def test_a_request_to_one_of_several_engines_says_which_whatever_the_client_said():
    headers = [(b"x-data-parallel-rank", b"9"), (b"a", b"b"), (b"x-data-parallel-rank", b"8")]
    for url, sent in (("http://w:1", headers), ("http://w:1#3", [(b"a", b"b"), (b"x-data-parallel-rank", b"3")])):
        assert Worker(url, renderer=WorkerRenderer(None, url, 1.0)).addressed(headers) == sent


async def test_a_prompt_is_as_the_worker_renders_the_request_or_else_its_chat():
    chat, native = {"model": "m", "messages": []}, {"model": "m", "input": "Tide?"}
    response, said, fails = Chat(chat, [], path=RESPONSES, native=native), [1, 2], RenderFailed("no route")
    for asked, rendered, calls in (
        (Chat(chat, [], ids=[7, 8]), [], []),
        (response, [said], [call(native, RESPONSES)]),
        (response, [fails, said], [call(native, RESPONSES), call(chat, CHAT)]),
    ):
        render = AsyncMock(side_effect=rendered)
        ids = await worker_module.prompt_of(asked, Worker("http://w", renderer=render))
        assert ids == ([1, 2] if rendered else [7, 8]) and render.mock_calls == calls
    with pytest.raises(RenderFailed):
        await worker_module.prompt_of(Chat(chat, []), Worker("http://w", renderer=AsyncMock(side_effect=fails)))


async def test_a_part_that_fails_is_started_again_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(part_of, "RESTART_SECONDS", 0.0)
    done, metrics, ran = asyncio.Event(), Metrics(), []

    class Watching(Part):
        name = "watching"

        async def run(self) -> None:
            ran.append("run")
            if len(ran) < 3:
                raise RecursionError("sk-secret")
            done.set()
            await asyncio.Event().wait()

        async def aclose(self) -> None:
            ran.append("closed")

    shelf = Shelf(metrics)
    shelf.put(Watching())
    shelf.also_run("files", asyncio.Event().wait)
    shelf.start()
    await done.wait()
    await shelf.stop()
    assert ran == ["run"] * 3
    await shelf.aclose()
    value, name = metrics.registry.get_sample_value, "seamark_task_failures_total"
    assert [value(name, {"task": task}) for task in ("watching", "files")] == [2, 0]
    assert "RecursionError" in caplog.text and "sk-secret" not in caplog.text and ran[3:] == ["closed"]
