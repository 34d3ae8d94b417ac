"""The step after an answer: what is learnt from its usage, and the reason that is found for what came."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.layout import layout_of
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.template_facts import Opener, TemplateFacts
from proxy.chat.reader import chat_request
from proxy.chat.usage import Usage
from proxy.fleet.part import Change
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import StepTimes
from proxy.http.auth import ApiKey, KeyEntry
from proxy.idle_work import IdleWork
from proxy.observability.reasons import Expectation
from proxy.observability.request_diff import RememberedRequest
from proxy.pipeline import accounting
from proxy.pipeline.request import Choice, Prompt, ProxiedRequest, Report, request_of
from proxy.routing.engine_events import EngineOutcome
from proxy.routing.prefix_index import Prefix
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

FACTS = TemplateFacts({"user": 5}, {("user", False): Opener((4,)), ("first", False): Opener((1,))})

CHAT = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "You pilot ships into the harbour."},
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Second?"},
    ],
}


class Scene:
    """A gateway that has looked at its workers; the first one has answered a chat."""

    def __init__(self, own: InMemoryGateway) -> None:
        gateway = own.gateway
        self.worker, *self.others = gateway.pool.workers
        self.reader, self.prefix_index, self.idle = gateway.reader, gateway.prefix_index, gateway.idle
        self.accounting = gateway.accounting
        self.said: asyncio.Future[EngineOutcome | None] = asyncio.get_running_loop().create_future()
        self.asked = 0  # how often an engine was asked for what it has said
        self.ended: list[tuple[str, str]] = []  # requests of which nothing more is to come, and how
        events = self.accounting._engine_events
        events.outcome_of = self._outcome_of  # type: ignore[method-assign]
        events.left = lambda _, name: self.ended.append(("left", name))  # type: ignore[method-assign]
        events.refused = lambda _, name: self.ended.append(("refused", name))  # type: ignore[method-assign]
        self.registry, self.value = gateway.metrics.registry, own.metric
        self.found = BoundaryFinder(PositionCache(10**6)).find(chat_request(CHAT), FACTS, b"renderer")

    async def _outcome_of(self, *_: Any) -> EngineOutcome | None:
        self.asked += 1
        return await self.said

    def request(
        self,
        *,
        path: str = "/v1/chat/completions",
        body: Mapping[str, Any] = CHAT,
        key: ApiKey | None = None,
        hint: tuple[Any, ...] | None = None,
        **expected: Any,
    ) -> ProxiedRequest:
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": [(b"user-agent", b"pilot/1.2 x")]}
        request = request_of(scope, b"x" * 400, "r", key)
        request.body.parsed = dict(body)
        request.body.hint = self.found.entries() if hint is None else hint
        request.prompt = Prompt(chat_request(CHAT), found=self.found)
        self.accounting.began(request)
        known = {"failure": None, "sent": None, "sent_here": False, "ever_sent": None, "held": 0, "predicted": 0}
        request.give(Choice(self.worker, Expectation(**{**known, "match_unit": 16, **expected})))
        return request

    async def answered(self, request: ProxiedRequest, usage: Usage | None, *outcome: EngineOutcome) -> str | None:
        return await self.accounting.answered(request, Report(200, usage, *outcome))

    async def streamed(self, request: ProxiedRequest, usage: Usage, *outcome: EngineOutcome) -> None:
        """All of a stream's answer has gone to the client."""
        await request.reply({"type": "http.response.start", "status": 200, "headers": []})
        request.timings.is_stream = True
        self.accounting.reported(request, Report(200, usage, *outcome))
        self.accounting.count(request)


@pytest.fixture
def scene_of(in_memory) -> Callable[..., Awaitable[Scene]]:
    async def of(*workers: RecordingWorker) -> Scene:
        own = await in_memory(*workers, is_started=False)
        await own.gateway.pool.check_all()
        return Scene(own)

    return of


@pytest.fixture
async def scene(scene_of) -> Scene:
    return await scene_of(RecordingWorker("http://w"))


@pytest.mark.parametrize(("sent", "lost"), [(None, 400), (100, 300), (390, None)])
async def test_a_change_costs_nothing_that_some_worker_was_sent_before(scene, sent, lost):
    """Though neither an engine nor the memory of recent requests knows of it any more."""
    request = changed_request(scene)
    prefix = Prefix(sent, 0) if sent is not None else None
    request.give(Choice(scene.worker, request.expected._replace(ever_sent=prefix)))
    await scene.answered(request, Usage(400, 0), EngineOutcome("cold", 0))
    explanation = request.record.explanation
    changed = explanation.changed
    assert explanation.would_save == ({"dates": changed["lost"]} if lost is not None else {})
    assert scene.value("seamark_would_save_tokens_total", text="dates") == (changed["lost"] if changed else 0)
    assert (changed and changed["lost"]) == (lost and pytest.approx(lost, abs=16))


def changed_request(scene: Scene) -> ProxiedRequest:
    """Its system prompt has another date than the one before it."""
    rules = "Keep clear of the bar at low water. " * 20
    for day in ("2026-11-22", "2026-11-23"):
        changed = {"role": "system", "content": f"Today is {day}. {rules}"}
        chat = chat_request({**CHAT, "messages": [changed, *CHAT["messages"][1:]]})
        remembered = RememberedRequest(layout_of(chat, b"renderer"), 1000)
        scene.reader.recent.add(remembered)
    request = scene.request()
    request.prompt = request.prompt._replace(remembered=remembered)
    return request


@pytest.mark.parametrize("lack", ["behind", "slow"])
async def test_with_no_time_a_reason_is_found_without_a_change_and_that_is_counted(scene, monkeypatch, lack):
    request = changed_request(scene)
    if lack == "behind":
        monkeypatch.setattr(IdleWork, "is_behind", True)
    else:
        monkeypatch.setattr(accounting, "SEEK_SECONDS", -1.0)
    assert await scene.answered(request, Usage(400, 0), EngineOutcome("cold", 0)) == "cold"
    assert request.record.explanation.changed is None and scene.value("seamark_explanations_shed_total") == 1


async def test_a_stream_is_given_the_time_it_takes(scene, monkeypatch):
    monkeypatch.setattr(accounting, "SEEK_SECONDS", -1.0)
    request = changed_request(scene)
    await scene.streamed(request, Usage(400, 0), EngineOutcome("cold", 0))
    await scene.idle.caught_up()
    assert request.record.explanation.reason == "prefix_changed"


async def test_an_explanation_that_fails_costs_no_answer(scene, caplog):
    request = scene.request()
    scene.found = Found((Boundary("turn", b"t", [7]),))  # no entry
    request.prompt = request.prompt._replace(found=scene.found)
    outcome = EngineOutcome("cold", 0, (40,))
    assert await scene.answered(request, Usage(100, 0), outcome) is None
    assert "explaining request r: TypeError" in caplog.text


async def test_lengths_are_learnt_from_what_an_engine_says_up_to_the_prompts_end(scene):
    index, positions = scene.prefix_index, scene.reader.positions
    index.record(scene.found.boundaries, scene.worker.boot, scene.found.entries())
    scene.found = scene.found._replace(end=None)
    await scene.answered(scene.request(), Usage(100, 0), EngineOutcome("cold", 0, (1, 101, 100)))
    assert [positions.get(each.key) for each in scene.found.boundaries] == [1, 0, 100]
    held = index.longest(scene.found.prefixes, [scene.worker.boot])[scene.worker.boot]
    assert (held.tokens, held.is_told) == (100, True)


@pytest.mark.parametrize(("status", "told"), [(200, []), (404, ["refused"]), (500, ["refused"]), (499, ["left"])])
async def test_what_was_recorded_for_a_request_that_came_to_nothing_is_taken_back(scene, status, told):
    request = scene.request()
    request.reply.failed(status)
    scene.accounting.count(request)
    assert scene.ended == [(each, "r") for each in told]


RESPONSES, ASKED = "/v1/responses", {"model": "m", "input": "Tide?"}

ANN = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")


def with_pace(worker: Worker, pass_seconds: float, token_seconds: float) -> None:
    metrics = worker.probed.metrics._replace(step_times=StepTimes(pass_seconds, token_seconds))
    worker.probed = replace(worker.probed, metrics=metrics)


@pytest.mark.parametrize(
    ("path", "store", "is_stored"),
    [(RESPONSES, {}, True), (RESPONSES, {"store": "off"}, False), ("/v1/chat/completions", {}, False)],
)
async def test_a_response_can_be_asked_for_once_its_answer_begins_if_it_is_stored(scene, path, store, is_stored):
    for number in range(3):
        request = scene.request(path=path, body={**ASKED, **store}, key=ANN)
        name = f"resp_{number}"
        if number == 2:
            request.choice = None
        if number:
            scene.accounting.opened(request, {"id": name, "output": []})
        else:
            scene.accounting.reported(request, Report(200), {"id": name, "output": []})
        is_kept = is_stored and number < 2
        assert scene.reader.stored.boot(name, "ann") == (scene.worker.boot if is_kept else None)
        assert scene.reader.stored.boot(name, "bob") is None


@pytest.mark.parametrize(
    ("timings", "stages"),
    [
        ({"asked": 13.0, "choosing": 12.0}, [("queue", 13.0, 99.0)]),  # it still waits, for another worker
        (
            {"asked": 11.0, "choosing": 12.0, "leased": 12.5, "first_byte": 14.0, "is_stream": True},
            [("queue", 11.0, 12.0), ("choice", 12.0, 12.5), ("first token", 12.5, 14.0)],
        ),
    ],
)
async def test_a_trace_ends_with_the_stages_that_a_request_came_to(scene, monkeypatch, timings, stages):
    monkeypatch.setattr(accounting.time, "perf_counter", lambda: 99.0)
    request, put_off = scene.request(), Mock()
    scene.idle.put_off, request.trace = put_off, Mock()
    for name, value in {"arrived": 10.0, **timings}.items():
        setattr(request.timings, name, value)
    request.reply.failed(503)
    scene.accounting.count(request)
    put_off.assert_called_once()
    request.trace.stop.assert_called_once()
    request.trace.end.assert_called_once_with(503, "m", "w", stages, request.record.explanation)


async def test_a_worker_that_is_gone_is_forgotten_with_its_last_request(scene_of, monkeypatch):
    monkeypatch.setattr(accounting, "FORGET_SECONDS", 0.0)
    scene = await scene_of(RecordingWorker("http://w"), RecordingWorker("http://v"))
    gone, (other,), pool = scene.worker, scene.others, scene.accounting._pool
    with_pace(gone, 0.0, 0.0)
    for worker in (gone, other):
        request = scene.request()
        request.give(Choice(worker, request.expected))
        request.reply.failed(200)
        scene.accounting.reported(request, Report(200, Usage(100, 60)))
        scene.accounting.count(request)
        await scene.idle.caught_up()

    def counted(name: str) -> float:
        metrics = "seamark_requests_total", "seamark_cached_tokens_total"
        return sum(scene.value(metric, worker=name) for metric in metrics)

    running = asyncio.create_task(scene.accounting.run())
    saved = scene.accounting.time_saved()
    assert (counted("w"), counted("v"), saved.waiting) == (61, 61, 120)
    scene.accounting.on_worker(gone, Change.REMOVED)
    scene.accounting.forget_gone()
    assert counted("w") == 61  # another one has its name
    pool.workers.remove(gone)
    gone.inflight = 1
    scene.accounting.on_worker(gone, Change.REMOVED)
    scene.accounting.forget_gone()
    assert counted("w") == 61  # its last request still counts
    gone.inflight = 0
    await until(lambda: counted("w") == 0)  # it is looked at again and again
    assert (counted("v"), saved.waiting) == (61, 60)
    running.cancel()


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (b'{"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 40}}}', 0.5 + 60 * 0.01),
        (b'{"usage": {"prompt_tokens": 100}}', 0.5 + 100 * 0.01),
        (b"{}", None),
    ],
)
async def test_a_replay_costs_a_pass_and_what_was_computed(scene, answer, seconds):
    with_pace(scene.worker, 0.5, 0.01)
    scene.accounting.replayed("m", scene.worker, answer)
    spent = scene.value("seamark_seconds_spent_total", model="m", worker="w")
    assert spent == pytest.approx(seconds or 0) and scene.accounting.time_saved().spent == pytest.approx(seconds or 0)


async def test_cached_tokens_count_as_time_at_the_pace_known_by_then(scene):
    with_pace(scene.worker, 0.5, 0.0)
    await scene.answered(scene.request(), Usage(1000, 400), EngineOutcome("hit", 400))
    saved = scene.accounting.time_saved()
    assert (saved.net, saved.waiting) == (None, 400)
    with_pace(scene.worker, 0.5, 0.01)
    saved = scene.accounting.time_saved()
    assert (saved.saved, saved.waiting) == (pytest.approx(4.0), 0)
    assert saved.vllm_alone == pytest.approx(0.01 * (400 // 384 * 384))  # whole cache blocks
    assert scene.value("seamark_seconds_saved_total", model="m", worker="w") == pytest.approx(4.0)
    await scene.answered(scene.request(), Usage(1000, 100), EngineOutcome("hit", 100))
    assert scene.value("seamark_seconds_saved_total", model="m", worker="w") == pytest.approx(5.0)


async def test_tokens_count_for_model_worker_and_key_as_far_as_they_are_told(scene):
    labels = {"model": "m", "worker": "w"}

    def counted() -> list[float]:
        names = ("prompt", "cached", "shareable", "shareable_cached", "predicted")
        return [scene.value(f"seamark_{name}_tokens_total", **labels) for name in names]

    expects = {"sent": Prefix(90, 0), "sent_here": True, "held": 80, "predicted": 80}
    await scene.answered(scene.request(key=ANN, **expects), Usage(100, 80, 7), EngineOutcome("hit", 80))
    assert counted() == [100, 80, 80, 80, 80]
    await scene.answered(scene.request(**expects), Usage(100, 16, 7), EngineOutcome("evicted", 80))
    assert counted() == [200, 96, 160, 96, 160]
    await scene.answered(scene.request(**expects), Usage(100, None, 7))
    assert counted() == [300, 96, 240, 96, 240]  # shareable for all that is known
    plain = scene.request(**expects)
    plain.give(Choice(scene.worker))
    await scene.answered(plain, Usage(100, 16, 7))
    assert counted() == [400, 112, 240, 96, 240] and plain.verdict is None
    nowhere = scene.request()
    nowhere.choice = None
    assert await scene.answered(nowhere, Usage(100, 16, 7)) is None
    assert counted() == [400, 112, 240, 96, 240]
    (used,) = scene.accounting.key_usage.as_json()
    assert (used["prompt_tokens"], used["cached_tokens"], used["output_tokens"]) == (100, 80, 7)


async def test_an_engine_that_cannot_be_asked_leaves_the_gateways_own_reason(scene, caplog):
    scene.said.set_exception(KeyError("You pilot ships."))
    request = scene.request(hint=(40,))
    await scene.streamed(request, Usage(100, 0))
    await until(lambda: request.record.explanation.reason)
    assert request.record.explanation.reason == "cold"
    assert "asking for request r: KeyError" in caplog.text and "pilot" not in caplog.text
