"""A lease: whatever ends a request, its worker and its key count it exactly as long as it is there."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.boundaries.boundary import Boundary, Found, Place
from proxy.boundaries.layout import layout_of
from proxy.chat.reader import chat_request
from proxy.errors import BadRequest, NoWorker, Overloaded
from proxy.fleet.worker import BREAKER_FAILURES, CircuitBreaker, Worker
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.client import Unreachable
from proxy.pipeline import dispatch
from proxy.pipeline.request import Prompt, ProxiedRequest, request_of
from proxy.routing.engine_events import EngineEvents
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.probed import probed
from tests.harness.recording_worker import RecordingWorker

SYSTEM = Boundary("system", b"s", "first:1", estimate=150)

RENDERER = b"renderer"


class Scene:
    """A gateway that has looked at its workers, which take one request at a time; none is sent anything."""

    def __init__(self, own: InMemoryGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        gateway, self.upstream = own.gateway, own.upstream
        self.pool, self.workers = gateway.pool, gateway.pool.workers
        self.queue, self.prefix_index, self.warmup = gateway.queue, gateway.prefix_index, gateway.warmup
        self.dispatcher = gateway.handler._dispatcher
        self.events = self.dispatcher._engine_events
        for worker in self.workers:
            worker.renderer_ids["m"] = RENDERER
        self.key = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")
        # What engine events are given.
        self.sent: list[tuple[str, tuple[object, ...]]] = []  # boots, and hints
        self.refused_by: list[str] = []
        monkeypatch.setattr(EngineEvents, "sent", lambda _, worker, *what: self.sent.append((worker.boot, what[-1])))
        monkeypatch.setattr(EngineEvents, "refused", lambda _, worker, name: self.refused_by.append(worker.boot))

    def request(
        self, failure: str | None = None, path: str = "/v1/chat/completions", prefix: bytes = b"s", **body: Any
    ) -> ProxiedRequest:
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
        request = request_of(scope, b"x" * 400, "r", self.key)
        request.body.parsed = {"model": "m", **body}
        found = Found((SYSTEM._replace(key=prefix),), (prefix,), failure=failure, renderer_id=RENDERER)
        request.prompt = Prompt(found=found, tokens=160)
        return request

    def counted(self) -> tuple[int, int, int]:
        """Requests at all workers, requests of the key, tokens counted as prefill."""
        inflight = sum(worker.inflight for worker in self.workers)
        return inflight, self.key.under_way, sum(worker.prefill_tokens for worker in self.workers)

    def lose(self, *workers: Worker) -> None:
        """They are gone."""
        for worker in workers:
            self.upstream.faults[worker.url] = Unreachable()
            self.pool.mark_down(worker)


async def scene_of(workers: int, in_memory: Any, monkeypatch: pytest.MonkeyPatch) -> Scene:
    own = await in_memory(*(RecordingWorker() for _ in range(workers)), is_started=False, max_inflight=1)
    await own.gateway.pool.check_all()
    return Scene(own, monkeypatch)


@pytest.fixture
async def scene(in_memory, monkeypatch) -> Scene:
    return await scene_of(1, in_memory, monkeypatch)


@pytest.fixture
async def two(in_memory, monkeypatch) -> Scene:
    """Before two workers."""
    return await scene_of(2, in_memory, monkeypatch)


async def test_a_lease_counts_its_request_and_its_prefill_until_the_first_byte(scene):
    async with scene.dispatcher.lease(scene.request()) as lease:
        assert scene.counted() == (1, 1, 160)
        assert lease.worker.dispatched == 1
        lease.prefilled()
        lease.prefilled()
        assert scene.counted() == (1, 1, 0)
    assert scene.counted() == (0, 0, 0)


async def test_what_the_engine_has_computed_of_a_prompt_counts_no_more_whether_the_answer_has_begun_or_not(scene):
    async with scene.dispatcher.lease(scene.request()):
        scene.events.on_computed("r", 100, False)
        assert scene.counted() == (1, 1, 60)
        scene.events.on_computed("r", 40, False)  # never more than before
        scene.events.on_computed("another gateway's", 160, True)
        assert scene.counted() == (1, 1, 60)
        scene.events.on_computed("r", 200, False)
        assert scene.counted() == (1, 1, 0)
    scene.events.on_computed("r", 100, False)
    assert scene.counted() == (0, 0, 0)


async def test_a_prompt_is_computed_once_the_engine_has_passed_its_last_turn_however_long_it_was_taken_to_be(scene):
    request = scene.request()
    turn = SYSTEM._replace(kind="turn", key=b"t")
    request.prompt = request.prompt._replace(found=request.prompt.found._replace(boundaries=(SYSTEM, turn)))
    async with scene.dispatcher.lease(request):
        scene.events.on_computed("r", 120, True)
        assert scene.counted() == (1, 1, 0)


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_whatever_ends_a_request_it_is_counted_no_more(scene, error):
    with pytest.raises(error):
        async with scene.dispatcher.lease(scene.request()):
            raise error
    assert scene.counted() == (0, 0, 0)


async def test_a_request_that_never_reached_its_worker_moves_to_another(two):
    request = two.request()
    async with two.dispatcher.lease(request) as lease:
        first = lease.worker
        two.lose(first)
        await lease.move()
        assert lease.worker is not first
        assert (first.inflight, first.prefill_tokens, two.counted()) == (0, 0, (1, 1, 160))
        assert two.refused_by == [first.boot]
        assert [boot for boot, _ in two.sent] == [first.boot, lease.worker.boot]
        assert request.expected.ever_sent is None  # the first try was not there before
    assert two.counted() == (0, 0, 0)


async def test_the_time_at_a_worker_is_no_time_in_the_queue(scene, monkeypatch):
    loop, ahead = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + ahead)
    async with scene.dispatcher.lease(scene.request()) as lease:
        ahead = 1000.0  # it was there for so long
        (worker,) = scene.workers
        lease.release()
        async with scene.dispatcher.lease(scene.request()):
            moving = asyncio.create_task(lease.move())
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(scene.queue) == 1
        await moving
        assert lease.worker is worker


async def test_all_time_in_the_queue_counts(scene, monkeypatch):
    now = 0.0
    monkeypatch.setattr(dispatch, "time", SimpleNamespace(perf_counter=lambda: now))
    lease = scene.dispatcher.lease(scene.request())
    for waited in (20.0, 25.0):
        async with scene.dispatcher.lease(scene.request()):
            waiting = asyncio.create_task(scene.dispatcher.acquire(lease))
            await asyncio.sleep(0)
            now += waited - lease.waited
        assert await waiting is lease and lease.waited == waited
        now += 100.0  # at its worker
        lease.release()
    lease.waited += scene.queue._timeout
    async with scene.dispatcher.lease(scene.request()):
        with pytest.raises(Overloaded):
            await scene.dispatcher.acquire(lease)


async def test_a_request_that_its_worker_refused_moves_only_if_another_one_is_free_now(two):
    async with two.dispatcher.lease(two.request()) as lease:
        first = lease.worker
        (other,) = (worker for worker in two.workers if worker is not first)
        first.max_inflight = 2  # it has room, and is not asked again
        other.inflight = 1
        assert not lease.move_now() and lease.worker is first
        other.inflight = 0
        assert lease.move_now() and lease.worker is other
        assert (first.inflight, first.prefill_tokens, two.counted()) == (0, 0, (1, 1, 160))
        assert two.refused_by == [first.boot]
        two.lose(*two.workers)
        assert not lease.move_now() and lease.worker is other
    assert two.counted() == (0, 0, 0)


async def test_a_worker_on_trial_is_on_trial_for_as_long_as_the_request_is_there(scene):
    breaker = scene.workers[0].breaker = CircuitBreaker(lambda: 0.0)
    for request in range(BREAKER_FAILURES):
        breaker.failed(request)
    breaker._trial_at = 0.0
    async with scene.dispatcher.lease(scene.request()):
        assert not breaker.wants_trial
    assert breaker.wants_trial  # its client has left without an answer


async def test_a_slot_is_there_while_nobody_waits_and_worker_and_key_have_room(scene):
    scene.key = ApiKey("ann", KeyEntry(sha256="0" * 64, max_inflight=1), "salt")
    request = scene.request()
    assert scene.dispatcher.has_slot(request)
    scene.key.under_way = 1
    assert not scene.dispatcher.has_slot(request)
    scene.key.under_way = 0
    async with scene.dispatcher.lease(request):
        assert not scene.dispatcher.has_slot(scene.request())


async def test_a_request_that_finds_no_other_worker_is_counted_nowhere(scene):
    async with scene.dispatcher.lease(scene.request()) as lease:
        scene.lose(*scene.workers)
        with pytest.raises(NoWorker):
            await lease.move()
    assert scene.counted() == (0, 0, 0)
    assert scene.refused_by == [scene.workers[0].boot]


async def test_a_client_that_leaves_while_it_waits_or_just_as_its_slot_comes_leaves_no_count(scene):

    async def hold() -> None:
        async with scene.dispatcher.lease(scene.request()):
            await asyncio.Event().wait()

    async with scene.dispatcher.lease(scene.request()):
        others = [asyncio.create_task(hold()) for _ in range(2)]
        await asyncio.sleep(0)
        assert len(scene.queue) == 2
        others[0].cancel()  # while it waits
        await asyncio.gather(others[0], return_exceptions=True)
        assert (len(scene.queue), scene.counted()) == (1, (1, 1, 160))
    # The slot is the last one's, which does not know yet. Its worker was sent the first 150 tokens before.
    assert (len(scene.queue), scene.counted()) == (0, (1, 1, 10))
    others[1].cancel()
    await asyncio.gather(others[1], return_exceptions=True)
    assert scene.counted() == (0, 0, 0)
    assert scene.refused_by == [scene.workers[0].boot]  # nothing of it is at the worker


async def test_a_request_is_alone_until_another_one_is_given_to_its_worker(scene):
    scene.workers[0].max_inflight = 0
    async with scene.dispatcher.lease(scene.request()) as first:
        assert first.is_alone
        async with scene.dispatcher.lease(scene.request()) as second:
            assert not second.is_alone
            assert not first.is_alone
        assert not first.is_alone


async def test_nothing_is_predicted_of_a_prefix_until_an_engine_has_told_its_length(scene):
    expected = []
    for number in range(4):
        request = scene.request()
        async with scene.dispatcher.lease(request) as lease:
            expected.append(request.expected)
            prefill = lease.worker.prefill_tokens
        if number == 1:
            scene.prefix_index.set_length(b"s", 120)
        if number == 2:
            scene.prefix_index.set_held(b"s", lease.worker.boot, 112)
    assert [(each.predicted, each.held) for each in expected] == [(0, 0), (0, 0), (120, 120), (112, 112)]
    assert [each.sent is not None and each.sent_here for each in expected] == [False, True, True, True]
    assert {each.sent.tokens for each in expected[1:]} == {120}  # those that were sent before see it as well
    assert prefill == 160 - 112


async def test_what_another_worker_was_sent_is_told_apart_from_what_this_one_was(two):
    async with two.dispatcher.lease(two.request()) as first:
        two.prefix_index.set_length(b"s", 120)
        request = two.request()
        async with two.dispatcher.lease(request) as second:
            expected = request.expected
            assert second.worker is not first.worker
            assert (expected.sent.tokens, expected.sent_here) == (120, False)
            assert (expected.held, expected.predicted) == (120, 0)
            assert (expected.ever_sent, expected.match_unit) == (expected.sent, 16)


async def test_the_hint_is_what_the_worker_takes_and_nothing_else_is_believed_to_be_kept(scene):
    (worker,) = scene.workers
    async with scene.dispatcher.lease(scene.request()):
        assert scene.sent == [(worker.boot, ("first:1",))] and scene.prefix_index.holds(b"s", worker.boot)
    worker.probed, worker.renderer_ids["m"] = probed("another template", worker.engine, "m"), b"another"
    async with scene.dispatcher.lease(scene.request()):
        assert scene.sent[-1][1] == () and not scene.prefix_index.holds(b"s", "another template")


@pytest.mark.parametrize(
    ("patched", "quarantine", "refused", "failure"),
    [
        (True, False, "", "no_facts"),
        (True, True, "", "hint_ignored"),
        (True, False, "a layer has a sliding window", "hint_ignored"),
        (False, False, "", "unpatched"),
        (False, False, "a layer has a sliding window", "hint_ignored"),  # in shadow mode
    ],
)
async def test_why_no_hint_is_sent_is_the_workers_reason_first(scene, patched, quarantine, refused, failure):
    (worker,) = scene.workers
    engine = replace(worker.engine, refused=refused)
    worker.probed, worker.in_shadow = probed("a", engine if patched or refused else None, "m"), not patched
    if quarantine:
        worker.cache.quarantine()
    request = scene.request("no_facts")
    async with scene.dispatcher.lease(request):
        assert request.expected.failure == failure
        assert bool(scene.sent) == (failure == "no_facts")


async def test_a_prefix_that_is_shared_is_kept_for_a_restarted_worker(scene):
    for kept in (0, 1, 1):
        async with scene.dispatcher.lease(scene.request()):
            assert len(scene.warmup) == kept


async def test_what_is_kept_for_a_restarted_worker_holds_no_parsed_request(scene):
    layout = layout_of(chat_request({"messages": [{"role": "user", "content": "Tide?"}]}), RENDERER)
    for _ in range(2):
        request = scene.request()
        found = request.prompt.found._replace(layout=layout, unplaced=(Place(b"s", 0, "Ti"),))
        request.prompt = request.prompt._replace(found=found)
        async with scene.dispatcher.lease(request):
            pass
    (replay,) = scene.warmup.hottest({"m"})
    assert replay.found == Found((SYSTEM,), renderer_id=RENDERER)
    assert scene.workers[0].hint(replay.found) == ("first:1",)


def named(scene: Scene, **body: Any) -> ProxiedRequest:
    """A request that continues a stored response."""
    return scene.request(None, "/v1/responses", previous_response_id="resp_1", **body)


@pytest.mark.parametrize(
    ("status", "is_kept"), [(199, False), (200, True), (299, True), (300, False), (404, False), (500, False)]
)
async def test_the_worker_of_a_response_is_remembered_once_one_has_answered_for_it(two, status, is_kept):
    worker, stored = two.workers[0], two.dispatcher._stored
    assert two.dispatcher.seeks_on(named(two), worker, status) is (status == 404)
    assert stored.boot("resp_1", "ann") == (worker.boot if is_kept else None)
    plain = two.request()
    assert two.dispatcher.seeks_on(plain, worker, status) is False and plain.asked == []


async def test_a_response_is_sought_at_each_worker_that_was_not_asked(two):
    request, (one, other) = named(two), two.workers
    assert two.dispatcher.seeks_on(request, one, 404) and request.asked == [one]
    async with two.dispatcher.lease(request) as lease:
        assert lease.worker is other
        assert not lease.seeks_on(404) and request.asked == [one, other]
    assert lease.worker is other


async def test_a_response_is_not_sought_beyond_the_worker_that_stores_it(two):
    request, (one, other) = named(two), two.workers
    stored = two.dispatcher._stored
    stored.keep("resp_1", one.boot, "bob")  # another key's of the same name
    stored.keep("resp_1", one.boot, "ann")
    for _ in range(3):
        async with two.dispatcher.lease(request) as lease:
            assert lease.worker is one
            assert not lease.seeks_on(404) and request.asked == []
    request.asked += [one, other]
    stored.keep("resp_1", other.boot, "ann")  # so another gateway tells meanwhile
    assert two.dispatcher.seeks_on(request, one, 404)
    stored.keep("resp_1", "an older boot", "ann")
    assert not two.dispatcher.seeks_on(request, one, 404)


async def test_16_workers_are_asked_for_a_response_and_no_more(two):
    request, (one, other) = named(two), two.workers
    two.dispatcher._stored.keep("resp_1", other.boot, "ann")
    request.asked = [one] * 14
    assert two.dispatcher.seeks_on(request, one, 404) and len(request.asked) == 15
    assert not two.dispatcher.seeks_on(request, one, 404) and len(request.asked) == 16


async def test_while_the_worker_of_a_response_is_down_nobody_else_is_asked(two):
    one = two.workers[0]
    two.dispatcher._stored.keep("resp_1", one.boot, "ann")
    two.lose(one)
    with pytest.raises(NoWorker, match="stores this response"):
        async with two.dispatcher.lease(named(two)):
            raise AssertionError
    assert two.counted() == (0, 0, 0)


async def test_whose_response_it_is_decides_before_a_model_that_is_not_named(in_memory, monkeypatch):
    own = await in_memory(RecordingWorker(models=("m",)), RecordingWorker(models=("n",)), is_started=False)
    await own.gateway.pool.check_all()
    scene = Scene(own, monkeypatch)
    async with scene.dispatcher.lease(named(scene, model="")):
        assert scene.counted()[0] == 1
    with pytest.raises(BadRequest):
        async with scene.dispatcher.lease(scene.request(model="")):
            raise AssertionError
    assert scene.counted() == (0, 0, 0)


async def test_a_lease_has_a_worker_once_it_is_entered(scene):
    lease = scene.dispatcher.lease(scene.request())
    with pytest.raises(RuntimeError):
        _ = lease.worker
    assert (lease.prefill_tokens, lease.waited, lease.prompt, lease.is_alone) == (0, 0.0, 0, False)
    async with lease:
        assert (lease.prefill_tokens, lease.prompt) == (160, 160)
        lease.prefilled_to(100)
        assert lease.prefill_tokens == 60
        lease.prefilled_to(1000)
        assert lease.prefill_tokens == 0
    assert lease.prefill_tokens == 0 and lease.worker is scene.workers[0] and not lease.is_alone


async def test_a_prompt_that_was_not_read_weighs_what_its_bytes_do(scene):
    request = scene.request()
    request.prompt = Prompt()
    async with scene.dispatcher.lease(request) as lease:
        assert lease.prompt == 100 and request.expected is None and request.timings.leased >= request.timings.choosing
        lease.never_sent()
    assert scene.refused_by == []  # nothing was recorded for it


class Answer:
    """Of a client, which can be referred to weakly."""

    async def __call__(self, message: Any) -> None:
        """Nobody looks at it."""


@pytest.mark.parametrize("ends", ["released", "moved"])
async def test_of_a_request_that_is_over_nothing_is_kept(two, ends):
    send = Answer()
    left = weakref.ref(send)
    request = two.request()
    request.reply._send = send
    async with two.dispatcher.lease(request) as lease:
        if ends == "moved":
            assert lease.move_now()
    del request, lease, send
    gc.collect()
    assert left() is None


async def test_a_key_is_free_once_its_client_has_left_while_others_read_on(scene):
    scene.key = ApiKey("ann", KeyEntry(sha256="0" * 64, max_inflight=1), "salt")
    scene.workers[0].max_inflight = 2
    async with scene.dispatcher.lease(scene.request()) as lease:
        waiting = asyncio.create_task(scene.dispatcher.acquire(scene.dispatcher.lease(scene.request())))
        await asyncio.sleep(0)
        assert (len(scene.queue), scene.key.under_way) == (1, 1)
        lease.leave_key()
        second = await waiting
        assert scene.counted()[:2] == (2, 1) and lease.key is None
        lease.leave_key()
        assert scene.key.under_way == 1
        second.release()
        assert scene.counted()[:2] == (1, 0)
        lease.release()
        await scene.dispatcher.acquire(lease)  # at another worker, say
        assert scene.counted()[:2] == (1, 0)
    assert scene.counted() == (0, 0, 0)


async def test_who_joins_an_answer_counts_at_its_key_until_it_leaves(scene):
    scene.key = ApiKey("ann", KeyEntry(sha256="0" * 64, max_inflight=1), "salt")
    leave = scene.dispatcher.joins(scene.request())
    assert scene.counted() == (0, 1, 0) and not scene.dispatcher.has_slot(scene.request())
    waiting = asyncio.create_task(scene.dispatcher.acquire(scene.dispatcher.lease(scene.request())))
    await asyncio.sleep(0)
    assert scene.key.queued == 1
    leave()
    (await waiting).release()
    leave()
    assert scene.counted() == (0, 0, 0)


@pytest.mark.parametrize(
    ("limit", "under_way", "queued", "wakes"),
    [(1, 0, 1, True), (2, 1, 1, True), (2, 0, 1, False), (1, 0, 0, False), (0, 0, 1, False), (None, 0, 0, False)],
)
async def test_only_a_key_that_was_full_lets_another_of_its_requests_in(scene, limit, under_way, queued, wakes):
    scene.key = None if limit is None else ApiKey("ann", KeyEntry(sha256="0" * 64, max_inflight=limit), "salt")
    if scene.key is not None:
        scene.key.under_way, scene.key.queued = under_way, queued
    leave = scene.dispatcher.joins(scene.request())
    scene.dispatcher.released = Mock()
    leave()
    assert scene.dispatcher.released.call_count == wakes


async def test_a_request_that_moves_frees_its_slot_for_who_waits(two):
    async with two.dispatcher.lease(two.request()) as lease:
        first = lease.worker
        (other,) = (worker for worker in two.workers if worker is not first)
        other.inflight = 1
        waiting = asyncio.create_task(two.dispatcher.acquire(two.dispatcher.lease(two.request())))
        await asyncio.sleep(0)
        assert len(two.queue) == 1
        other.inflight = 0
        assert lease.move_now()
        assert (await waiting).worker is first
        (await waiting).release()


class Instead:
    """An answer that is there, from the second look on."""

    def __init__(self) -> None:
        self.looks, self.slots = 0, []

    def find(self) -> Any:
        self.looks += 1
        return "an answer" if self.looks > 1 else None

    def taken(self, lease: Any) -> None:
        self.slots.append(lease)


async def test_an_answer_that_is_there_needs_no_slot_and_a_slot_is_told(scene):
    instead, lease = Instead(), scene.dispatcher.lease(scene.request())
    assert await scene.dispatcher.acquire(lease, instead) is lease and instead.slots == [lease]
    lease.release()
    assert lease.request.timings.choosing <= lease.request.timings.leased
    request = scene.request()
    assert await scene.dispatcher.acquire(scene.dispatcher.lease(request), instead) == "an answer"
    assert instead.slots == [lease] and scene.counted() == (0, 0, 0)
    timings = request.timings
    assert timings.asked is not None and timings.choosing >= timings.asked > 0 and timings.leased == 0
    assert timings.waited_seconds > 0


async def test_a_slot_is_there_only_behind_those_who_wait(scene):
    async with scene.dispatcher.lease(scene.request()):
        waiting = asyncio.create_task(scene.dispatcher.acquire(scene.dispatcher.lease(scene.request())))
        await asyncio.sleep(0)
        scene.workers[0].max_inflight = 2
        assert not scene.dispatcher.has_slot(scene.request())
        scene.dispatcher.released()
        (await waiting).release()
    assert scene.dispatcher.has_slot(scene.request())
    scene.lose(*scene.workers)
    assert not scene.dispatcher.has_slot(scene.request())


@pytest.mark.parametrize("body", [{"prompt_cache_key": "one conversation"}, {"model": "in no list"}])
async def test_what_belongs_together_goes_to_one_worker_where_nothing_else_decides(two, body):
    for worker in two.workers:
        worker.max_inflight = 0
    chosen = set()
    for number in range(12):
        async with two.dispatcher.lease(two.request(None, prefix=b"%d" % number, **body)) as lease:
            chosen.add(lease.worker.url)
    assert len(chosen) == 1


async def test_what_is_kept_for_a_restarted_worker_has_its_salt_and_the_name_that_is_listed(scene):
    for _ in range(2):
        request = scene.request(model="in no list")
        request.body.put = {"cache_salt": "salt", "stream_options": {}}
        request.body.names = ("model",)
        async with scene.dispatcher.lease(request):
            pass
    (replay,) = scene.warmup.hottest({"m"})
    assert (replay.endpoint, replay.put, replay.model) == ("/v1/chat/completions", {"cache_salt": "salt"}, "m")
    assert replay.raw == request.body.raw and replay.names == ("model",)


async def test_a_longer_prefix_of_a_conversation_takes_the_place_of_a_shorter_one(scene):
    short = Found((SYSTEM,), (b"s",), renderer_id=RENDERER)
    turn = SYSTEM._replace(kind="turn", key=b"t", estimate=300)
    long = Found((SYSTEM, turn), (b"s", b"t"), renderer_id=RENDERER)
    for found in (short, long, long):
        request = scene.request()
        request.prompt = Prompt(found=found, tokens=400)
        async with scene.dispatcher.lease(request):
            pass
    assert [replay.found.boundaries for replay in scene.warmup.hottest({"m"})] == [long.boundaries]


async def test_without_boundaries_nothing_is_kept_for_a_restarted_worker(scene):
    for _ in range(2):
        request = scene.request()
        async with scene.dispatcher.lease(request):
            pass
        request.prompt = Prompt(found=Found(prefixes=(b"s",), renderer_id=RENDERER), tokens=160)
    kept = len(scene.warmup)
    async with scene.dispatcher.lease(request):
        assert len(scene.warmup) == kept == 1


async def test_a_plain_worker_is_expected_to_find_what_any_token_matches(scene):
    (worker,) = scene.workers
    request = scene.request()
    async with scene.dispatcher.lease(request):
        assert (request.expected.match_unit, request.expected.ahead) == (16, worker.engine.ahead)
    worker.probed = probed("plain", None, "m")
    async with scene.dispatcher.lease(request):
        assert (request.expected.match_unit, request.expected.ahead) == (1, 0)
