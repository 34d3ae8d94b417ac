"""The step after an answer: what is learnt from its usage, and the reason that is found for what came."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.layout import layout_of
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.template_facts import Opener, TemplateFacts, Turn
from proxy.chat.reader import chat_request
from proxy.chat.usage import Usage
from proxy.fleet.worker import Worker
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


class Events:
    """Engine events that say what they are told to, once they are."""

    def __init__(self) -> None:
        self.said: asyncio.Future[EngineOutcome | None] = asyncio.get_running_loop().create_future()
        self.asked = 0
        self.short: list[tuple[Any, ...]] = []

    async def outcome_of(self, worker: Worker, request_id: str, *, urgent: bool) -> EngineOutcome | None:
        self.asked += 1
        return await self.said

    def fell_short(self, *what: Any) -> None:
        self.short.append(what)

    def left(self, worker: Worker, request_id: str) -> None:
        """The client of a request has left."""


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
        self, *, is_stream: bool = False, hint: tuple[Any, ...] | None = None, **expected: Any
    ) -> ProxiedRequest:
        scope = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
        request = request_of(scope, b"x" * 400, "r")
        request.body.parsed = CHAT
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


@pytest.fixture
async def older(scene_of) -> Scene:
    """Whose engine says nothing in its answers."""
    return await scene_of(RecordingWorker("http://w", version="0.2.0"))


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


async def test_a_whole_answer_waits_for_an_older_engine_if_the_gateway_cannot_tell(older):
    older.events.said.set_result(EngineOutcome("not_worth_it"))
    sent = {"sent": Prefix(90, 0), "sent_here": True, "held": 80, "predicted": 80}
    hint = {"hint": (40,)}
    assert await older.answered(older.request(**sent, **hint), Usage(100, 0)) == "not_worth_it"
    assert await older.answered(older.request(**sent, **hint), Usage(100, 80)) == "hit"
    assert await older.answered(older.request(**sent, hint=()), Usage(100, 0)) == "evicted"
    assert older.events.asked == 1


async def test_a_client_that_leaves_meanwhile_leaves_the_request_counted(older):
    request = older.request(hint=(40,))
    answering = asyncio.create_task(older.answered(request, Usage(100, 0)))
    while not older.events.asked:
        await asyncio.sleep(0)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    older.events.said.set_result(EngineOutcome("cold"))
    await until(lambda: request.record.explanation.reason)
    assert older.value("seamark_miss_total", model="m", reason="cold") == 1


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
