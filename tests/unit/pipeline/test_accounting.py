"""A lease, and the step after an answer: what counts for how long, what is learnt, and the reason that is found."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.layout import layout_of
from proxy.chat.reader import chat_request
from proxy.chat.usage import Usage
from proxy.fleet.part import Change
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import StepTimes
from proxy.http.auth import ApiKey, KeyEntry
from proxy.http.client import Unreachable
from proxy.idle_work import CpuBudget, IdleWork
from proxy.observability.reasons import Expectation, reason_for
from proxy.observability.request_diff import RememberedRequest
from proxy.observability.totals import by_key
from proxy.pipeline import accounting
from proxy.pipeline.exchange import Exchange, Prompt, RequestOutcome, exchange_of
from proxy.routing.feed_lines import Admitted
from proxy.routing.prefix_index import Prefix
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Tide?"}]}

SYSTEM = Boundary("system", b"s", "first:1", estimate=150)

FOUND = Found((SYSTEM, Boundary("turn", b"t", "last:4"), Boundary("turn", b"u", -5)), (b"s", b"t", b"u"))

ANN = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")


class Scene:
    """A gateway that has looked at its workers; the first one has answered a chat."""

    def __init__(self, own: InMemoryGateway) -> None:
        gateway = own.gateway
        self.worker, *self.others = gateway.pool.workers
        self.reader, self.prefix_index, self.idle = gateway.reader, gateway.prefix_index, gateway.idle
        self.accounting = gateway.accounting
        self.ended: list[tuple[str, str]] = []  # requests of which nothing more is to come, and how
        events = self.accounting._engine_events
        events.ask = lambda worker, name, then: then(None)  # type: ignore[method-assign]
        events.left = lambda _, name: self.ended.append(("left", name))  # type: ignore[method-assign]
        events.refused = lambda _, name: self.ended.append(("refused", name))  # type: ignore[method-assign]
        self.value, self.found = own.metric, FOUND

    def request(self, key: ApiKey | None = None, **expected: Any) -> Exchange:
        scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
        request = exchange_of(scope, b"x" * 400, "r", key)
        request.take(dict(CHAT), asks_usage=False)
        request.body.hint = self.found.entries()
        request.prompt = Prompt(chat_request(CHAT), found=self.found)
        self.accounting.read(request)
        known = {"failure": None, "sent": None, "sent_here": False, "ever_sent": None, "held": 0, "predicted": 0}
        request.give(self.worker, Expectation(**{**known, "match_unit": 16, **expected}))
        return request

    async def answered(self, request: Exchange, usage: Usage | None, *outcome: Admitted) -> str | None:
        """All of an answer has gone to the client; the reason that it told."""
        reason = await self.accounting.answered(request, RequestOutcome(200, usage, *outcome))
        request.reply.failed(200)
        self.accounting.settle(request)
        return reason

    def streamed(self, request: Exchange, usage: Usage, *outcome: Admitted) -> None:
        """The same of a stream, which tells none."""
        request.reply.failed(200)
        request.timings.is_stream = True
        self.accounting.reported(request, RequestOutcome(200, usage, *outcome))
        self.accounting.settle(request)


def said(reason: str, shared: int = 0, *positions: int) -> Admitted:
    """What an engine says of a request."""
    return Admitted("r", reason, 0, shared, positions)


@pytest.fixture
def own_of(in_memory) -> Callable[..., Awaitable[InMemoryGateway]]:
    async def of(*workers: RecordingWorker, **settings: Any) -> InMemoryGateway:
        own: InMemoryGateway = await in_memory(*workers, is_started=False, **settings)
        await own.gateway.pool.check_all()
        return own

    return of


@pytest.fixture
async def scene(own_of) -> Scene:
    return Scene(await own_of(RecordingWorker("http://w")))


@pytest.mark.parametrize(
    ("sent", "cached", "lost", "reason"),
    [
        (None, 0, 400, "prefix_changed"),
        (100, 0, 300, "prefix_changed"),
        (390, 0, None, "worker_restarted"),
        (None, 128, 260, "prefix_changed"),
        (None, 320, 68, "hit"),  # less than a quarter
    ],
)
async def test_a_change_costs_nothing_that_some_worker_was_sent_before(scene, sent, cached, lost, reason):
    """Though neither an engine nor the memory of recent requests knows of it any more."""
    request = changed_request(scene)
    prefix = Prefix(sent, 0) if sent is not None else None
    request.expected.ever_sent = prefix
    outcome = said("hit", cached + 12) if cached else said("cold")
    assert await scene.answered(request, Usage(400, cached), outcome) == reason
    assert scene.value("seamark_miss_total", model="m", reason=reason) == (reason != "hit")
    assert request.record.look is None, "nothing of the request is held"
    changed = request.record.changed
    assert request.record.would_save == ({"dates": changed["lost"]} if lost is not None else {})
    assert scene.value("seamark_would_save_tokens_total", text="dates") == (changed["lost"] if changed else 0)
    assert (changed and changed["lost"]) == (lost and pytest.approx(lost, abs=16))


def changed_request(scene: Scene) -> Exchange:
    """Its system prompt has another date than the one before it."""
    rules = "Keep clear of the bar at low water. " * 20
    for day in ("2026-11-22", "2026-11-23"):
        changed = {"role": "system", "content": f"Today is {day}. {rules}"}
        chat = chat_request({**CHAT, "messages": [changed, *CHAT["messages"]]})
        remembered = RememberedRequest(layout_of(chat, b"renderer"), 1000)
        scene.reader.recent.add(remembered)
    request = scene.request()
    request.prompt.remembered = remembered
    return request


@pytest.mark.parametrize(
    ("lack", "cached", "reason"), [("behind", 0, None), ("spent", 0, None), ("slow", 0, None), ("spent", 128, "hit")]
)
async def test_with_no_time_nothing_is_said_of_what_a_change_may_have_cost(scene, monkeypatch, lack, cached, reason):
    request = changed_request(scene)
    if lack == "behind":
        monkeypatch.setattr(IdleWork, "is_behind", True)
    elif lack == "spent":
        monkeypatch.setattr(CpuBudget, "is_spent", True)
    else:
        monkeypatch.setattr(accounting, "SEEK_SECONDS", -1.0)
    assert await scene.answered(request, Usage(400, cached), said("cold", cached)) == reason == request.record.reason
    assert request.record.changed is None and request.record.delivered == cached
    assert scene.value("seamark_miss_total", model="m", reason="unknown") == (reason is None)
    assert scene.value("seamark_explanations_shed_total") == 1


async def test_a_stream_is_given_the_time_it_takes(scene, monkeypatch):
    monkeypatch.setattr(accounting, "SEEK_SECONDS", -1.0)
    request = changed_request(scene)
    scene.streamed(request, Usage(400, 0), said("cold"))
    await scene.idle.caught_up()
    assert request.record.reason == "prefix_changed"


async def test_what_fails_beside_an_answer_costs_no_answer_and_its_kind_alone_is_logged(scene, caplog):
    scene.streamed(request := scene.request(), Usage(100, 0))
    await until(lambda: request.record.reason)
    assert request.record.reason == "cold"  # the gateway's own, where the engine says nothing
    request = scene.request()
    scene.found = Found((Boundary("turn", b"t", [7]),))  # no entry
    request.prompt.found = scene.found
    assert await scene.answered(request, Usage(100, 0), said("cold", 0, 40)) is None
    assert "explaining request r: TypeError" in caplog.text


async def test_lengths_are_learnt_from_what_an_engine_says_up_to_the_prompts_end(scene):
    index, positions = scene.prefix_index, scene.reader.positions
    index.record(scene.found.boundaries, scene.worker.boot, scene.found.entries())
    await scene.answered(scene.request(), Usage(100, 0), said("cold", 0, 1, 101, 100))
    assert [positions.get(each.key) for each in scene.found.boundaries] == [1, 0, 100]
    held = index.longest(scene.found.prefixes, [scene.worker.boot])[scene.worker.boot]
    assert (held.tokens, held.is_told) == (100, True)


@pytest.mark.parametrize(("status", "told"), [(200, []), (404, ["refused"]), (500, ["refused"]), (499, ["left"])])
async def test_what_was_recorded_for_a_request_that_came_to_nothing_is_taken_back(scene, status, told):
    request = scene.request()
    request.reply.failed(status)
    scene.accounting.settle(request)
    assert scene.ended == [(each, "r") for each in told]


def with_pace(worker: Worker, pass_seconds: float, token_seconds: float) -> None:
    metrics = worker.probed.metrics._replace(step_times=StepTimes(pass_seconds, token_seconds))
    worker.learn(replace(worker.probed, metrics=metrics))


async def test_a_worker_that_is_gone_is_forgotten_with_its_last_request(own_of):
    scene = Scene(await own_of(RecordingWorker("http://w"), RecordingWorker("http://v")))
    gone, (other,) = scene.worker, scene.others
    with_pace(gone, 0.0, 0.0)
    for worker in (gone, other):
        request = scene.request()
        request.give(worker, request.expected)
        request.reply.failed(200)
        scene.accounting.reported(request, RequestOutcome(200, Usage(100, 60)))
        scene.accounting.settle(request)
        await scene.idle.caught_up()

    def counted() -> list[float]:
        metrics = "seamark_requests_total", "seamark_cached_tokens_total"
        return [sum(scene.value(metric, worker=name) for metric in metrics) for name in ("w", "v")]

    for present, inflight in ((True, 0), (False, 1)):  # another one has its name; its last request still counts
        gone.inflight = inflight
        if not present:
            scene.accounting._pool.workers.remove(gone)
        scene.accounting.on_worker(gone, Change.REMOVED)
        assert (counted(), scene.accounting.time_saved().waiting) == ([61, 61], 120)
    gone.inflight = 0
    assert (scene.accounting.time_saved().waiting, counted()) == (60, [0, 61])


async def test_a_replay_costs_a_pass_and_what_was_computed(scene):
    with_pace(scene.worker, 0.5, 0.01)
    for usage, spent in ((None, 0.0), (Usage(100, 40), 1.1), (Usage(100, None), 2.6)):
        scene.accounting.replayed("m", scene.worker, usage)
        assert scene.accounting.time_saved().spent == pytest.approx(spent)
        assert scene.value("seamark_seconds_spent_total", model="m", worker="w") == pytest.approx(spent)
    saved = scene.accounting._metrics.registry.get_sample_value
    assert saved("seamark_seconds_saved_total", {"model": "m", "worker": "w"}) == 0  # not None: an alert compares both


async def test_cached_tokens_count_as_time_at_the_pace_known_by_then(scene):
    with_pace(scene.worker, 0.5, 0.0)
    await scene.answered(scene.request(), Usage(1000, 400), said("hit", 400))
    saved = scene.accounting.time_saved()
    assert (saved.net, saved.waiting) == (None, 400)
    with_pace(scene.worker, 0.5, 0.01)
    saved = scene.accounting.time_saved()
    assert (saved.saved, saved.waiting) == (pytest.approx(4.0), 0)
    assert saved.vllm_alone == pytest.approx(0.01 * (400 // 384 * 384))  # whole cache blocks
    assert scene.value("seamark_seconds_saved_total", model="m", worker="w") == pytest.approx(4.0)
    await scene.answered(scene.request(), Usage(1000, 100), said("hit", 100))
    scene.accounting.time_saved()
    assert scene.value("seamark_seconds_saved_total", model="m", worker="w") == pytest.approx(5.0)


async def test_tokens_count_for_model_worker_and_key_as_far_as_they_are_told(scene):
    labels = {"model": "m", "worker": "w"}

    def counted() -> list[float]:
        names = ("prompt", "cached", "shareable", "shareable_cached", "predicted")
        return [scene.value(f"seamark_{name}_tokens_total", **labels) for name in names]

    expects = {"sent": Prefix(90, 0), "sent_here": True, "held": 80, "predicted": 80}
    for key, cached, outcome, sums in (
        (ANN, 80, [said("hit", 80)], [100, 80, 80, 80, 80]),
        (None, 16, [said("evicted", 80)], [200, 96, 160, 96, 160]),
        (None, None, [], [300, 96, 240, 96, 240]),  # shareable for all that is known
    ):
        await scene.answered(scene.request(key=key, **expects), Usage(100, cached, 7), *outcome)
        assert counted() == sums
    plain = scene.request(**expects)
    plain.give(scene.worker)
    await scene.answered(plain, Usage(100, 16, 7))
    assert counted() == [400, 112, 240, 96, 240] and plain.outcome.reason is None
    nowhere = scene.request()
    nowhere.give(None)
    assert await scene.answered(nowhere, Usage(100, 16, 7)) is None
    assert counted() == [400, 112, 240, 96, 240]
    (used,) = by_key(scene.accounting._metrics)
    assert (used["prompt_tokens"], used["cached_tokens"], used["output_tokens"]) == (100, 80, 7)


RENDERER = b"renderer"


class LeaseScene:
    """A gateway that has looked at its workers, which take one request at a time; none is sent anything."""

    def __init__(self, own: InMemoryGateway) -> None:
        self.own, self.workers = own, own.gateway.pool.workers
        self.queue, self.dispatcher = own.gateway.queue, own.gateway.handler._answer._dispatcher
        self.events = self.dispatcher._engine_events
        for worker in self.workers:
            worker.renderer_ids["m"] = RENDERER
        self.key = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")
        self.refused_by: list[str] = []  # boots, as engine events are told
        self.events.refused = lambda worker, _: self.refused_by.append(worker.boot)  # type: ignore[method-assign]

    def request(self, path: str = "/v1/chat/completions", **body: Any) -> Exchange:
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": []}
        request = exchange_of(scope, b"x" * 400, "r", self.key)
        request.take({"model": "m", **body}, asks_usage=False)
        found = Found((SYSTEM,), (b"s",), renderer_id=RENDERER)
        request.prompt = Prompt(found=found, tokens=160)
        return request

    async def given(self) -> Exchange:
        """A request with a slot."""
        await self.dispatcher.acquire(request := self.request())
        return request

    def counted(self) -> tuple[int, int, int]:
        inflight = sum(worker.inflight for worker in self.workers)
        return inflight, self.key.under_way, sum(worker.prefill_tokens for worker in self.workers)


@pytest.fixture
async def leased(own_of) -> LeaseScene:
    return LeaseScene(await own_of(RecordingWorker(), max_inflight=1))


@pytest.fixture
async def two(own_of) -> LeaseScene:
    return LeaseScene(await own_of(RecordingWorker(), RecordingWorker(), max_inflight=1))


async def test_what_the_engine_has_computed_of_a_prompt_counts_no_more_whether_the_answer_has_begun_or_not(leased):
    request = await leased.given()
    # Never more than before.
    for name, computed, left in (("r", 100, 60), ("r", 40, 60), ("another gateway's", 160, 60), ("r", 200, 0)):
        leased.events._computed(name, computed, False)
        assert leased.counted() == (1, 1, left)
    leased.dispatcher.release(request)
    leased.events._computed("r", 100, False)
    assert leased.counted() == (0, 0, 0)


@pytest.mark.parametrize(("held", "reason"), [(0, "cold"), (150, "other_worker")])
async def test_a_request_that_its_worker_refused_moves_only_if_another_one_is_free_now(two, held, reason):
    pool, index, moves = two.own.gateway.pool, two.own.gateway.prefix_index, two.dispatcher.move_now
    if held:
        index.record((Boundary("system", b"s", "first:1", held, 150),), two.workers[1].boot)
    request = await two.given()
    first = request.worker
    (other,) = (worker for worker in two.workers if worker is not first)
    first.max_inflight = 2  # it has room, and is not asked again
    other.inflight = 1
    assert not moves(request) and request.worker is first
    other.inflight = 0
    if held:
        pool.mark_down(first)  # it could not be reached
    assert moves(request) and request.worker is other
    assert (first.inflight, first.prefill_tokens, two.counted()) == (0, 0, (1, 1, 160))
    assert two.refused_by == [first.boot]
    # What it shares is what was sent before it came, and who refused it holds that still.
    index.set_length(b"s", 150)
    expected = request.expected
    assert reason_for(expected, 160, 0, expected.shareable(160, 0), 160) == reason
    for worker in two.workers:
        two.own.upstream.faults[worker.url] = Unreachable()
        pool.mark_down(worker)
    assert not moves(request) and request.worker is other
    two.dispatcher.release(request)
    assert two.counted() == (0, 0, 0)


async def test_a_worker_on_trial_is_on_trial_for_as_long_as_the_request_is_there_which_ends_a_check_of_it(leased):
    (worker,) = leased.workers
    worker.breaker.is_open, worker.breaker._trial_at, worker.self_check = True, 0.0, Mock()
    request = await leased.given()
    worker.self_check.cancel.assert_called_once()
    assert not worker.breaker.wants_trial
    leased.dispatcher.release(request)
    assert worker.breaker.wants_trial  # its client has left without an answer


async def test_a_client_that_leaves_while_it_waits_or_just_as_its_slot_comes_leaves_no_count(leased):
    request = await leased.given()
    others = [asyncio.create_task(leased.given()) for _ in range(2)]
    await asyncio.sleep(0)
    assert len(leased.queue.waiting) == 2
    others[0].cancel()  # while it waits
    await asyncio.gather(others[0], return_exceptions=True)
    assert (len(leased.queue.waiting), leased.counted()) == (1, (1, 1, 160))
    leased.dispatcher.release(request)
    # The slot is the last one's, which does not know yet. Its worker was sent the first 150 tokens before.
    assert (len(leased.queue.waiting), leased.counted()) == (0, (1, 1, 10))
    others[1].cancel()
    await asyncio.gather(others[1], return_exceptions=True)
    assert leased.counted() == (0, 0, 0)
    assert leased.refused_by == [leased.workers[0].boot]  # nothing of it is at the worker


@pytest.mark.parametrize(
    ("status", "is_kept"), [(199, False), (200, True), (299, True), (300, False), (404, False), (500, False)]
)
async def test_the_worker_of_a_response_is_remembered_once_one_has_answered_for_it(two, status, is_kept):
    worker, stored = two.workers[0], two.dispatcher._stored
    continues = two.request("/v1/responses", previous_response_id="resp_1")
    assert two.dispatcher.should_retry_elsewhere(continues, worker, status) is (status == 404)
    assert stored.boot("resp_1", continues.head.owner) == (worker.boot if is_kept else None)
    plain = two.request()
    assert two.dispatcher.should_retry_elsewhere(plain, worker, status) is False and plain.asked == []


async def test_a_request_and_an_answer_that_it_waits_for_count_once_at_their_key(leased):
    leased.key = ApiKey("ann", KeyEntry(sha256="0" * 64, max_inflight=1), "salt")
    with leased.dispatcher.counted(leased.key):  # while it waits for an equal request
        assert leased.counted() == (0, 1, 0)
        waiting = asyncio.create_task(leased.dispatcher.acquire(request := leased.request()))
        await asyncio.sleep(0)
        assert leased.key.queued == 1
    await waiting
    for _ in range(2):
        leased.dispatcher.release(request)
        assert leased.counted() == (0, 0, 0) and request.slot is None
