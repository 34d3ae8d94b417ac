"""A lease: whatever ends a request, its worker and its key count it exactly as long as it is there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import Histogram

from proxy.boundaries.boundary import Boundary, Found, Place
from proxy.boundaries.layout import layout_of
from proxy.chat.reader import chat_request
from proxy.chat.responses import StoredResponses
from proxy.errors import NoWorker
from proxy.fleet.hot_prefixes import WarmupSet
from proxy.fleet.part import Shelf
from proxy.fleet.worker import BREAKER_FAILURES, CircuitBreaker, Worker
from proxy.fleet.worker_metrics import EngineInfo
from proxy.http.auth import ApiKey, KeyEntry
from proxy.metrics import Metrics
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.request import Prompt, ProxiedRequest, request_of
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.queue import AdmissionQueue
from tests.harness.probed import probed

SYSTEM = Boundary("system", b"s", "first:1", estimate=150)

RENDERER = b"renderer"


class Pool:
    """Workers that are up while they are listed."""

    def __init__(self, *workers: Worker) -> None:
        self.up = list(workers)

    async def find(self, model: object) -> None:
        """It has them all."""

    def serving(self, model: object) -> list[Worker]:
        return self.up

    def for_model(self, model: object) -> list[Worker]:
        if not self.up:
            raise NoWorker("No worker is ready for this model.")
        return self.up


class Events:
    """Engine events that note what they are given."""

    def __init__(self) -> None:
        self.sent_to: list[str] = []
        self.hints: list[tuple[object, ...]] = []
        self.refused_by: list[str] = []

    def sent(self, worker: Worker, request_id: str, boundaries: object, entries: tuple[object, ...]) -> None:
        self.sent_to.append(worker.boot)
        self.hints.append(entries)

    def refused(self, worker: Worker, request_id: str) -> None:
        self.refused_by.append(worker.boot)


class Scene:
    """A dispatcher before workers that take one request at a time."""

    def __init__(self, *names: str) -> None:
        engine = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384)
        self.workers = [Worker(f"http://{name}", None, 1, probed=probed(name, engine)) for name in names]
        for worker in self.workers:
            worker.renderer_ids["m"] = RENDERER
        self.pool, self.events = Pool(*self.workers), Events()
        self.prefix_index = PrefixIndex(10**6)
        self.warmup = WarmupSet(10**6)
        self.queue = AdmissionQueue(8, 5.0, Histogram("seconds", "", registry=None))
        self.dispatcher = Dispatcher(
            SimpleNamespace(load_slack=8),
            self.pool,
            self.queue,
            self.prefix_index,
            self.events,
            self.warmup,
            StoredResponses(10**6),
            Shelf(Metrics()),
        )
        self.key = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")

    def request(self, failure: str | None = None) -> ProxiedRequest:
        scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
        request = request_of(scope, b"x" * 400, "r", self.key)
        found = Found((SYSTEM,), (b"s",), failure=failure, renderer_id=RENDERER)
        request.prompt = Prompt(found=found, tokens=160)
        return request

    def counted(self) -> tuple[int, int, int]:
        """Requests at all workers, requests of the key, tokens counted as prefill."""
        inflight = sum(worker.inflight for worker in self.workers)
        return inflight, self.key.under_way, sum(worker.prefill_tokens for worker in self.workers)


async def test_a_lease_counts_its_request_and_its_prefill_until_the_first_byte():
    scene = Scene("a")
    async with scene.dispatcher.lease(scene.request()) as lease:
        assert scene.counted() == (1, 1, 160)
        assert lease.worker.dispatched == 1
        lease.prefilled()
        lease.prefilled()
        assert scene.counted() == (1, 1, 0)
    assert scene.counted() == (0, 0, 0)


async def test_what_the_engine_has_computed_of_a_prompt_counts_no_more_whether_the_answer_has_begun_or_not():
    scene = Scene("a")
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


async def test_a_prompt_is_computed_once_the_engine_has_passed_its_last_turn_however_long_it_was_taken_to_be():
    scene = Scene("a")
    request = scene.request()
    turn = SYSTEM._replace(kind="turn", key=b"t")
    request.prompt = request.prompt._replace(found=request.prompt.found._replace(boundaries=(SYSTEM, turn)))
    async with scene.dispatcher.lease(request):
        scene.events.on_computed("r", 120, True)
        assert scene.counted() == (1, 1, 0)


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError])
async def test_whatever_ends_a_request_it_is_counted_no_more(error):
    scene = Scene("a")
    with pytest.raises(error):
        async with scene.dispatcher.lease(scene.request()):
            raise error
    assert scene.counted() == (0, 0, 0)


async def test_a_request_that_never_reached_its_worker_moves_to_another():
    scene = Scene("a", "b")
    request = scene.request()
    async with scene.dispatcher.lease(request) as lease:
        first = lease.worker
        scene.pool.up.remove(first)
        await lease.move()
        assert lease.worker is not first
        assert (first.inflight, first.prefill_tokens, scene.counted()) == (0, 0, (1, 1, 160))
        assert scene.events.refused_by == [first.boot]
        assert scene.events.sent_to == [first.boot, lease.worker.boot]
        assert request.expected.ever_sent is None  # the first try was not there before
    assert scene.counted() == (0, 0, 0)


async def test_a_request_that_its_worker_refused_moves_only_if_another_one_is_free_now():
    scene = Scene("a", "b")
    async with scene.dispatcher.lease(scene.request()) as lease:
        first = lease.worker
        (other,) = (worker for worker in scene.workers if worker is not first)
        other.inflight = 1
        assert not lease.move_now() and lease.worker is first
        other.inflight = 0
        assert lease.move_now() and lease.worker is other
        assert (first.inflight, first.prefill_tokens, scene.counted()) == (0, 0, (1, 1, 160))
        assert scene.events.refused_by == [first.boot]
        scene.pool.up.clear()
        assert not lease.move_now() and lease.worker is other
    assert scene.counted() == (0, 0, 0)


async def test_a_worker_on_trial_is_on_trial_for_as_long_as_the_request_is_there():
    scene = Scene("a")
    breaker = scene.workers[0].breaker = CircuitBreaker(lambda: 0.0)
    for request in range(BREAKER_FAILURES):
        breaker.failed(request)
    breaker._trial_at = 0.0
    async with scene.dispatcher.lease(scene.request()):
        assert not breaker.wants_trial
    assert breaker.wants_trial  # its client has left without an answer


async def test_a_slot_is_there_while_nobody_waits_and_worker_and_key_have_room():
    scene = Scene("a")
    scene.key = ApiKey("ann", KeyEntry(sha256="0" * 64, max_inflight=1), "salt")
    request = scene.request()
    assert scene.dispatcher.has_slot(request)
    scene.key.under_way = 1
    assert not scene.dispatcher.has_slot(request)
    scene.key.under_way = 0
    async with scene.dispatcher.lease(request):
        assert not scene.dispatcher.has_slot(scene.request())


async def test_a_request_that_finds_no_other_worker_is_counted_nowhere():
    scene = Scene("a")
    async with scene.dispatcher.lease(scene.request()) as lease:
        scene.pool.up.clear()
        with pytest.raises(NoWorker):
            await lease.move()
    assert scene.counted() == (0, 0, 0)
    assert scene.events.refused_by == ["a"]


async def test_a_client_that_leaves_while_it_waits_or_just_as_its_slot_comes_leaves_no_count():
    scene = Scene("a")

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
    assert scene.events.refused_by == ["a"]  # nothing of it is at the worker


async def test_a_request_is_alone_until_another_one_is_given_to_its_worker():
    scene = Scene("a")
    scene.workers[0].max_inflight = 0
    async with scene.dispatcher.lease(scene.request()) as first:
        assert first.is_alone
        async with scene.dispatcher.lease(scene.request()) as second:
            assert not second.is_alone
            assert not first.is_alone
        assert not first.is_alone


async def test_nothing_is_predicted_of_a_prefix_until_an_engine_has_told_its_length():
    scene = Scene("a")
    expected = []
    for number in range(4):
        request = scene.request()
        async with scene.dispatcher.lease(request) as lease:
            expected.append(request.expected)
            prefill = lease.worker.prefill_tokens
        if number == 1:
            scene.prefix_index.set_length(b"s", 120)
        if number == 2:
            scene.prefix_index.set_held(b"s", "a", 112)
    assert [(each.predicted, each.held) for each in expected] == [(0, 0), (0, 0), (120, 120), (112, 112)]
    assert [each.sent is not None and each.sent_here for each in expected] == [False, True, True, True]
    assert {each.sent.tokens for each in expected[1:]} == {120}  # those that were sent before see it as well
    assert prefill == 160 - 112


async def test_what_another_worker_was_sent_is_told_apart_from_what_this_one_was():
    scene = Scene("a", "b")
    async with scene.dispatcher.lease(scene.request()) as first:
        scene.prefix_index.set_length(b"s", 120)
        request = scene.request()
        async with scene.dispatcher.lease(request) as second:
            expected = request.expected
            assert second.worker is not first.worker
            assert (expected.sent.tokens, expected.sent_here) == (120, False)
            assert (expected.held, expected.predicted) == (120, 0)
            assert (expected.ever_sent, expected.match_unit) == (expected.sent, 16)


async def test_the_hint_is_what_the_worker_takes_and_nothing_else_is_believed_to_be_kept():
    scene = Scene("a")
    (worker,) = scene.workers
    async with scene.dispatcher.lease(scene.request()):
        assert scene.events.hints == [("first:1",)] and scene.prefix_index.holds(b"s", "a")
    worker.probed = probed("older", EngineInfo("0.2.0", "0.32.0", match_unit=16, block_size=384))
    async with scene.dispatcher.lease(scene.request()):
        assert scene.events.hints[-1] == () and not scene.prefix_index.holds(b"s", "older")
    worker.probed, worker.renderer_ids["m"] = probed("another template", worker.engine), b"another"
    async with scene.dispatcher.lease(scene.request()):
        assert scene.events.hints[-1] == () and not scene.prefix_index.holds(b"s", "another template")


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
async def test_why_no_hint_is_sent_is_the_workers_reason_first(patched, quarantine, refused, failure):
    scene = Scene("a")
    (worker,) = scene.workers
    engine = EngineInfo("0.3.0", "0.32.0", match_unit=16, block_size=384, refused=refused)
    worker.probed, worker.in_shadow = probed("a", engine if patched or refused else None), not patched
    if quarantine:
        worker.cache.quarantine()
    request = scene.request("no_facts")
    async with scene.dispatcher.lease(request):
        assert request.expected.failure == failure
        assert bool(scene.events.sent_to) == (failure == "no_facts")


async def test_a_prefix_that_is_shared_is_kept_for_a_restarted_worker():
    scene = Scene("a")
    for kept in (0, 1, 1):
        async with scene.dispatcher.lease(scene.request()):
            assert len(scene.warmup) == kept


async def test_what_is_kept_for_a_restarted_worker_holds_no_parsed_request():
    scene = Scene("a")
    layout = layout_of(chat_request({"messages": [{"role": "user", "content": "Tide?"}]}), RENDERER)
    for _ in range(2):
        request = scene.request()
        found = request.prompt.found._replace(layout=layout, unplaced=(Place(b"s", 0, "Ti"),))
        request.prompt = request.prompt._replace(found=found)
        async with scene.dispatcher.lease(request):
            pass
    (replay,) = scene.warmup.hottest({""})
    assert replay.found == Found((SYSTEM,), renderer_id=RENDERER)
    assert scene.workers[0].hint(replay.found) == ("first:1",)
