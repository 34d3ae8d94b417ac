"""Trace context passes through, and spans of requests reach a collector, if that is wanted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.harness.gateways import CHAT, chat
from tests.harness.threaded_server import serving, whole_body
from tests.harness.waiting import until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=opaque"}

SECRET = "the lighthouse keeper's diary"


@dataclass
class Collector:
    """Takes OTLP over HTTP."""

    spans: list[Span] = field(default_factory=list)
    raw: bytes = b""

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        raw = await whole_body(receive)
        self.raw += raw
        for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
            assert {"service.name"} <= {each.key for each in resource.resource.attributes}
            self.spans += [span for spans in resource.scope_spans for span in spans.spans]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are sent ten times a second."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")


def sent_headers(worker) -> dict[str, str]:
    return {name.decode().lower(): value.decode() for name, value in worker.requests[-1].headers}


async def test_trace_context_passes_unchanged_where_nothing_is_traced(in_memory, worker):
    gateway = await in_memory(worker)
    await gateway.post(chat("Tide?"), **CONTEXT)
    sent = sent_headers(worker)
    assert {name: sent[name] for name in CONTEXT} == CONTEXT
    await gateway.post(chat("Berth?"))
    assert "traceparent" not in sent_headers(worker)


@pytest.mark.parametrize(("stream", "cached", "reason"), [(False, 0, "cold"), (True, 160, "hit")])
async def test_a_request_is_a_span_between_its_clients_and_its_workers(in_memory, worker, stream, cached, reason):
    found = Collector()
    with serving(found) as url:
        gateway = await in_memory(worker, otlp_traces_endpoint=f"{url}/v1/traces")
        worker.cached = cached
        await gateway.post({**chat(SECRET), "stream": stream}, **CONTEXT)
        sent = sent_headers(worker)
        await until(lambda: found.named(f"POST {CHAT}"))
        (span,) = found.named(f"POST {CHAT}")
        assert (span.trace_id.hex(), span.parent_span_id.hex(), span.kind) == (TRACE, PARENT, Span.SPAN_KIND_SERVER)
        ids = f"00-{TRACE}-{span.span_id.hex()}-01"
        assert (sent["traceparent"], sent["tracestate"]) == (ids, CONTEXT["tracestate"])
        told = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
        assert told["http.response.status_code"] == 200 and told["seamark.reason"] == reason
        assert (told["gen_ai.operation.name"], told["seamark.worker"]) == ("chat", "worker-0")
        assert told["gen_ai.usage.input_tokens"] > 0 and told["gen_ai.usage.cache_read.input_tokens"] == cached
        inside = [each.name for each in found.spans if each.parent_span_id == span.span_id]
        assert sorted(inside) == sorted(["boundaries", "queue", "choice", "first token" if stream else "answer"])
        assert SECRET.encode() not in found.raw
        await until(lambda: gateway.metric("seamark_spans_total", result="exported") >= 5)
