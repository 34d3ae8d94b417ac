"""What is said of a request while it is under way and afterwards: its reason, its client, its spans."""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from proxy.metrics import Metrics
from proxy.observability import tracing
from proxy.observability.client_name import MAX_CHARACTERS, client_name
from proxy.observability.explanations import Explanation, Explanations, Record
from proxy.observability.exposition import merged
from proxy.observability.reasons import (
    ENGINE_CAUSES,
    REASON_TEXT,
    Delivery,
    Expectation,
    reason_for,
)
from proxy.observability.request_diff import PrefixChange
from proxy.observability.tracing import RequestTrace, Tracing
from proxy.routing.prefix_index import Prefix

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
        # All of it came.
        (expect(), {"cached": 400}, None, "hit"),
        (expect(**NEW), {"cached": 160, "shared": 160}, None, "hit"),
        (expect(), {"cached": 400, "unchanged": 900}, CHANGE, "hit"),
        # Nobody began like it.
        (expect(**NEW), {"cached": 0, "shared": 0, "engine": "cold"}, None, "cold"),
        (expect(sent=Prefix(0, 400), held=0, predicted=0), {"cached": 0, "shared": 0}, None, "cold"),
        # Its head has changed.
        (expect(**NEW), {"cached": 0, "unchanged": 160}, CHANGE, "prefix_changed"),
        (
            expect(),
            {"cached": 0, "unchanged": 900, "shared": 0},
            CHANGE._replace(what="setting", role="cache_salt"),
            "salt",
        ),
        (expect(), {"cached": 0, "unchanged": 480}, CHANGE, "evicted"),  # that cost less than what was evicted
        (expect(), {"cached": 0, "unchanged": 480, "engine": "cold"}, CHANGE, "prefix_changed"),  # no state was wanted
        # Too short.
        (expect(**NEW), {"cached": 0, "deepest": 15}, None, "below_unit"),
        (expect(**{**RESTARTED, "ever_sent": Prefix(15, 0)}), {"cached": 0}, None, "below_unit"),
        (expect(), {"cached": 0, "prompt": 16}, None, "below_unit"),  # its last token is always computed
        # The worker knows why.
        (expect(), {"cached": 0, "engine": "evicted"}, None, "evicted"),
        (expect(), {"cached": 0, "engine": "not_worth_it"}, None, "not_worth_it"),
        (expect(), {"cached": 0, "engine": "below_unit"}, None, "below_unit"),
        (expect(), {"cached": 0, "engine": "cold"}, None, "cold"),  # nobody had asked for it by a boundary
        (expect(**NEW), {"cached": 0, "engine": "hint_ignored"}, None, "hint_ignored"),
        (expect(**NEW), {"cached": 0, "shared": 192, "engine": "no_boundary"}, None, "no_boundary"),
        (expect(**NEW), {"cached": 192, "shared": 240, "engine": "hit"}, None, "hit"),  # states lie on multiples of 64
        (expect(**NEW), {"cached": 0, "shared": 192, "engine": "evicted"}, None, "evicted"),  # it had learnt it
        (expect(), {"cached": 0, "engine": "a word of a later version"}, None, "evicted"),
        (expect(), {"cached": 160, "shared": 400, "engine": "hit"}, None, "evicted"),
        (expect(held=0, predicted=0), {"cached": 0, "shared": 0}, None, "evicted"),  # it has forgotten all of it
        # Another worker, another boot.
        (expect(sent_here=False, predicted=0), {"cached": 0, "shared": 0}, None, "other_worker"),
        (expect(**RESTARTED), {"cached": 0}, None, "worker_restarted"),
        # No hint.
        (expect(failure="unpatched"), {"cached": 400}, None, "unpatched"),
        (expect(failure="hint_ignored"), {"cached": 400}, None, "hint_ignored"),
        (expect(failure="no_boundary"), {"cached": 0}, None, "no_boundary"),
        (expect(failure="no_facts"), {"cached": 0}, None, "no_facts"),
    ],
)
def test_the_reason_is_what_cost_most(expected, delivered, change, reason):
    delivery = Delivery.of(expected, delivered.pop("prompt", 1000), **delivered)
    assert reason_for(expected, delivery, change) == reason
    assert reason in REASON_TEXT


def test_every_reason_has_a_case_above():
    (mark,) = test_the_reason_is_what_cost_most.pytestmark
    assert {case[-1] for case in mark.args[1]} == REASON_TEXT.keys() >= ENGINE_CAUSES


@pytest.mark.parametrize(
    ("boundary", "cached", "reason"),
    [(163, 144, "hit"), (163, 0, "evicted"), (31, 0, "below_unit")],
)
def test_beside_a_draft_head_a_hit_is_what_the_engine_can_deliver(boundary, cached, reason):
    sent = Prefix(boundary, 0)
    expected = expect(sent=sent, ever_sent=sent, held=cached, predicted=cached, ahead=16)
    delivery = Delivery.of(expected, 400, cached, shared=boundary // UNIT * UNIT)
    assert reason_for(expected, delivery) == reason and delivery.shareable == expected.deliverable(boundary)


def test_a_request_is_explained_as_it_stands_until_it_is_settled_and_holds_nothing_afterwards():
    class Request:
        status: int | None = None

    request = Request()
    gone = weakref.ref(request)
    record = Record(lambda record, request=request: Explanation("r", "/", status=request.status, began=record.began))
    assert record.explanation.status is None and record.explanation.began == record.began
    request.status = 200
    assert record.explanation.status == 200
    record.settle()
    request.status = 500
    record.settle()
    del request
    gc.collect()
    assert record.explanation.status == 200 and gone() is None


def test_the_last_requests_are_explained_the_newest_first():
    explanations = Explanations(most=3)
    for number in (0, 1, 2, 3, 4, 3):
        explanations.begin(f"r{number}", None, lambda _, name=f"r{number}": Explanation(name, "/"))
    assert [each.request_id for each in explanations.newest(2)] == ["r3", "r4"]
    assert explanations.get("r1") is None and explanations.get("r2") is not None


def test_a_name_that_two_clients_gave_is_two_requests():
    explanations = Explanations()
    for owner, endpoint in (("ann", "/v1/messages"), ("bob", "/v1/responses"), (None, "/v1/completions")):
        explanations.begin("same", owner, lambda _, endpoint=endpoint: Explanation("same", endpoint))
    assert [explanations.get("same", owner).endpoint for owner in ("ann", "bob")] == ["/v1/messages", "/v1/responses"]
    assert explanations.get("same", "cid") is None
    assert explanations.of_anyone("same").endpoint == "/v1/completions"
    assert explanations.of_anyone("another") is None


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("claude-cli/2.0.1 (external, cli)", "claude-cli/2.0.1"),
        ("Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML) Chrome/120.0 Safari/537", "Chrome/120"),
        ("<script>", None),
        (None, None),
        ("a" * 500, "a" * MAX_CHARACTERS),
    ],
)
def test_the_first_product_names_a_client(agent, name):
    assert client_name(agent) == name


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        ("# TYPE a gauge\na 1\n# EOF\n", "# comment\n\n# TYPE a gauge\na 2\n", "# TYPE a gauge\na 1\n"),
        ('# TYPE a gauge\na{b="}"} 1 17\n', '# TYPE a gauge\na{b="}"} 2\n', '# TYPE a gauge\na{b="}"} 1 17\n'),
        ("a 1\n", "# TYPE b gauge\nb 1\n", "a 1\n# TYPE b gauge\nb 1\n"),
    ],
)
def test_what_is_little_or_odd(first, second, both):
    assert merged(first, second) == both


PATH = "/v1/chat/completions"


class Scene(SpanExporter):
    """In place of a collector, which keeps spans, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failure: SpanExportResult | Exception | None = None
        self.taken: list[ReadableSpan] = []
        self.metrics = Metrics()
        monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
        monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda endpoint: self)
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
        return self.tracing.begin("POST", PATH, headers)


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
    assert full == {
        **bare,
        "http.response.status_code": 499,
        "gen_ai.operation.name": "chat",
        "gen_ai.usage.input_tokens": 400,
        "gen_ai.usage.cache_read.input_tokens": 320,
        "seamark.request_id": "r",
        "seamark.reason": "hit",
        "seamark.shareable_tokens": 336,
        "seamark.predicted_tokens": 0,
    }
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


def test_what_the_exporter_logs_of_a_failure_is_not_shown():
    """In its words stands the collector's address, with a password perhaps."""
    assert not logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").isEnabledFor(logging.ERROR)
