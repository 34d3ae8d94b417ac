"""OpenTelemetry spans of requests: one for each, and inside it its boundaries, its wait, the choice, its first token.

Attributes follow OpenTelemetry's conventions for HTTP and generative AI; what they have no name for begins with
`seamark.`. No prompt, answer, key or salt is among them. Sampling and batching are the SDK's (`OTEL_TRACES_SAMPLER`,
`OTEL_BSP_...`); spans are sent by a thread of its own, and dropped if nobody takes them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from requests import Session

from proxy.config_files import LOOPBACK
from proxy.fleet.part import Part
from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.observability.explanations import Explanation
from proxy.version import version

logger = logging.getLogger("seamark.tracing")

# It logs each failure with the collector's address, in which there may be a password.
logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").setLevel(logging.CRITICAL)

STOP_SECONDS = 5.0  # for the last spans, when the gateway stops
HEADERS = frozenset({b"traceparent", b"tracestate"})

Stage = tuple[str, float, float]  # name, begin and end by time.perf_counter()

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Tracing(Part):
    name = "tracing"

    def __init__(self, endpoint: str, metrics: Metrics) -> None:
        """`endpoint`: URL of a collector, its path included, that takes OTLP over HTTP."""
        named = Resource.create({"service.name": "seamark", "service.version": version()})
        self._provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()))
        session = Session()
        session.trust_env = urlsplit(endpoint).hostname not in LOOPBACK  # else no proxy of the environment
        exporter = OTLPSpanExporter(endpoint, session=session)
        self._provider.add_span_processor(BatchSpanProcessor(_Counted(exporter, metrics)))
        self._tracer = self._provider.get_tracer("seamark", version())
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, endpoint: str, headers: asgi.HeaderList) -> RequestTrace:
        """The trace of a request that has just come; the client's span is its parent, if its headers name one.

        `headers` get ours in place of the client's: vLLM makes its spans children of this one.
        """
        found = [(name.decode(), value.decode("latin-1")) for name, value in headers if name in HEADERS]
        carrier = {name: [value for each, value in found if each == name] for name, _ in found}  # states may be several
        context = self._propagator.extract(carrier)
        attributes = {"http.request.method": method, "http.route": endpoint}
        span = self._tracer.start_span(f"{method} {endpoint}", context, SpanKind.SERVER, attributes)
        injected: dict[str, str] = {}
        self._propagator.inject(injected, set_span_in_context(span))
        headers[:] = [header for header in headers if header[0] not in HEADERS]
        headers += [(name.encode(), value.encode("latin-1")) for name, value in injected.items()]
        return RequestTrace(self._tracer, span)

    async def aclose(self) -> None:
        """Send what waits, for at most `STOP_SECONDS`."""
        # The SDK waits for half a minute, whatever it is told. This thread does not keep the process.
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, STOP_SECONDS)


class RequestTrace:
    """The span of one request, open until `end`."""

    __slots__ = ("_ended", "_span", "_to_epoch", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._to_epoch = time.time() - time.perf_counter()  # seconds
        self._ended: int | None = None  # nanoseconds since the epoch

    def stop(self) -> None:
        """The request is over. What is known of it may be told later, by `end`."""
        self._ended = time.time_ns()

    def end(
        self, status: int, model: str, worker: str | None, stages: Iterable[Stage], explanation: Explanation | None
    ) -> None:
        """Close the span. `status`: of the answer; `explanation` has lengths in tokens."""
        span = self._span
        if span.is_recording():
            attributes: dict[str, str | int | None] = {
                "http.response.status_code": status or None,
                "gen_ai.request.model": model,
                "seamark.worker": worker,
            }
            if explanation is not None:
                attributes |= {
                    "gen_ai.operation.name": OPERATIONS.get(explanation.endpoint),
                    "gen_ai.usage.input_tokens": explanation.prompt,
                    "gen_ai.usage.cache_read.input_tokens": explanation.delivered,
                    "seamark.request_id": explanation.request_id,
                    "seamark.reason": explanation.reason,
                    "seamark.shareable_tokens": explanation.shareable,
                    "seamark.predicted_tokens": explanation.predicted,
                }
            span.set_attributes({name: value for name, value in attributes.items() if value is not None})
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            for name, *times in stages:
                began, ended = (round((moment + self._to_epoch) * 1e9) for moment in times)
                self._tracer.start_span(name, set_span_in_context(span), start_time=began).end(ended)
        span.end(self._ended)


class _Counted(SpanExporter):
    """Counts what another exporter does, and says when that changes."""

    def __init__(self, exporter: SpanExporter, metrics: Metrics) -> None:
        self._exporter = exporter
        self._spans = metrics.spans
        self._works: bool | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception:
            result = SpanExportResult.FAILURE
        works = result is SpanExportResult.SUCCESS
        self._spans.labels("exported" if works else "lost").inc(len(spans))
        if works and not self._works:
            logger.info("spans are taken")
        elif not works and self._works is not False:
            logger.warning("spans are not taken and are lost (setting otlp_traces_endpoint)")
        self._works = works
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
