"""What a span says of a request, whose child it is, and what becomes of spans that nobody takes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from proxy.metrics import Metrics
from proxy.observability import tracing
from proxy.observability.explanations import Explanation
from proxy.observability.tracing import RequestTrace, Tracing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

CONTEXT = [(b"traceparent", f"00-{TRACE}-{PARENT}-01".encode()), (b"tracestate", b"vendor=opaque")]

PATH = "/v1/chat/completions"


class Scene:
    """Spans that are kept here in place of a collector."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = InMemorySpanExporter()
        self.exporter: SpanExporter = self.taken  # what spans are given to
        self.endpoints: list[str] = []
        self.metrics = Metrics()
        scene = self

        class Collector(SpanExporter):
            def __init__(self, endpoint: str) -> None:
                scene.endpoints.append(endpoint)

            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                return scene.exporter.export(spans)

        monkeypatch.delenv("OTEL_TRACES_SAMPLER", raising=False)
        monkeypatch.setattr(tracing, "OTLPSpanExporter", Collector)
        self.tracing = Tracing("http://collector/v1/traces", self.metrics)

    async def spans(self) -> list[ReadableSpan]:
        await self.tracing.aclose()
        return list(self.taken.get_finished_spans())

    def counted(self, result: str) -> float | None:
        return self.metrics.registry.get_sample_value("seamark_spans_total", {"result": result})

    def begin(self, headers: list[tuple[bytes, bytes]] | None = None) -> RequestTrace:
        return self.tracing.begin("POST", PATH, [] if headers is None else headers)


@pytest.fixture
def scene(monkeypatch) -> Scene:
    return Scene(monkeypatch)


async def test_a_request_without_a_context_begins_a_trace_and_one_that_is_not_sampled_is_none(scene):
    scene.begin().end(200, "m", None, (), None)
    unsampled = [(b"traceparent", CONTEXT[0][1][:-1] + b"0")]
    scene.begin(unsampled).end(200, "m", None, [("queue", 1.0, 2.0)], None)
    (span,) = await scene.spans()
    assert span.parent is None and unsampled[0][1].endswith(b"-00")


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


class Failing(SpanExporter):
    def __init__(self, result: SpanExportResult | Exception) -> None:
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@pytest.mark.parametrize("failure", [SpanExportResult.FAILURE, OSError("http://user:password@collector")])
async def test_spans_that_are_not_taken_are_counted_as_lost_and_that_is_said_when_it_changes(scene, failure, caplog):
    caplog.set_level("INFO", "seamark.tracing")

    async def send(exporter: SpanExporter, spans: int) -> int:
        before, scene.exporter = len(caplog.records), exporter
        for _ in range(spans):
            scene.begin().end(200, "m", None, (), None)
        scene.tracing._provider.force_flush()
        return len(caplog.records) - before

    assert await send(Failing(failure), 2) == 1
    assert await send(Failing(failure), 1) == 0
    assert (scene.counted("lost"), scene.counted("exported")) == (3, None)
    assert await send(scene.taken, 2) == 1
    assert await send(scene.taken, 1) == 0
    assert (scene.counted("lost"), scene.counted("exported")) == (3, 3)
    assert "password" not in caplog.text


def test_what_the_exporter_logs_of_a_failure_is_not_shown():
    """In its words stands the collector's address, with a password perhaps."""
    assert not logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").isEnabledFor(logging.ERROR)
