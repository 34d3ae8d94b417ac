"""What is told of requests: the live page's figures, shadow mode, a sidecar's metrics, and spans."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.parser import text_string_to_metric_families

from proxy.http.client import Unreachable
from proxy.observability import reasons
from proxy.observability.reasons import REASON_TEXT
from proxy.observability.shadow import MATCH_UNIT
from proxy.server import live_page
from tests.harness.api_keys import bearer
from tests.harness.fake_engine import template
from tests.harness.gateways import CHAT, SYSTEM, SYSTEM_END, chat
from tests.harness.in_memory_gateway import InMemoryGateway, told
from tests.harness.recording_worker import RecordingWorker, serving, whole_body
from tests.harness.waiting import until

GATEWAY = (Path(__file__).parents[2] / "proxy" / "README.md").read_text()


async def live(gateway: InMemoryGateway, **headers: str) -> dict:
    answer = await gateway.get("/seamark/live", **headers)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    return answer.json()


async def test_requests_are_told_newest_first_with_what_they_got(in_memory, worker):
    gateway = await in_memory(worker)
    assert (await live(gateway))["efficiency"] == {"now": None, "hour": None, "minutes": [None] * 60}
    worker.cached = 0
    await gateway.post(chat("one"), x_request_id="first")
    await told(worker)
    worker.cached = 160
    await gateway.post(chat("two"), x_request_id="second")
    figures = await live(gateway)
    second, first = figures["requests"]
    assert (second["request_id"], first["request_id"]) == ("second", "first")
    shareable = len(f"<system>{SYSTEM['content']}<user>") // 16 * 16
    prompt = len(template(chat("one")))
    assert (first["prompt"], first["shareable"], first["delivered"], first["reason"]) == (prompt, 0, 0, "cold")
    assert (second["prompt"], second["shareable"], second["delivered"]) == (prompt, shareable, 160)
    assert second["status"] == 200 and figures["since"] < first["began"] <= second["began"] <= figures["now"]
    assert figures["efficiency"]["now"] == figures["efficiency"]["hour"] == figures["efficiency"]["minutes"][-1]
    assert figures["efficiency"]["now"] == pytest.approx(160 / shareable)
    sums = {"requests": 2, "prompt": 2 * prompt, "shareable": shareable, "came": 160, "delivered": 160, "changed": 0}
    assert figures["sums"]["whole"] == sums and figures["changing"] is None


async def test_no_prompt_text_is_told_and_halves_of_characters_break_nothing(in_memory, worker):
    gateway = await in_memory(worker)
    for question in ("secret tide", "secret ebb"):
        messages = [
            {"role": "system", "content": f"{question} \ud83d " + "harbour " * 100},
            *({"role": role, "content": "long speech " * 30} for role in ("user", "assistant", "user")),
        ]
        assert (await gateway.post({"model": "m", "messages": messages}, x_request_id="x")).status_code == 200
    answer = await gateway.get("/seamark/live")
    assert answer.json()["requests"][0]["request_id"] == "x"
    assert not re.search("secret|tide|ebb|harbour|speech", answer.text)


def test_every_reason_has_words_and_every_word_a_reason():
    table = GATEWAY.split("| reason in `seamark_miss_total`")[1].partition("\n\n")[0]
    assert set(REASON_TEXT) == {*re.findall(r"^\| `(\w+)` \|", table, re.M), "hit"}
    assert set(REASON_TEXT) >= reasons.ENGINE_CAUSES


async def test_the_page_needs_no_key_and_its_figures_need_an_operators(in_memory, worker, keys):
    gateway = await in_memory(worker, api_keys=keys)
    for path in ("/ui", "/ui/"):
        answer = await gateway.client.get(path, follow_redirects=True)
        assert answer.status_code == 200 and answer.content == live_page.HTML
    assert [(await gateway.get(path)).status_code for path in ("/ui/more", "/seamark/live")] == [401, 401]
    assert (await gateway.get("/seamark/live", **bearer("ann"))).status_code == 403
    assert (await live(gateway, **bearer("root")))["workers"]


@pytest.fixture
def bare() -> RecordingWorker:
    """A worker without the plugin."""
    return RecordingWorker(patched=False, cached=0)


async def judged(gateway: InMemoryGateway, requests: int) -> dict[str, Any]:
    """The shadow's status once it has judged so many."""
    await gateway.shows(lambda status: sum(status["shadow"]["requests"].values()) >= requests)
    shadow: dict[str, Any] = (await gateway.status())["shadow"]
    return shadow


@pytest.mark.parametrize(
    ("plugin", "reason", "warned"),
    [
        ({"patched": True, "refused": "a layer slides"}, "hint_ignored", "no hints: a layer slides"),
        ({"more_metrics": "vllm:spec_decode_num_drafts_total 0.0\n"}, "unpatched", "have stood a trial"),
    ],
)
async def test_nothing_is_promised_of_a_plugin_that_would_refuse_the_hints(in_memory, bare, plugin, reason, warned):
    for name, value in plugin.items():
        setattr(bare, name, value)
    gateway = await in_memory(bare, shadow=True)
    for number, question in enumerate(("one", "two"), 1):
        answer = await gateway.post(chat(question))
        told = await judged(gateway, number)
    assert answer.headers["x-seamark-reason"] == reason
    assert told["lost"][reason]["tokens"] == SYSTEM_END // MATCH_UNIT * MATCH_UNIT
    assert told["plugin_would_save"]["tokens"] == (told["lost"][reason]["tokens"] if reason == "unpatched" else 0)
    assert warned in " ".join((await gateway.get("/seamark/live")).json()["warnings"])


async def test_no_client_learns_of_anothers_prompts_by_what_its_own_lost(in_memory, bare, keys):
    gateway = await in_memory(bare, api_keys=keys)
    asked = [await gateway.post(chat("one"), **bearer(name)) for name in ("ann", "bob", "bob")]
    lost: list[Any] = []

    async def is_judged() -> bool:
        ids = [answer.headers["x-request-id"] for answer in asked]
        told = [await gateway.get(f"/seamark/requests/{each}", **bearer("root")) for each in ids]
        lost[:] = [each.json()["lost"] for each in told]
        return bool(lost[2])

    await until(is_judged)
    assert lost[:2] == [{}, {}] and lost[2].keys() == {"unpatched"}


async def test_in_shadow_mode_text_that_changes_has_its_headline_too(in_memory, bare):
    gateway = await in_memory(bare, health_interval=0.1, shadow=True)
    question = {"role": "user", "content": "How high is the tide tonight? " * 5}
    for clock in ("9:41", "9:42"):
        system = {"role": "system", "content": f"It is {clock}. " + SYSTEM["content"]}
        await gateway.post({"model": "m", "messages": [system, question]})
    lost = (await judged(gateway, 2))["lost"]["prefix_changed"]["tokens"]
    live = (await gateway.get("/seamark/live")).json()
    assert live["sums"]["hour"]["changed"] == live["changing"]["lost"] == lost


@pytest.mark.parametrize("patched", [False, True])
async def test_in_shadow_no_byte_of_a_request_or_an_answer_is_changed(in_memory, bare, patched):
    bare.patched = patched
    gateway = await in_memory(bare, shadow=True)
    billing = "x-anthropic-billing-header: cc_version=1; cch=0;"
    for stream in (False, True):
        body = chat("Tide?", stream=stream, seed=7)
        body["messages"] = [{"role": "system", "content": billing}, *body["messages"]]
        raw = json.dumps(body, indent=3).encode()
        for _ in range(2):
            answer = await gateway.post(raw)
            assert bare.requests[-1].body == raw
            assert "x-seamark-boundary" not in answer.headers
            if stream:
                assert answer.content == bare.answers[-1]
    assert (await judged(gateway, 4))["requests"] == {"judged": 4}
    assert gateway.metric("seamark_engine_patched") == patched


VLLM = """# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# TYPE seamark_seconds_saved_total counter
seamark_seconds_saved_total 2.0
"""


async def values(gateway: InMemoryGateway) -> dict[str, float]:
    text = (await gateway.get("/metrics")).text
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))  # which a strict reader wants
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in samples if "worker" not in sample.labels}


async def test_a_picker_finds_the_workers_figures_beside_ours_for_as_long_as_the_worker_answers(in_memory):
    worker = RecordingWorker(more_metrics=VLLM)
    gateway = await in_memory(worker, sidecar=True)
    shown = await values(gateway)
    assert shown["vllm:num_requests_waiting"] == 3 and shown["seamark_seconds_saved_total"] == 2
    assert "seamark_queued" in shown and (await gateway.get("/ready")).status_code == 200
    gateway.upstream.faults[worker.url] = Unreachable("connection refused")
    await gateway.shows(lambda status: not status["workers"][0]["up"])
    assert [(await gateway.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]
    shown = await values(gateway)
    assert "seamark_queued" in shown and "vllm:num_requests_waiting" not in shown


@pytest.mark.parametrize("sidecar", [False, True])
async def test_the_hint_header_of_a_client_goes_no_further(in_memory, worker, sidecar):
    gateway = await in_memory(worker, sidecar=sidecar)
    for path in (CHAT, "/v1/other"):
        await gateway.post(chat("Tide?"), path, x_seamark_boundaries="163")
        assert b"x-seamark-boundaries" not in dict(worker.requests[-1].headers)


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

CONTEXT = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=opaque"}

SECRET = "the lighthouse keeper's diary"


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
async def test_a_request_is_a_span_between_its_clients_and_its_workers(
    in_memory, worker, monkeypatch, stream, cached, reason
):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    raw: list[bytes] = []

    async def collector(scope: Any, receive: Any, send: Any) -> None:
        """Takes OTLP over HTTP."""
        raw.append(await whole_body(receive))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def found() -> list[Span]:
        resources = [each for part in raw for each in ExportTraceServiceRequest.FromString(part).resource_spans]
        assert all("service.name" in {named.key for named in each.resource.attributes} for each in resources)
        return [span for each in resources for spans in each.scope_spans for span in spans.spans]

    def named() -> list[Span]:
        return [span for span in found() if span.name == f"POST {CHAT}"]

    with serving(collector) as url:
        gateway = await in_memory(worker, otlp_traces_endpoint=f"{url}/v1/traces")
        worker.cached = cached
        await gateway.post({**chat(SECRET), "stream": stream}, **CONTEXT)
        sent = sent_headers(worker)
        await until(named)
        (span,) = named()
        assert (span.trace_id.hex(), span.parent_span_id.hex(), span.kind) == (TRACE, PARENT, Span.SPAN_KIND_SERVER)
        ids = f"00-{TRACE}-{span.span_id.hex()}-01"
        assert (sent["traceparent"], sent["tracestate"]) == (ids, CONTEXT["tracestate"])
        told = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
        assert told["http.response.status_code"] == 200 and told["seamark.reason"] == reason
        assert (told["gen_ai.operation.name"], told["seamark.worker"]) == ("chat", "worker-0")
        assert told["gen_ai.usage.input_tokens"] > 0 and told["gen_ai.usage.cache_read.input_tokens"] == cached
        inside = [each.name for each in found() if each.parent_span_id == span.span_id]
        assert sorted(inside) == sorted(["boundaries", "queue", "choice", "first token" if stream else "answer"])
        assert SECRET.encode() not in b"".join(raw)
        await until(lambda: gateway.metric("seamark_spans_total", result="exported") >= 5)
