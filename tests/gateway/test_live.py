"""What a gateway tells of itself, requests and workers: in its log, on its pages, in spans; and what commands tell."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from proxy.bench.harness.servers import Server, Servers, free_port
from proxy.commands import boundary, doctor
from proxy.fleet.pool import MOST_CAUSES
from proxy.observability import reasons
from proxy.observability.reasons import REASON_TEXT
from proxy.observability.shadow import MATCH_UNIT
from proxy.server.status import PAGE
from proxy.version import version
from tests.harness.api_keys import bearer, secret
from tests.harness.fake_engine import template
from tests.harness.gateways import CHAT, SYSTEM, SYSTEM_END, chat, post, start_gateway
from tests.harness.in_memory_gateway import InMemoryGateway, told
from tests.harness.recording_worker import RecordingWorker, recording_worker, respond, serving, whole_body
from tests.harness.waiting import until, wait_for

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
    assert figures["efficiency"]["now"] == figures["efficiency"]["hour"] == pytest.approx(160 / shareable)
    assert {*figures["efficiency"]["minutes"]} == {None, figures["efficiency"]["now"]}
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
        assert answer.status_code == 200 and answer.content == PAGE
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
        ({"more_metrics": "vllm:spec_decode_num_drafts_total 0.0\n"}, "unpatched", "have passed a trial"),
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


@pytest.mark.parametrize("sidecar", [False, True])
async def test_the_hint_header_of_a_client_goes_no_further(in_memory, worker, sidecar):
    gateway = await in_memory(worker, sidecar=sidecar)
    for path in (CHAT, "/v1/other"):
        await gateway.post(chat("Tide?"), path, x_seamark_boundaries="163")
        assert b"x-seamark-boundaries" not in dict(worker.requests[-1].headers)


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

PARENTS, STATES = f"00-{TRACE}-{PARENT}-01", "vendor=opaque,a=1,b=2"

CONTEXT = [("traceparent", PARENTS), ("tracestate", "vendor=opaque,a=1"), ("tracestate", "b=2")]

SECRET = "the lighthouse keeper's diary"


def sent_context(worker) -> list[str]:
    """What the worker was sent of a trace: its parent, and its state, whatever headers that came in."""
    headers = [(name.decode().lower(), value.decode()) for name, value in worker.requests[-1].headers]
    return [",".join(value for name, value in headers if name == wanted) for wanted in ("traceparent", "tracestate")]


@pytest.mark.parametrize("settings", [{}, {"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}])
async def test_trace_context_passes_unchanged_where_nothing_is_traced(in_memory, worker, monkeypatch, settings):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    gateway = await in_memory(worker, **settings)
    await gateway.client.post(CHAT, json=chat("Tide?"), headers=CONTEXT)
    assert sent_context(worker) == [PARENTS, STATES]
    await gateway.post(chat("Berth?"))
    assert sent_context(worker) == ["", ""]


@pytest.mark.parametrize(("stream", "cached", "reason"), [(False, 0, "cold"), (True, 160, "hit")])
async def test_a_request_is_a_span_between_its_clients_and_its_workers(
    in_memory, worker, monkeypatch, stream, cached, reason
):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")  # milliseconds
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    raw: list[bytes] = []

    async def collector(scope: Any, receive: Any, send: Any) -> None:
        """Takes OTLP over HTTP."""
        raw.append(await whole_body(receive))
        await respond(send, b"")

    def found() -> list[Span]:
        resources = [each for part in raw for each in ExportTraceServiceRequest.FromString(part).resource_spans]
        assert all("service.name" in {named.key for named in each.resource.attributes} for each in resources)
        return [span for each in resources for spans in each.scope_spans for span in spans.spans]

    def named() -> list[Span]:
        return [span for span in found() if span.name == f"POST {CHAT}"]

    with serving(collector) as url:
        gateway = await in_memory(worker, otlp_traces_endpoint=f"{url}/v1/traces")
        worker.cached = cached
        await gateway.client.post(CHAT, json={**chat(SECRET), "stream": stream}, headers=CONTEXT)
        await until(named)
        (span,) = named()
        assert (span.trace_id.hex(), span.parent_span_id.hex(), span.kind) == (TRACE, PARENT, Span.SPAN_KIND_SERVER)
        ids = f"00-{TRACE}-{span.span_id.hex()}-01"
        assert sent_context(worker) == [ids, STATES]
        told = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
        assert told["http.response.status_code"] == 200 and told["seamark.reason"] == reason
        assert (told["gen_ai.operation.name"], told["seamark.worker"]) == ("chat", "worker-0")
        assert told["gen_ai.usage.input_tokens"] > 0 and told["gen_ai.usage.cache_read.input_tokens"] == cached
        inside = [each.name for each in found() if each.parent_span_id == span.span_id]
        assert sorted(inside) == sorted(["boundaries", "queue", "choice", "first token" if stream else "answer"])
        assert SECRET.encode() not in b"".join(raw)
        await until(lambda: gateway.metric("seamark_spans_total", result="exported") >= 5)


PROBES = ("--health-interval", "0.1")


def lines(gateway: Server, part: str) -> list[str]:
    """Lines of its log that hold `part`."""
    return [line for line in gateway.log.read_text().splitlines() if part in line]


def test_a_start_names_version_addresses_and_each_worker_with_what_it_runs(fleet, worker):
    with recording_worker(patched=False, models=("n",)) as bare:
        gateway = start_gateway(fleet, worker, bare)
        wait_for(lambda: len(lines(gateway, " is up: ")) == 2)
    (start,) = lines(gateway, "base_url")
    assert f"Seamark {version()}" in start
    assert f"base_url {gateway.url}/v1 " in start and f"live page {gateway.url}/ui" in start
    (patched,), (unpatched,) = lines(gateway, f"worker {worker.url[7:]} "), lines(gateway, f"worker {bare.url[7:]} ")
    assert f"serves m; vLLM 0.32.0; patched (Seamark {version()}, match unit 16 tokens)" in patched
    assert "serves n; vLLM 0.32.0; not patched" in unpatched and f"seamark doctor --worker {bare.url}" in unpatched


async def something_else(scope: Any, receive: Any, send: Any) -> None:
    await respond(send, b'{"detail":"Not Found"}', status=404)


def test_why_a_worker_does_not_answer_is_logged_once_and_told_to_clients(fleet, worker):
    worker.api_key = "sk-of-vllm"
    with serving(something_else) as other:
        causes = {worker.url: "wants a key: --worker-api-key-file FILE", other: "not vLLM: /health answers 404"}
        for _ in range(MOST_CAUSES - 1):
            causes[f"http://127.0.0.1:{free_port()}"] = "connection refused: nothing listens there"
        gateway = started(fleet, *(word for url in causes for word in ("--worker", url)), *PROBES)
        for url, words in causes.items():
            wait_for(lambda url=url: lines(gateway, f"worker {url[7:]} is down: "))
            (line,) = lines(gateway, f"worker {url[7:]} is down: ")
            assert words in line
        refused = [post(gateway, chat("Tide?")), *(httpx.get(gateway.url + path) for path in ("/ready", "/v1/models"))]
        assert len(lines(gateway, " is down: ")) == len(causes)
    for answer in refused:
        message = answer.json()["error"]["message"]
        assert answer.status_code == 503 and "may still be loading" not in message and "; and 1 more" in message
        assert all(url[7:] in message and words in message for url, words in list(causes.items())[:MOST_CAUSES])
    assert [answer.headers["retry-after"] for answer in refused[::2]] == ["2", "2"]


def started(fleet: Servers, *flags: str) -> Server:
    """A gateway before nobody that serves."""
    gateway = fleet.gateway(flags=flags)
    gateway.wait_until_ready("/health", seconds=30)
    return gateway


def test_a_gateway_that_is_its_own_worker_says_so(fleet, tmp_path):
    file = tmp_path / "workers.toml"
    file.write_text("worker = []")
    port = free_port()
    gateway = started(fleet, "--workers-file", str(file), "--admin-port", str(port), *PROBES)
    assert lines(gateway, f"there is no worker: {file} names none")
    assert "There is none: workers_file says so" in post(gateway, chat("Tide?")).text
    for url in (gateway.url + "/v1", f"http://localhost:{port}"):
        file.write_text(f'[[worker]]\nurl = "{url}"\n')
        name = url.removeprefix("http://").removesuffix("/v1")
        wait_for(lambda name=name: lines(gateway, f"worker {name} is down: this is the gateway itself"))
    assert "the gateway itself: --worker must name a vLLM server" in post(gateway, chat("Tide?")).text


def test_a_gateway_behind_another_one_is_no_loop_and_named_what_it_is(fleet, worker):
    behind = start_gateway(fleet, worker)
    front = start_gateway(fleet, flags=("--worker", behind.url))
    (line,) = lines(front, " is up: ")
    assert "serves m; a Seamark gateway, not a worker" in line
    assert post(front, chat("Tide?")).status_code == 200


def test_a_gateway_is_no_worker_and_tells_its_losses_to_an_operators_key(fleet, worker, capsys, keys, tmp_path):
    key = tmp_path / "admin"
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))
    beside = (worker.url, "--gateway", gateway.url)
    with_key = (*beside, "--gateway-key-file", str(key))
    for given, words, expected, flags in (
        ("", f"^a gateway, not a worker: {gateway.url};", 1, (gateway.url,)),
        ("", "wants an API key.*--gateway-key-file", 1, beside),
        (secret("root"), r"lost in \d+ minutes", 0, with_key),
        ("wrong", "refuses the key", 1, with_key),
    ):
        key.write_text(given)
        assert doctor.main(["--worker", *flags]) == expected
        assert re.search(words, capsys.readouterr().out, re.S), words


EVIL = "\x1b[2J\x1b[1;1Hwill hit\x9b31m\u202e"

FORGED = "\n2026-11-25 23:00:00,000 INFO seamark.gateway forged"


@pytest.fixture
def evil():
    with recording_worker(version=version() + EVIL, connector="C" + EVIL, refused="why" + EVIL) as started:
        started.models = ("m", "evil" + EVIL, "evil" + FORGED)
        yield started


def is_clean(text: str) -> bool:
    return "forged" not in text and all(line.isprintable() for line in text.splitlines())


def test_the_gateways_log_and_pages(fleet, evil: RecordingWorker):
    gateway = start_gateway(fleet, evil)
    odd = {"user-agent": b"evil\x9b2J/1", "x-request-id": b"r1\x9b2J"}
    post(gateway, {**chat("Tide?"), "model": "evil" + EVIL + FORGED}, headers=odd)
    assert post(gateway, chat("Tide?")).status_code == 200
    wait_for(lambda: "is up: serves m" in gateway.log.read_text())
    assert is_clean(gateway.log.read_text())
    for page in ("/metrics", "/seamark/status", "/seamark/live", "/v1/models", "/seamark/prefixes"):
        assert is_clean(httpx.get(gateway.url + page).text), page


@pytest.mark.parametrize("way", ["pip", "kubernetes"])
def test_what_the_doctor_prints(evil: RecordingWorker, capsys, way):
    doctor.main(["--worker", evil.url, "--runs-as", way])
    printed = capsys.readouterr().out
    assert is_clean(printed) and r"why\x1b[2J" in printed and "serves m" in printed


def test_what_boundary_prints(evil: RecordingWorker, tmp_path, capsys):
    request = tmp_path / "chat.json"
    request.write_text('{"model": "another", "messages": [{"role": "user", "content": "x"}]}')
    assert boundary.main(["--worker", evil.url, str(request)]) == 2
    assert is_clean(capsys.readouterr().err)


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("module", ["redis", "opentelemetry"])
def test_what_is_not_asked_for_is_not_imported(module):
    done = python("-c", f"import sys, proxy.server.app; print([name for name in sys.modules if '{module}' in name])")
    assert done.stdout.strip() == "[]"
