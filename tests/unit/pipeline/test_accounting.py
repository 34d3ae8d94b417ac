"""The step after an answer: what is learnt from its usage, and the reason that is found for what came."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.layout import layout_of
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.template_facts import Opener, TemplateFacts, Turn
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
from proxy.pipeline.request import CLIENT_GONE, Choice, Prompt, ProxiedRequest, Report, Verdict, request_of
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


class Events:
    """Engine events that say what they are told to, once they are."""

    def __init__(self) -> None:
        self.said: asyncio.Future[EngineOutcome | None] = asyncio.get_running_loop().create_future()
        self.asked = 0
        self.short: list[tuple[Any, ...]] = []
        self.ended: list[tuple[str, str]] = []  # requests of which nothing more is to come, and how

    async def outcome_of(self, worker: Worker, request_id: str) -> EngineOutcome | None:
        self.asked += 1
        return await self.said

    def fell_short(self, *what: Any) -> None:
        self.short.append(what)

    def left(self, worker: Worker, request_id: str) -> None:
        self.ended.append(("left", request_id))

    def refused(self, worker: Worker, request_id: str) -> None:
        self.ended.append(("refused", request_id))


class Scene:
    """A gateway that has looked at its workers; the first one has answered a chat."""

    def __init__(self, own: InMemoryGateway) -> None:
        gateway = own.gateway
        self.worker, *self.others = gateway.pool.workers
        self.reader, self.prefix_index, self.idle = gateway.reader, gateway.prefix_index, gateway.idle
        self.accounting = gateway.accounting
        self.events = self.accounting._engine_events = Events()  # type: ignore[assignment]
        self.registry, self.value = gateway.metrics.registry, own.metric
        self.finds(FACTS)

    def finds(self, facts: TemplateFacts | None) -> None:
        """The boundaries of the chat, by these facts."""
        self.found = BoundaryFinder(PositionCache(10**6)).find(chat_request(CHAT), facts, b"renderer")

    def request(
        self,
        *,
        path: str = "/v1/chat/completions",
        body: Mapping[str, Any] = CHAT,
        key: ApiKey | None = None,
        is_stream: bool = False,
        hint: tuple[Any, ...] | None = None,
        **expected: Any,
    ) -> ProxiedRequest:
        scope = {"method": "POST", "path": path, "query_string": b"", "headers": [(b"user-agent", b"pilot/1.2 x")]}
        request = request_of(scope, b"x" * 400, "r", key)
        request.body.parsed = dict(body)
        request.body.hint = self.found.entries() if hint is None else hint
        request.timings.is_stream = is_stream
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


async def test_the_length_of_a_turn_is_learnt_from_the_tokens_of_its_prompt(scene):
    scene.prefix_index.record(scene.found.boundaries, scene.worker.boot, scene.found.entries())
    await scene.answered(scene.request(), Usage(100, 0), EngineOutcome("cold"))
    assert scene.found.turn_key is not None and scene.reader.positions.get(scene.found.turn_key) == 95
    held = scene.prefix_index.longest(scene.found.prefixes, [scene.worker.boot])[scene.worker.boot]
    assert (held.tokens, held.is_told) == (95, True)
    assert len(scene.reader.positions) == 1


@pytest.mark.parametrize(
    "facts",
    [
        None,
        FACTS.borrowed({"user": 9}),
        TemplateFacts({}, FACTS.openers),
        TemplateFacts(FACTS.ends, FACTS.openers, frozenset({Turn("user", later=True, system=True, tools=False)})),
        TemplateFacts({"user": 100}, FACTS.openers),
    ],
)
async def test_no_length_is_learnt_by_facts_of_another_setting_nor_where_the_turn_does_not_hold(scene, facts):
    scene.finds(facts)
    scene.prefix_index.record(scene.found.boundaries, scene.worker.boot, scene.found.entries())
    await scene.answered(scene.request(), Usage(100, 0), EngineOutcome("cold"))
    assert len(scene.reader.positions) == 0
    assert not scene.prefix_index.longest(scene.found.prefixes, [scene.worker.boot])[scene.worker.boot].is_told


async def test_a_length_is_learnt_of_an_answer_that_does_not_say_what_was_cached_and_of_no_other(scene):
    assert await scene.answered(scene.request(), None) is None
    assert len(scene.reader.positions) == 0
    assert await scene.answered(scene.request(), Usage(100, None)) is None
    assert len(scene.reader.positions) == 1 and scene.events.asked == 0


async def test_the_reason_is_found_with_what_the_engine_says_in_the_answer(scene):
    request = scene.request(sent=Prefix(400, 0), sent_here=True, held=400, predicted=400)
    outcome = EngineOutcome("not_worth_it", 64, (40, 60, 95))
    assert await scene.answered(request, Usage(100, 0), outcome) == "not_worth_it"
    assert scene.events.asked == 0
    explanation = request.record.explanation
    assert (explanation.shareable, explanation.predicted, explanation.delivered) == (64, 400, 0)
    assert explanation.positions == (40, 60, 95) and explanation.sent == scene.found.entries()
    assert scene.value("seamark_miss_total", model="m", reason="not_worth_it") == 1
    (short,) = scene.events.short
    assert short[1] == scene.found.prefixes and short[2] == []  # it leaves nothing behind


async def test_a_request_in_which_no_boundaries_are_sought_is_explained_and_counted_too(scene, caplog):
    request = scene.request()
    request.prompt = request.prompt._replace(found=None)  # a completion, say
    await scene.answered(request, Usage(100, 0), EngineOutcome("cold"))
    await scene.idle.caught_up()
    assert request.verdict is not None and request.record is not None and not caplog.records


async def test_what_was_delivered_in_full_is_a_hit_and_no_miss(scene):
    request = scene.request(sent=Prefix(90, 0), sent_here=True, held=80, predicted=80)
    outcome = EngineOutcome("hit", 80, ())
    assert await scene.answered(request, Usage(100, 80), outcome) == "hit"
    assert not scene.events.short and scene.value("seamark_shareable_tokens_total", model="m", worker="w") == 80
    assert not any(name.name == "seamark_miss" and name.samples for name in scene.registry.collect())


async def test_nobody_waits_for_the_reason_of_a_stream(scene):
    request = scene.request(is_stream=True)
    await scene.streamed(request, Usage(100, 0))
    assert scene.idle.waiting == 1 and request.record.explanation.reason is None
    await scene.idle.caught_up()
    await asyncio.sleep(0)
    explanation = request.record.explanation
    assert (explanation.status, scene.events.asked, explanation.reason) == (200, 1, None)
    scene.events.said.set_result(EngineOutcome("cold", 0, (40, 60, 95)))
    await until(lambda: request.record.explanation.reason)
    assert (request.record.explanation.reason, request.record.explanation.positions) == ("cold", (40, 60, 95))
    assert scene.value("seamark_miss_total", model="m", reason="cold") == 1


async def test_a_client_that_leaves_while_a_change_is_sought_leaves_the_whole_explanation(scene):
    request = changed_request(scene)

    async def handle() -> None:
        try:
            await scene.answered(request, Usage(400, 0), EngineOutcome("cold", 0))
        except asyncio.CancelledError:
            assert request.verdict is None
            request.reply.failed(499)
            scene.accounting.count(request)
            raise

    handling = asyncio.create_task(handle())
    await asyncio.sleep(0)  # it has begun
    handling.cancel()
    await asyncio.wait((handling,))
    assert handling.cancelled()
    await until(lambda: request.record.explanation.reason)
    assert (request.record.explanation.status, request.record.explanation.reason) == (499, "prefix_changed")


@pytest.mark.parametrize(("model", "label"), [("m", "m"), ("lora", "lora"), ("other", "unknown"), (["m"], "unknown")])
async def test_a_request_counts_for_its_model_if_any_worker_serves_it(scene_of, model, label):
    scene = await scene_of(RecordingWorker("http://w"), RecordingWorker("http://v", models=("lora",)))
    for worker in (None, *scene.others):
        request = scene.request()
        request.choice = Choice(worker) if worker is not None else None
        request.body.parsed = {**CHAT, "model": model}
        request.reply.failed(503)
        scene.accounting.count(request)
        await scene.idle.caught_up()
        labels = {"model": label, "worker": worker.name if worker is not None else ""}
        counted = scene.value("seamark_requests_total", **labels, endpoint="/v1/chat/completions", code="503")
        assert counted == 1 and request.record.explanation.model == label


@pytest.mark.parametrize(("cached", "is_sought"), [(0, True), (350, True), (351, False), (400, False)])
async def test_a_change_is_sought_where_an_eighth_was_computed(scene, cached, is_sought):
    request = changed_request(scene)
    remembered = request.prompt.remembered
    await scene.answered(request, Usage(400, cached), EngineOutcome("hit", cached))
    assert remembered.prompt == 400 and request.record.explanation.reason is not None
    assert (request.record.explanation.changed is not None) == is_sought
    if is_sought:  # what lies behind what came is lost by it
        assert request.record.explanation.changed["lost"] == pytest.approx(400 - cached, abs=16)


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
    assert request.record.explanation.reason == "prefix_changed" and scene.value("seamark_explanations_shed_total") == 0


async def test_an_explanation_that_fails_costs_no_answer(scene, caplog):
    request = scene.request()
    scene.found = Found((Boundary("turn", b"t", [7]),))  # no entry
    request.prompt = request.prompt._replace(found=scene.found)
    outcome = EngineOutcome("cold", 0, (40,))
    assert await scene.answered(request, Usage(100, 0), outcome) is None
    assert "explaining request r: TypeError" in caplog.text


async def test_a_continued_response_does_not_tell_how_many_tokens_a_byte_has(scene):
    weighed: list[tuple[Any, ...]] = []
    scene.reader.weigh = lambda *what: weighed.append(what)  # type: ignore[method-assign]
    continued = scene.request()
    continued.body.parsed = {**CHAT, "previous_response_id": "resp_1"}
    await scene.answered(continued, Usage(100_000, 0), EngineOutcome("cold"))
    assert weighed == []
    await scene.answered(scene.request(), Usage(100, 0), EngineOutcome("cold"))
    assert weighed == [("m", 400, 100)]


async def test_a_position_behind_the_prompt_is_not_believed(scene):
    hint = scene.found.entries()
    outcome = EngineOutcome("cold", 0, tuple(2**40 for _ in hint))
    await scene.answered(scene.request(), Usage(100, 0), outcome)
    assert hint and all(scene.reader.positions.get(each.key) <= 100 for each in scene.found.boundaries)


RESPONSES, ASKED = "/v1/responses", {"model": "m", "input": "Tide?"}

ANN = ApiKey("ann", KeyEntry(sha256="0" * 64), "salt")


def with_pace(worker: Worker, pass_seconds: float, token_seconds: float) -> None:
    """The worker says how fast its engine is."""
    metrics = worker.probed.metrics._replace(step_times=StepTimes(pass_seconds, token_seconds))
    worker.probed = replace(worker.probed, metrics=metrics)


@pytest.mark.parametrize(
    ("path", "store", "is_stored"),
    [
        (RESPONSES, None, True),
        (RESPONSES, True, True),
        (RESPONSES, "yes", True),
        (RESPONSES, False, False),
        (RESPONSES, "off", False),
        ("/v1/chat/completions", True, False),
    ],
)
async def test_a_response_can_be_asked_for_once_its_answer_begins_if_it_is_stored(scene, path, store, is_stored):
    for begins in (True, False):
        request = scene.request(path=path, body=ASKED if store is None else {**ASKED, "store": store}, key=ANN)
        name, answer = f"resp_{begins}", {"id": f"resp_{begins}", "output": []}
        if begins:
            scene.accounting.opened(request, answer)
        else:
            scene.accounting.reported(request, Report(200), answer)
        assert scene.reader.stored.boot(name, "ann") == (scene.worker.boot if is_stored else None)
        assert scene.reader.stored.boot(name, "bob") is None
    lost = scene.request(path=path, body=ASKED)
    lost.choice = None
    scene.accounting.opened(lost, {"id": "resp_lost"})
    assert scene.reader.stored.boot("resp_lost", None) is None


@pytest.mark.parametrize(
    ("path", "answer", "name"),
    [
        (RESPONSES, {"id": "resp_1"}, "1_0"),
        (RESPONSES, {"id": "other_1"}, "other_1_0"),
        (RESPONSES, {"id": 7}, "r"),
        (RESPONSES, {}, "r"),
        (RESPONSES, None, "r"),
        (RESPONSES, ["id"], "r"),
        ("/v1/chat/completions", {"id": "chatcmpl-1"}, "r"),
    ],
)
async def test_vllm_calls_the_request_of_a_response_after_the_response(scene, path, answer, name):
    request = scene.request(path=path)
    scene.accounting.reported(request, Report(200), answer)
    assert request.report.engine_id == name and request.report.status == 200


@pytest.mark.parametrize(
    ("status", "worker", "expects", "told"),
    [
        (200, True, True, []),
        (399, True, True, []),
        (400, True, True, [("refused", "r")]),
        (503, True, True, [("refused", "r")]),
        (CLIENT_GONE, True, True, [("left", "r")]),
        (400, False, True, []),
        (400, True, False, []),
    ],
)
async def test_what_was_recorded_for_a_request_that_came_to_nothing_is_taken_back(scene, status, worker, expects, told):
    request = scene.request()
    if not worker:
        request.choice = None
    elif not expects:
        request.give(Choice(scene.worker))
    request.reply.failed(status)
    scene.accounting.count(request)
    assert scene.events.ended == told and request.is_over


async def test_a_request_is_counted_once_with_its_key_and_the_time_it_was_read_in(scene):
    request = scene.request(key=ANN)
    request.timings.reading_seconds = 0.25
    request.reply.failed(200)
    scene.accounting.count(request)
    labels = {"model": "m", "worker": "w"}
    counted = {**labels, "endpoint": "/v1/chat/completions", "code": "200"}
    assert scene.value("seamark_requests_total", **counted) == 1 and request.model_label == "m"
    assert scene.value("seamark_seconds_spent_total", **labels) == scene.accounting.time_saved().spent == 0.25
    assert [(each["name"], each["requests"]) for each in scene.accounting.key_usage.as_json()] == [("ann", 1)]
    nowhere = scene.request()
    nowhere.choice, nowhere.timings.reading_seconds = None, 0.25
    nowhere.reply.failed(503)
    scene.accounting.count(nowhere)
    assert scene.value("seamark_requests_total", model="unknown", worker="", code="503") == 0
    assert scene.value("seamark_requests_total", model="m", worker="", code="503") == 1
    assert scene.accounting.time_saved().spent == 0.25 and len(scene.accounting.key_usage.as_json()) == 1


async def test_counting_waits_for_a_lull_and_ends_the_trace(scene):
    request, put_off = scene.request(), Mock()
    scene.idle.put_off, request.trace = put_off, Mock()
    request.reply.failed(404)
    scene.accounting.count(request)
    put_off.assert_called_once()
    request.trace.stop.assert_called_once()
    (told,) = request.trace.end.call_args_list
    assert told.args[:3] == (404, "m", "w") and told.args[4] == request.record.explanation


@pytest.mark.parametrize(
    ("timings", "stages"),
    [
        ({}, []),
        ({"reading_seconds": 0.5}, [("boundaries", 10.0, 10.5)]),
        ({"asked": 11.0, "choosing": 12.0}, [("queue", 11.0, 12.0)]),
        ({"asked": 11.0, "choosing": 11.0}, [("queue", 11.0, 11.0)]),
        ({"asked": 13.0, "choosing": 12.0}, [("queue", 13.0, 99.0)]),  # it still waits, for another worker
        ({"asked": 11.0}, [("queue", 11.0, 99.0)]),
        ({"choosing": 12.0, "leased": 12.5}, [("choice", 12.0, 12.5)]),
        ({"leased": 12.5, "first_byte": 14.0}, [("choice", 0.0, 12.5), ("answer", 12.5, 14.0)]),
        (
            {"choosing": 12.0, "leased": 12.5, "first_byte": 14.0, "is_stream": True},
            [("choice", 12.0, 12.5), ("first token", 12.5, 14.0)],
        ),
    ],
)
async def test_a_trace_has_the_stages_that_a_request_came_to(scene, monkeypatch, timings, stages):
    monkeypatch.setattr(accounting.time, "perf_counter", lambda: 99.0)
    request = scene.request()
    request.choice, request.record, request.trace = None, None, Mock()
    request.timings.arrived = 10.0
    for name, value in timings.items():
        setattr(request.timings, name, value)
    request.reply.failed(503)
    scene.accounting._end_trace(request)
    request.trace.end.assert_called_once_with(503, "unknown", None, stages, None)


async def test_what_is_known_of_a_request_is_told_while_it_is_under_way_and_when_it_is_over(scene):
    request = scene.request(key=ANN)
    request.prompt = request.prompt._replace(rewrites=("rule",))
    early = request.record.explanation
    assert (early.request_id, early.endpoint, early.owner, early.client) == (
        "r",
        "/v1/chat/completions",
        "ann",
        "pilot/1.2",
    )
    assert (early.lookup, early.rewrites) == (scene.found.result, ("rule",)) and early.began == request.record.began
    assert early.boundaries == tuple((each.entry, each.kind) for each in scene.found.boundaries) != ()
    assert (early.status, early.worker, early.model, early.missing, early.reason) == (None,) * 5
    assert early.sent == ()
    request.reply.failed(200)
    request.verdict = Verdict("cold", 100, 0, 64, 16)
    scene.accounting.count(request)
    late = request.record.explanation
    assert (late.status, late.worker, late.model, late.missing) == (200, "w", "m", None)
    assert (late.sent, late.reason, late.prompt, late.shareable) == (scene.found.entries(), "cold", 100, 64)


@pytest.mark.parametrize(
    ("path", "body", "status", "missing"),
    [
        ("/v1/chat/completions", {"model": "m"}, 404, "endpoint"),
        ("/v1/chat/completions", {"model": "nobody's"}, 404, "model"),
        ("/v1/chat/completions", {"model": ""}, 404, "endpoint"),
        ("/v1/responses/resp_1", {}, 404, "response"),
        (RESPONSES, {**ASKED, "previous_response_id": "resp_1"}, 404, "response"),
        ("/v1/chat/completions", {"model": "nobody's"}, 400, None),
    ],
)
async def test_an_answer_404_is_told_with_what_was_not_found(scene, path, body, status, missing):
    request = scene.request(path=path, body=body)
    request.reply.failed(status)
    scene.accounting.count(request)
    assert request.record.explanation.missing == missing


@pytest.mark.parametrize(
    ("model", "has_worker", "status", "label"),
    [
        ("m", False, 503, "m"),
        ("other", True, 200, "m"),
        ("other", True, 399, "m"),
        ("other", True, 400, "unknown"),
        ("other", True, 199, "unknown"),
        ("other", False, 200, "unknown"),
        ("", True, 400, "m"),
        ("", False, 400, "unknown"),
        (None, True, 200, "m"),
    ],
)
async def test_a_name_in_no_list_counts_as_the_model_that_took_it(scene, model, has_worker, status, label):
    request = scene.request(body={"model": model, "messages": []})
    if not has_worker:
        request.choice = None
    request.reply.failed(status)
    scene.accounting.count(request)
    assert request.model_label == label


async def test_a_request_for_no_model_is_counted_as_of_none(scene):
    request = scene.request(path="/v1/responses/resp_1", body={})
    request.reply.failed(200)
    scene.accounting.count(request)
    assert request.model_label == "unknown"


async def test_a_worker_that_is_gone_is_forgotten_with_its_last_request(scene_of):
    scene = await scene_of(RecordingWorker("http://w"), RecordingWorker("http://v"))
    gone, pool = scene.worker, scene.accounting._pool
    with_pace(gone, 0.0, 0.0)
    for worker in (gone, *scene.others):
        request = scene.request()
        request.give(Choice(worker, request.expected))
        request.reply.failed(200)
        scene.accounting.reported(request, Report(200, Usage(100, 60)))
        scene.accounting.count(request)
        await scene.idle.caught_up()

    def counted(name: str) -> float:
        return scene.value("seamark_requests_total", worker=name) + scene.value(
            "seamark_cached_tokens_total", worker=name
        )

    saved = scene.accounting.time_saved()
    assert (counted("w"), counted("v"), saved.waiting) == (61, 61, 120)
    scene.accounting.forget_gone()
    scene.accounting.on_worker(gone, Change.CLEARED)
    pool.workers.remove(gone)
    gone.inflight = 1
    scene.accounting.on_worker(gone, Change.REMOVED)
    scene.accounting.forget_gone()
    assert counted("w") == 61  # its last request still counts
    gone.inflight = 0
    scene.accounting.forget_gone()
    assert (counted("w"), counted("v"), saved.waiting) == (0, 61, 60)
    late = scene.request()  # one that came back in the meantime counts from zero, and anew
    late.reply.failed(200)
    scene.accounting.count(late)
    scene.accounting.reported(late, Report(200, Usage(100, 7)))
    scene.accounting.count(late)
    await scene.idle.caught_up()
    assert counted("w") == 1 + 1 + 7
    pool.workers.append(SimpleNamespace(name="w"))
    scene.accounting.on_worker(gone, Change.REMOVED)
    scene.accounting.forget_gone()
    assert counted("w") == 9  # another one has its name
    pool.workers.pop()
    scene.accounting.forget_gone()
    assert counted("w") == 9  # and the one that is gone is dealt with


async def test_what_is_forgotten_beside_the_requests_is_forgotten_again_and_again(scene, monkeypatch):
    monkeypatch.setattr(accounting, "FORGET_SECONDS", 0.0)
    looked, scene.accounting.forget_gone = Mock(), Mock()
    scene.accounting.forget_gone = looked
    running = asyncio.create_task(scene.accounting.run())
    await until(lambda: looked.call_count > 1)
    running.cancel()


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        (b'{"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 40}}}', 0.5 + 60 * 0.01),
        (b'{"usage": {"prompt_tokens": 100}}', 0.5 + 100 * 0.01),
        (b"{}", None),
        (b"no JSON", None),
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


@pytest.mark.parametrize(
    ("patched", "status", "failure", "is_seen"),
    [(False, 200, 0, True), (True, 200, 0, False), (False, 400, 0, False), (False, 200, 502, False)],
)
async def test_shadow_mode_learns_of_whole_answers_of_workers_without_the_plugin(
    scene_of, patched, status, failure, is_seen
):
    scene = await scene_of(RecordingWorker("http://w", patched=patched))
    seen: list[Any] = []
    scene.accounting._shadow.add = seen.append
    request = scene.request(key=ANN, is_stream=True)
    request.timings.leased, request.timings.first_byte, request.timings.was_alone = 10.0, 12.5, True
    if failure:
        request.reply.failed(failure)
    scene.accounting.reported(request, Report(status, Usage(100, 16)))
    scene.accounting.count(request)
    await scene.idle.caught_up()
    assert len(seen) == is_seen
    for one in seen:
        assert (one.worker, one.boot, one.model, one.owner) == (scene.worker, scene.worker.boot, "m", "ann")
        assert (one.size, one.prompt, one.cached, one.seconds, one.alone) == (400, 100, 16, 2.5, True)
        assert one.chat is request.prompt.chat and one.record is request.record


@pytest.mark.parametrize(
    ("path", "is_stream", "first_byte", "seconds"),
    [
        ("/v1/chat/completions", True, 12.5, 2.5),
        ("/v1/chat/completions", False, 12.5, None),
        ("/v1/chat/completions", True, None, None),
        (RESPONSES, True, 12.5, None),
    ],
)
async def test_only_a_stream_whose_first_event_is_a_token_tells_when_that_came(
    scene_of, path, is_stream, first_byte, seconds
):
    scene = await scene_of(RecordingWorker("http://w", patched=False))
    seen: list[Any] = []
    scene.accounting._shadow.add = seen.append
    request = scene.request(path=path, is_stream=is_stream)
    request.timings.leased, request.timings.first_byte = 10.0, first_byte
    await scene.answered(request, None)
    assert [(one.seconds, one.prompt, one.cached) for one in seen] == [(seconds, None, None)]


async def test_an_engine_is_asked_of_a_stream_only(scene):
    scene.events.said.set_result(None)
    whole, stream = scene.request(), scene.request(is_stream=True)
    await scene.answered(whole, Usage(100, 0))
    assert not scene.events.asked and whole.verdict is not None
    await scene.streamed(stream, Usage(100, 0))
    await scene.idle.caught_up()
    await stream.explaining
    assert scene.events.asked == 1 and stream.verdict is not None


async def test_without_the_plugin_no_engine_is_asked(scene_of):
    scene = await scene_of(RecordingWorker("http://w", patched=False))
    await scene.streamed(scene.request(is_stream=True), Usage(100, 0))
    await scene.idle.caught_up()
    assert scene.events.asked == 0


async def test_an_engine_that_cannot_be_asked_leaves_the_gateways_own_reason(scene, caplog):
    scene.events.said.set_exception(KeyError("You pilot ships."))
    request = scene.request(is_stream=True)
    await scene.streamed(request, Usage(100, 0))
    await scene.idle.caught_up()
    await request.explaining
    assert request.verdict is not None and request.verdict.reason == "cold"
    assert "asking for request r: KeyError" in caplog.text and "pilot" not in caplog.text


@pytest.mark.parametrize(("prompt", "learnt"), [(4, 0), (5, 0), (6, 1), (7, 2)])
async def test_a_turn_ends_before_the_words_behind_it_or_nothing_is_learnt(scene, prompt, learnt):
    await scene.answered(scene.request(), Usage(prompt, 0), EngineOutcome("cold"))
    assert scene.reader.positions.get(scene.found.turn_key) == learnt


async def test_positions_that_an_engine_tells_are_learnt_up_to_the_prompts_end(scene):
    hint = scene.found.entries()
    keys = [each.key for each in scene.found.boundaries]
    assert len(hint) == len(keys) == 3
    scene.prefix_index.record(scene.found.boundaries, scene.worker.boot, hint)
    scene.found = scene.found._replace(end=None)
    request = scene.request()
    await scene.answered(request, Usage(100, 0), EngineOutcome("cold", 0, (1, 101, 100)))
    assert [scene.reader.positions.get(key) for key in keys] == [1, 0, 100]
    held = scene.prefix_index.longest(scene.found.prefixes, [scene.worker.boot])[scene.worker.boot]
    assert (held.tokens, held.is_told) == (100, True)


@pytest.mark.parametrize(
    ("cached", "engine", "expects_more", "left"),
    [
        (0, "evicted", True, "all"),
        (79, "evicted", True, "all"),
        (80, "evicted", True, None),
        (0, "not_worth_it", True, "none"),
        (0, "hint_ignored", True, None),
        (0, "evicted", False, None),
    ],
)
async def test_an_index_that_promised_too_much_is_told(scene, cached, engine, expects_more, left):
    known = {"sent": Prefix(90, 0), "sent_here": True, "held": 80, "predicted": 80 if expects_more else 0}
    await scene.answered(scene.request(**known), Usage(100, cached), EngineOutcome(engine, 64, (40, 60, 95)))
    keys = [each.key for each in scene.found.boundaries] if left == "all" else []
    assert scene.events.short == ([] if left is None else [(scene.worker, scene.found.prefixes, keys, cached)])


@pytest.mark.parametrize(("cached", "label"), [(0, "miss"), (16, "partial"), (80, "hit")])
async def test_first_tokens_are_timed_by_what_came_from_the_cache(scene, cached, label):
    request = scene.request(sent=Prefix(90, 0), sent_here=True, held=80, predicted=80)
    request.timings.arrived, request.timings.first_byte = 10.0, 12.5
    await scene.answered(request, Usage(100, cached), EngineOutcome("hit", 80))
    assert scene.value("seamark_first_token_seconds_sum", cache=label, model="m") == 2.5
    assert scene.value("seamark_first_token_seconds_count") == 1
    await scene.answered(scene.request(), Usage(100, cached), EngineOutcome("hit", 80))
    assert scene.value("seamark_first_token_seconds_count") == 1  # of one that has no first byte nothing is known


async def test_sums_of_the_hour_have_what_was_shared_and_what_a_change_cost(scene):
    await scene.answered(scene.request(sent=Prefix(90, 0), sent_here=True, held=80, predicted=80), Usage(100, 16))
    request = changed_request(scene)
    await scene.answered(request, Usage(400, 0), EngineOutcome("cold", 0))
    sums = scene.accounting.sums.since_start()
    assert (sums.requests, sums.prompt, sums.delivered, sums.came) == (2, 500, 16, 16)
    assert sums.shareable == 80 and sums.changed == request.record.explanation.changed["lost"] > 0


async def test_a_prompt_that_its_engine_renders_otherwise_is_told_as_changed(scene, monkeypatch):
    """The gateway has sent it all before, and its engine says that it shares less."""
    sought: list[tuple[Any, ...]] = []

    def rendered_otherwise(remembered: Any, shared: int) -> Any:
        sought.append((remembered, shared))
        yield
        return None

    monkeypatch.setattr(scene.reader.recent, "rendered_otherwise", rendered_otherwise)
    for sent_here, outcome in (
        (True, EngineOutcome("cold", 16)),
        (False, EngineOutcome("cold", 16)),
        (True, EngineOutcome("cold", None)),
    ):
        request = scene.request(sent=Prefix(90, 0), sent_here=sent_here)
        layout = layout_of(request.prompt.chat, b"renderer")
        request.prompt = request.prompt._replace(remembered=RememberedRequest(layout, 1000))
        await scene.answered(request, Usage(100, 0), outcome)
    ((remembered, shared),) = sought
    assert shared == 16 and remembered.prompt == 100
