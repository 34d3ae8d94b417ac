"""What is said of a request: its reason, its client, its spans, what its prompt cost, and what a plugin would save."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.reader import chat_request
from proxy.fleet.worker import Worker
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.observability import shadow as shadow_module
from proxy.observability import tracing
from proxy.observability.explanations import MAX_CHARACTERS, Explanation, Explanations, client_name
from proxy.observability.prefill_cost import RENEWAL, CostLearner
from proxy.observability.reasons import ENGINE_CAUSES, REASON_TEXT, Expectation, reason_for
from proxy.observability.request_diff import PrefixChange, RequestMemory
from proxy.observability.shadow import MAX_WAITING, AnsweredRequest, ReadPrompt, Shadow
from proxy.observability.totals import Totals
from proxy.observability.tracing import RequestTrace, Tracing
from proxy.routing.prefix_index import Prefix
from proxy.settings import Settings
from tests.harness.probed import probed
from tests.harness.virtual_time import on_virtual_time
from tests.harness.waiting import until

UNIT = 16

SENT = Prefix(400, 0)  # the deepest beginning that a worker was sent before; its length was told

CHANGE = PrefixChange("message", 0, "system", 40, None, 0, 500)


def expect(**changes: Any) -> Expectation:
    """Of a prompt that its worker was sent before and holds."""
    known = {"failure": None, "sent": SENT, "sent_here": True, "ever_sent": SENT, "held": 400, "predicted": 400}
    return Expectation(**{**known, "match_unit": UNIT, **changes})


NEW = {"sent": None, "sent_here": False, "ever_sent": None, "held": 0, "predicted": 0}

RESTARTED = {"sent": None, "sent_here": False, "held": 0, "predicted": 0}


@pytest.mark.parametrize(
    ("expected", "delivered", "change", "reason"),
    [
        (expect(), {"cached": 400}, None, "hit"),
        (expect(**NEW), {"cached": 160, "shared": 160}, None, "hit"),
        (expect(), {"cached": 400, "unchanged": 528}, CHANGE, "hit"),  # less than a quarter
        (expect(), {"cached": 400, "unchanged": 544}, CHANGE, "prefix_changed"),
        (expect(), {"cached": 400, "unchanged": 900}, CHANGE._replace(lost=40), "hit"),  # the rest, by a restart
        (expect(**NEW), {"cached": 128, "shared": 140, "unchanged": 409}, CHANGE, "prefix_changed"),
        (expect(**NEW), {"cached": 0, "shared": 0, "engine": "cold"}, None, "cold"),
        (expect(sent=Prefix(0, 400), held=0, predicted=0), {"cached": 0, "shared": 0}, None, "cold"),
        (expect(**NEW), {"cached": 0, "unchanged": 160}, CHANGE, "prefix_changed"),
        (
            expect(),
            {"cached": 0, "unchanged": 900, "shared": 0},
            CHANGE._replace(what="setting", role="cache_salt"),
            "salt",
        ),
        (expect(), {"cached": 0, "unchanged": 480}, CHANGE, "evicted"),  # that cost less than what was evicted
        (expect(), {"cached": 0, "unchanged": 480, "engine": "cold"}, CHANGE, "prefix_changed"),  # no state was wanted
        (expect(**NEW), {"cached": 0, "deepest": 15}, None, "below_unit"),
        (expect(**{**RESTARTED, "ever_sent": Prefix(15, 0)}), {"cached": 0}, None, "below_unit"),
        (expect(), {"cached": 0, "prompt": 16}, None, "below_unit"),  # its last token is always computed
        (expect(), {"cached": 0, "engine": "evicted"}, None, "evicted"),
        (expect(), {"cached": 0, "engine": "not_worth_it"}, None, "not_worth_it"),
        (expect(), {"cached": 0, "engine": "below_unit"}, None, "below_unit"),
        (expect(), {"cached": 0, "engine": "cold"}, None, "cold"),  # nobody had asked for it by a boundary
        # Nobody had gone on so far like an earlier one.
        (expect(**NEW), {"cached": 400, "shared": 528, "engine": "between_states"}, None, "hit"),
        (expect(**NEW), {"cached": 400, "shared": 544, "engine": "between_states"}, None, "between_states"),
        (expect(**NEW), {"cached": 400, "shared": 528, "unchanged": 528, "engine": "between_states"}, CHANGE, "hit"),
        (
            expect(**NEW),
            {"cached": 400, "shared": 528, "unchanged": 544, "engine": "between_states"},
            CHANGE,
            "prefix_changed",
        ),
        (expect(**NEW), {"cached": 0, "engine": "hint_ignored"}, None, "hint_ignored"),
        (expect(**NEW), {"cached": 0, "shared": 192, "engine": "no_boundary"}, None, "no_boundary"),
        (expect(**NEW), {"cached": 192, "shared": 240, "engine": "hit"}, None, "hit"),  # states lie on multiples of 64
        (expect(**NEW), {"cached": 0, "shared": 192, "engine": "evicted"}, None, "evicted"),  # it had learnt it
        (expect(), {"cached": 0, "engine": "a word of a later version"}, None, "evicted"),
        (expect(), {"cached": 160, "shared": 400, "engine": "hit"}, None, "evicted"),
        (expect(held=0, predicted=0), {"cached": 0, "shared": 0}, None, "evicted"),  # it has forgotten all of it
        (expect(sent_here=False, predicted=0), {"cached": 0, "shared": 0}, None, "other_worker"),
        (expect(predicted=0), {"cached": 0, "shared": 0}, None, "other_worker"),  # though this one has lost it as well
        (expect(**RESTARTED), {"cached": 0}, None, "worker_restarted"),
        (expect(failure="unpatched"), {"cached": 400}, None, "unpatched"),
        (expect(failure="hint_ignored"), {"cached": 400}, None, "hint_ignored"),
        (expect(failure="no_boundary"), {"cached": 0}, None, "no_boundary"),
        (expect(failure="no_facts"), {"cached": 0}, None, "no_facts"),
        (expect(failure="not_kept"), {"cached": 0}, None, "not_kept"),
        (expect(failure="not_kept"), {"cached": 160}, None, "hit"),
    ],
)
def test_the_reason_is_what_cost_most(expected, delivered, change, reason):
    told = {"prompt": 1000, "shared": None, "deepest": 1000, "engine": "", "unchanged": 0, **delivered}
    if change is not None:
        change = change._replace(token=told["unchanged"] - change.lost)
    shareable = expected.shareable(told["prompt"], told["shared"])
    given = told["prompt"], told["cached"], shareable, told["deepest"], told["engine"]
    assert reason_for(expected, *given, change) == reason
    assert reason in REASON_TEXT


def test_every_reason_has_a_case_above():
    (mark,) = test_the_reason_is_what_cost_most.pytestmark
    assert {case[-1] for case in mark.args[1]} == REASON_TEXT.keys() >= ENGINE_CAUSES


def test_beside_a_draft_head_a_hit_is_what_the_engine_can_deliver():
    for boundary, cached, reason in ((163, 144, "hit"), (163, 0, "evicted"), (31, 0, "below_unit")):
        sent = Prefix(boundary, 0)
        expected = expect(sent=sent, ever_sent=sent, held=cached, predicted=cached, ahead=16)
        shareable = expected.shareable(400, boundary // UNIT * UNIT)
        assert reason_for(expected, 400, cached, shareable, 400) == reason
        assert shareable == expected.deliverable(boundary)


def test_the_last_requests_are_explained_the_newest_first():
    explanations = Explanations(most=3)
    for number in (0, 1, 2, 3, 4, 3):
        explanations.begin(Explanation(f"r{number}", "/"))
    assert [each.request_id for each in explanations.newest(2)] == ["r3", "r4"]
    assert explanations.get("r1") is None and explanations.get("r2") is not None


def test_a_name_that_two_clients_gave_is_two_requests():
    explanations = Explanations()
    for owner, endpoint in (("ann", "/v1/messages"), ("bob", "/v1/responses"), (None, "/v1/completions")):
        explanations.begin(Explanation("same", endpoint, owner))
    assert [explanations.get("same", owner).endpoint for owner in ("ann", "bob")] == ["/v1/messages", "/v1/responses"]
    assert explanations.get("same", "cid") is None
    assert explanations.of_anyone("same").endpoint == "/v1/completions"
    assert explanations.of_anyone("another") is None


def test_the_first_product_names_a_client():
    assert client_name(b"claude-cli/2.0.1 (external, cli)") == "claude-cli/2.0.1"
    browser = b"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML) Chrome/120.0 Safari/537"
    assert client_name(browser) == "Chrome/120" and client_name(b"a" * 500) == "a" * MAX_CHARACTERS
    assert client_name(b"<script>") is None


PATH = "/v1/chat/completions"


class Scene(SpanExporter):
    """In place of a collector, which keeps spans, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failure: SpanExportResult | Exception | None = None
        self.taken: list[ReadableSpan] = []
        self.metrics = Metrics()
        monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
        monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda endpoint, **_: self)
        self.tracing = Tracing("http://collector/v1/traces", self.metrics)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if isinstance(self.failure, Exception):
            raise self.failure
        if self.failure is None:
            self.taken += spans
        return self.failure or SpanExportResult.SUCCESS

    async def spans(self) -> list[ReadableSpan]:
        await self.tracing.aclose()
        return self.taken

    def counted(self) -> list[float | None]:
        value = self.metrics.registry.get_sample_value
        return [value("seamark_spans_total", {"result": result}) for result in ("lost", "exported")]

    def begin(self, headers: Sequence[tuple[bytes, bytes]] = ()) -> RequestTrace:
        return self.tracing.begin("POST", PATH, [*headers])


@pytest.fixture
def scene(monkeypatch) -> Scene:
    return Scene(monkeypatch)


async def test_a_request_without_a_context_begins_a_trace_and_one_that_is_not_sampled_is_none(scene):
    scene.begin().end(200, "m", None, (), None)
    unsampled = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
    scene.begin([(b"traceparent", unsampled)]).end(200, "m", None, [("queue", 1.0, 2.0)], None)
    (span,) = await scene.spans()
    assert span.parent is None


async def test_what_is_known_of_a_request_is_told_and_what_is_not_is_left_out(scene):
    known = Explanation("r", PATH, prompt=400, delivered=320, reason="hit", shareable=336, predicted=0)
    for status, explanation in ((200, None), (499, known), (0, Explanation("t", "/v1/responses")), (500, None)):
        scene.begin().end(status, "m", "w:1", (), explanation)
    ended = await scene.spans()
    bare, full, unknown, _ = ({**span.attributes} for span in ended)
    told = {"request_id": "r", "reason": "hit", "shareable_tokens": 336, "predicted_tokens": 0}
    usage = {"gen_ai.usage.input_tokens": 400, "gen_ai.usage.cache_read.input_tokens": 320}
    told = {f"seamark.{name}": value for name, value in told.items()} | {"http.response.status_code": 499}
    assert full == {**bare, **usage, **told, "gen_ai.operation.name": "chat"}
    codes = [span.status.status_code for span in ended]
    assert codes == [StatusCode.UNSET] * 3 + [StatusCode.ERROR], "a client that leaves is no failure of the gateway"
    assert unknown.keys() == bare.keys() - {"http.response.status_code"} | {"seamark.request_id"}


async def test_its_stages_lie_inside_it_and_are_as_long_as_they_took(scene):
    trace, began = scene.begin(), time.perf_counter()
    trace.end(200, "m", "w:1", [("queue", began, began + 0.25), ("choice", began + 0.25, began + 1.0)], None)
    queue, choice, whole = await scene.spans()
    assert [queue.name, choice.name, whole.name] == ["queue", "choice", f"POST {PATH}"]
    assert {each.parent.span_id for each in (queue, choice)} == {whole.context.span_id}
    assert queue.end_time - queue.start_time == pytest.approx(0.25e9, abs=1e3)
    assert choice.start_time == pytest.approx(queue.end_time, abs=1e3)
    assert abs(queue.start_time - whole.start_time) < 300e9  # on one clock: the other one began when the machine did


@pytest.mark.parametrize("failure", [SpanExportResult.FAILURE, OSError("http://user:password@collector")])
async def test_spans_that_are_not_taken_are_counted_as_lost_and_that_is_said_when_it_changes(scene, failure, caplog):
    caplog.set_level("INFO", "seamark.tracing")

    for fails, counted in ((failure, [3, None]), (None, [3, 3])):
        scene.failure = fails
        for spans in (2, 1):
            for _ in range(spans):
                scene.begin().end(200, "m", None, (), None)
            scene.tracing._provider.force_flush()
            assert len(caplog.records) == 1, "that is said once"
        assert scene.counted() == counted and "password" not in caplog.text
        caplog.clear()


def test_what_the_exporter_logs_of_a_failure_is_not_shown():  # in which the collector's password may stand
    assert not logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").isEnabledFor(logging.ERROR)


class Shadowed:
    """A worker without the plugin, whose answers to prompts of 400 tokens with one head do not say what was cached."""

    def __init__(self, *finds: Found | Exception) -> None:
        self.worker = Worker("http://w", None, probed=replace(probed("w#1", None, "m", hits=0), hits_before=0))
        self.metrics = Metrics()
        self.finds = list(finds)  # in place of the head
        self.shadow = Shadow(Settings(), self._find, RequestMemory(0), self.metrics, IdleWork(), lambda: ["w#1"])

    async def _find(self, *given: Any) -> ReadPrompt:
        head = Found((Boundary("system", b"s", "first:1", tokens=320),), (b"s",))
        found = self.finds.pop(0) if self.finds else head
        if isinstance(found, Exception):
            raise found
        return ReadPrompt(found)

    def add(self, **fields: Any) -> None:
        """A request of 400 tokens, of which the answer says that none was cached; it has just been answered."""
        chat = chat_request({"model": "m", "messages": [{"role": "user", "content": "Tide?"}]})
        given = dict(
            chat=chat, worker=self.worker, boot="w#1", model="m", size=100, memory=100, prompt=400, cached=0,
            seconds=None, alone=False, owner=None, record=None, at=time.perf_counter(),
        )  # fmt: skip
        self.shadow.add(AnsweredRequest(**{**given, **fields}))

    async def judge(self, *hits_then: int) -> list[int]:
        """For each request, what it lost for want of the plugin; the worker has counted so many hits at its probe."""
        lost = []
        for hits in hits_then:
            before, now = self.worker.probed.hits_before, time.perf_counter()
            self.worker.learn(replace(probed("w#1", None, "m", hits=hits), at=now + 1, hits_before=before))
            self.add(cached=None, at=now)
            lost.append(await self.loss())
        return lost

    async def loss(self) -> int:
        before = self.shadow.would_save()["tokens"]
        running = asyncio.create_task(self.shadow.run())
        await until(lambda: not self.shadow.held, pause=0)
        running.cancel()
        return self.shadow.would_save()["tokens"] - before

    @property
    def counted(self) -> dict[str, int]:
        return self.shadow.status()["requests"]


@pytest.fixture
def shadowed() -> Shadowed:
    return Shadowed()


async def test_what_a_request_can_have_hit_of_the_workers_new_hits_is_its_own():
    assert await Shadowed().judge(0, 0, 160, 480) == [0, 320, 160, 0]
    # Those of nobody known are no later requests'.
    assert await Shadowed().judge(0, 1000, 1000, 1160, 1160) == [0, 0, 320, 160, 320]


async def test_what_was_lost_is_told_beside_what_was_computed_in_seconds_once_the_cost_is_known(shadowed):
    """Prompts of 400 tokens and more, a millisecond each, with a tenth of a second for whatever they hold."""

    def answer(prompt: int) -> Explanation:
        record = Explanation("r", "/v1/chat/completions")
        shadowed.add(prompt=prompt, seconds=0.1 + 0.001 * prompt, alone=True, record=record)
        return record

    records = []
    for prompt in (400, 500):
        records.append(answer(prompt))
        await shadowed.loss()
    first, second = records
    told = shadowed.shadow.would_save()
    assert told == {"tokens": 320, "seconds": 0.0, "computed_tokens": 900, "prefill_seconds": 0.0}
    assert (first.prompt, first.delivered, first.lost) == (400, 0, {})
    assert (second.prompt, second.delivered, second.lost) == (500, 0, {"unpatched": 320})
    assert shadowed.shadow.sums.whole == Totals(2, 900, 320, 0, 0)
    for prompt in range(600, 1200, 100):
        answer(prompt)
    await shadowed.loss()
    told = shadowed.shadow.would_save()
    assert (told["tokens"], told["computed_tokens"]) == (7 * 320, 6000)
    assert told["seconds"] == pytest.approx(2.24) and told["prefill_seconds"] == pytest.approx(6.8)


async def test_a_request_that_cannot_be_judged_is_counted_by_the_reason_and_the_next_one_is_judged(caplog):
    shadowed = Shadowed(RuntimeError("planned"), Found((), failure="RenderFailed"), Found((), failure="no_boundary"))
    await shadowed.judge(0, 0, 0, 0)
    assert shadowed.counted == {"failed": 1, "RenderFailed": 1, "no_boundary": 1, "judged": 1}
    assert "planned" not in caplog.text and shadowed.shadow.would_save()["computed_tokens"] == 400


async def test_what_is_no_chat_is_not_judged_and_its_hits_are_its_own(shadowed):
    await shadowed.judge(0)
    shadowed.add(chat=None, cached=320)
    shadowed.add(chat=None, cached=None)
    assert (shadowed.shadow.held, shadowed.counted) == (0, {"judged": 1})
    assert await shadowed.judge(320) == [320]  # the hits were those of the other one


@pytest.mark.parametrize("missing", ["prompt", "cached", "seconds"])
async def test_an_answer_that_lacks_one_of_its_figures_teaches_nothing_of_the_cost(shadowed, missing):
    for _ in range(200):
        shadowed.add(**{"seconds": 1.0, "alone": True, "cached": 0, missing: None})
    await shadowed.judge(*[0] * 200)
    assert shadowed.shadow.would_save()["seconds"] == 0.0


async def test_requests_wait_within_bounds_of_memory_and_number_and_those_beyond_are_counted(shadowed):
    room = Settings().text_bytes // 8
    shadowed.add(memory=room - 100)
    shadowed.add(memory=100)
    assert (shadowed.shadow.held, shadowed.shadow.status()["waiting"]) == (room, 2)
    shadowed.add(memory=1)
    assert (shadowed.shadow.held, shadowed.counted) == (room, {"no_room": 1})
    await shadowed.loss()
    assert (shadowed.shadow.held, shadowed.shadow.judged) == (0, 2)
    for _ in range(MAX_WAITING + 2):
        shadowed.add(memory=1)
    assert (shadowed.shadow.held, shadowed.shadow.status()["waiting"]) == (MAX_WAITING, MAX_WAITING)
    assert shadowed.counted["no_room"] == 3


@on_virtual_time
async def test_a_worker_that_does_not_count_its_hits_is_waited_for_three_health_checks_long() -> None:
    shadowed = Shadowed()
    patience = 3 * Settings().health_interval
    with pytest.MonkeyPatch.context() as patched:
        loop = asyncio.get_running_loop()
        patched.setattr(shadow_module, "time", SimpleNamespace(perf_counter=loop.time, monotonic=loop.time))
        running = asyncio.create_task(shadowed.shadow.run())
        for seconds, counts, result in ((patience - 0.5, 0.1, "judged"), (patience, 0.0, "no_usage")):
            began = loop.time()
            shadowed.worker.learn(replace(shadowed.worker.probed, at=began))  # before it was answered
            shadowed.add(cached=None, at=began)
            await asyncio.sleep(seconds)
            assert result not in shadowed.counted
            shadowed.worker.learn(replace(shadowed.worker.probed, at=began + counts))
            await asyncio.sleep(1.0)
            assert shadowed.counted[result] == 1 and not shadowed.shadow.held
        running.cancel()


@pytest.mark.parametrize("known", [{"boot": "w#2"}, {"hits": None}])
async def test_hits_of_another_boot_or_of_a_worker_that_counts_none_any_more_are_nobodys(shadowed, known):
    shadowed.add(cached=None)
    later = {"boot": "w#1", "hits": 0, **known}
    shadowed.worker.learn(replace(probed(later["boot"], None, "m", hits=later["hits"]), at=time.perf_counter()))
    await shadowed.loss()
    assert shadowed.counted == {"no_usage": 1} and shadowed.shadow.status()["cached_not_told"] == 0


def learnt(*lengths: int, floor: float = 0.5, token: float = 0.001) -> CostLearner:
    """Prompts of so many tokens, which cost a floor and the same for each token."""
    pace = CostLearner()
    for tokens in lengths:
        pace.observe(tokens, 0, floor + token * tokens, alone=True)
    return pace


def test_a_pace_below_nothing_is_none_and_so_is_a_floor():
    assert learnt(*range(100, 1100, 100), floor=5.0, token=-0.001).model is None
    assert learnt(*range(100, 1100, 100), token=0.0).model is None
    model = learnt(*range(1000, 11000, 1000), floor=-0.5).model
    assert model is not None and (model.floor_seconds, model.token_seconds) == (0.0, pytest.approx(0.001))


def test_what_was_cached_in_full_or_took_no_time_tells_nothing():
    pace = learnt(*range(100, 600, 100))
    for _ in range(10):
        pace.observe(100, 100, 1.0, alone=True)
        pace.observe(100, 0, 0.0, alone=True)
    assert pace.model is None
    pace.observe(600, 0, 1.1, alone=True)
    assert pace.model is not None and pace.model.requests == 6


def test_requests_that_were_alone_count_before_those_among_others():
    pace = learnt(*range(100, 600, 100))
    for tokens in range(100, 1100, 100):
        pace.observe(tokens, 0, 3.0 + 0.002 * tokens, alone=False)
    assert pace.model is not None and (pace.model.alone, pace.model.requests) == (False, 15)
    pace.observe(600, 0, 1.1, alone=True)
    for _ in range(RENEWAL):
        pace.observe(1000, 0, 5.0, alone=False)
    model = pace.model
    assert (model.alone, model.requests, model.token_seconds) == (True, 6, pytest.approx(0.001))
