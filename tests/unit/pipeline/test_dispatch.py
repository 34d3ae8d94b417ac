"""A lease: whatever ends a request, its worker and its key count it exactly as long as it is there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.fleet.worker import BREAKER_FAILURES, CircuitBreaker, Worker
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.client import Unreachable
from proxy.pipeline.request import Prompt, ProxiedRequest, request_of
from proxy.routing.engine_events import EngineEvents
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker

SYSTEM = Boundary("system", b"s", "first:1", estimate=150)

RENDERER = b"renderer"


class Scene:
    """A gateway that has looked at its workers, which take one request at a time; none is sent anything."""

    def __init__(self, own: InMemoryGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        gateway, self.upstream = own.gateway, own.upstream
        self.pool, self.workers = gateway.pool, gateway.pool.workers
        self.queue, self.dispatcher = gateway.queue, gateway.handler._dispatcher
        self.events = self.dispatcher._engine_events
        for worker in self.workers:
            worker.renderer_ids["m"] = RENDERER
        self.key = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")
        self.refused_by: list[str] = []  # boots, as engine events are told
        monkeypatch.setattr(EngineEvents, "refused", lambda _, worker, name: self.refused_by.append(worker.boot))

    def request(self, path: str = "/v1/chat/completions", **body: Any) -> ProxiedRequest:
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
        request = request_of(scope, b"x" * 400, "r", self.key)
        request.body.parsed = {"model": "m", **body}
        request.prompt = Prompt(found=Found((SYSTEM,), (b"s",), renderer_id=RENDERER), tokens=160)
        return request

    def counted(self) -> tuple[int, int, int]:
        inflight = sum(worker.inflight for worker in self.workers)
        return inflight, self.key.under_way, sum(worker.prefill_tokens for worker in self.workers)

    def lose(self, *workers: Worker) -> None:
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
    return await scene_of(2, in_memory, monkeypatch)


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


def named(scene: Scene, **body: Any) -> ProxiedRequest:
    """A request that continues a stored response."""
    return scene.request("/v1/responses", previous_response_id="resp_1", **body)


@pytest.mark.parametrize(
    ("status", "is_kept"), [(199, False), (200, True), (299, True), (300, False), (404, False), (500, False)]
)
async def test_the_worker_of_a_response_is_remembered_once_one_has_answered_for_it(two, status, is_kept):
    worker, stored = two.workers[0], two.dispatcher._stored
    assert two.dispatcher.seeks_on(named(two), worker, status) is (status == 404)
    assert stored.boot("resp_1", "ann") == (worker.boot if is_kept else None)
    plain = two.request()
    assert two.dispatcher.seeks_on(plain, worker, status) is False and plain.asked == []


async def test_a_slot_is_there_while_nobody_waits_and_worker_and_key_have_room(scene):
    scene.key = ApiKey("ann", KeyEntry(sha256="0" * 64, max_inflight=1), "salt")
    request = scene.request()
    assert scene.dispatcher.has_slot(request)
    leave = scene.dispatcher.joins(scene.request())  # an answer that is under way
    assert scene.counted() == (0, 1, 0) and not scene.dispatcher.has_slot(request)
    waiting = asyncio.create_task(scene.dispatcher.acquire(scene.dispatcher.lease(request)))
    await asyncio.sleep(0)
    assert scene.key.queued == 1
    leave()
    leave()
    lease = await waiting
    for _ in range(2):  # it counts once, however often it is over
        lease.release()
        assert scene.counted() == (0, 0, 0) and lease.prefill_tokens == 0
    scene.key.entry = KeyEntry(sha256="0" * 64)
    async with scene.dispatcher.lease(request):
        assert not scene.dispatcher.has_slot(scene.request())
    assert scene.dispatcher.has_slot(scene.request())
