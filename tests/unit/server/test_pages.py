"""The gateway's own pages: which paths they have, who may use them, and each alarm and warning for its cause alone."""

from __future__ import annotations

import itertools
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from proxy.chat.chat import CHAT
from proxy.fleet.probe import MODELS, Probed, Reports
from proxy.fleet.worker import BREAKER_FAILURES, GateReport, Worker
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
from proxy.http import asgi
from proxy.observability.explanations import Explanation
from proxy.observability.totals import Totals
from proxy.pipeline.gateway import Gateway
from proxy.server.app import App, build, merged
from proxy.server.status import HOUR, alarms, changing, drafts_status, redis_status, warnings, worker_status
from proxy.version import version
from tests.harness.api_keys import entry
from tests.harness.in_memory_gateway import Call, InMemoryGateway
from tests.harness.recording_worker import RecordingWorker

ORIGIN = {"origin": "https://harbour.example"}

PAGES = ("/health", "/ready", "/metrics", "/v1/models", "/seamark/status", "/seamark/live", "/seamark/prefixes", "/ui")


def asking(app: App) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://gateway", timeout=30
    )


def error_of(answer: httpx.Response) -> Any:
    return answer.json()["error"]


@pytest.fixture
async def gateway(in_memory: Any, worker: RecordingWorker) -> InMemoryGateway:
    return await in_memory(worker)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        *(("GET", path, 200) for path in PAGES),
        *(("HEAD", path, 200) for path in PAGES),
        *(("GET", path + "/", 200) for path in ("/health", "/ready", "/metrics", "/v1/models")),
        ("HEAD", MODELS + "/m", 200),
        ("GET", "/", 307),
        ("POST", "/chat/completions", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("PUT", "/ready", 405),
        ("POST", "/health", 404),
    ],
)
async def test_pages_of_the_gateways_own_are_no_workers(gateway, worker, method, path, status):
    answer = await asking(gateway.app).request(method, path)
    assert (answer.status_code, worker.requests) == (status, [])
    if status >= 400:
        assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/chat/completions", ["Did you mean /v1/chat/completions?", "base_url ends in /v1."]),
        ("/", ["live page is at the admin port"]),
        ("/reset_prefix_cache", ["/v1/...", "/tokenize", "at the worker itself"]),
    ],
)
async def test_who_asks_for_a_path_that_nobody_has_reads_which_one_is_meant(in_memory, path, says):
    gateway = await in_memory(RecordingWorker(), is_started=False, admin_port=1)
    answer = await gateway.get(path)
    message = error_of(answer)["message"]
    assert answer.status_code == 404 and message.startswith(f"No such path: {path}. "), message
    assert "type" not in answer.json() and (await gateway.get("/v1/v1/messages")).json()["type"] == "error"
    assert [words for words in says if words not in message] == []
    assert ("Did you mean" in message) == ("Did you" in says[0])


async def test_pages_at_an_address_of_their_own_are_there_alone_and_need_no_key(in_memory, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(entry("ann"))
    gateway = await in_memory(RecordingWorker(), is_started=False, admin_port=1, api_keys=file)
    pages = asking(build(gateway.gateway, pages_only=True))
    for path in ("/health", "/metrics", "/seamark/status", "/seamark/live", "/ui", "/seamark/prefixes"):
        assert (await gateway.get(path)).status_code == (200 if path == "/health" else 404), path
        assert (await pages.get(path)).status_code == 200, path
    assert (await pages.get("/")).headers["location"] == "ui"
    assert (await pages.get("/seamark/live")).json()["api_port"] == 8080
    for path, words in ((CHAT, "clients use the gateway's port"), ("/chat/completions", "operator's pages only")):
        answer = await pages.post(path, json={"model": "m"})
        assert answer.status_code == 404 and words in error_of(answer)["message"], path
    assert error_of(await pages.get("/nothing"))["message"] == "No such path: /nothing"


@pytest.mark.parametrize("path", ["/v1/realtime", "/ui", "/health"])
async def test_a_websocket_is_refused_before_anything_is_asked(gateway, worker, path):
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": [], "client": ("127.0.0.1", 1), asgi.SERVED: SimpleNamespace(wants_websocket=True)}
    call = Call(gateway.app, scope, b"")
    start = await call.message()
    assert start is not None and start["status"] == 426 and not worker.requests
    assert b"no_websockets" in b"".join([piece async for piece in call.body()])


async def test_ready_says_which_workers_are_and_why_none_is(in_memory):
    worker = RecordingWorker()
    gateway = await in_memory(worker)
    assert (await gateway.get("/ready")).json() == {"status": "ready", "workers": ["worker-0"]}
    gateway.gateway.is_stopping = True
    answer = await gateway.get("/ready")
    assert answer.status_code == 503 and "stopping" in error_of(answer)["message"]
    assert (await gateway.get("/health")).status_code == 200
    gateway.gateway.is_stopping = False
    await gateway.gateway.pool.ready()
    gateway.upstream.faults[worker.url] = ConnectionError("planned")
    gateway.gateway.pool.workers[0].up = False
    answer = await gateway.get("/ready")
    assert answer.status_code == 503 and error_of(answer)["message"].startswith("No worker is ready.")


async def test_pages_of_any_site_may_read_the_models_and_nothing_else(gateway):
    allowed = "access-control-allow-origin"
    for path in (MODELS, MODELS + "/m", MODELS + "/other"):
        assert (await gateway.get(path, **ORIGIN)).headers[allowed] == "*", path
        assert allowed not in (await gateway.get(path)).headers, path
    for path in ("/seamark/status", "/ready", "/metrics"):
        assert allowed not in (await gateway.get(path, **ORIGIN)).headers, path
    gateway.gateway.is_stopping = True
    assert allowed not in (await gateway.get("/ready", **ORIGIN)).headers


async def test_the_status_page_shows_each_part_and_is_kept_nowhere(in_memory):
    gateway = await in_memory(RecordingWorker(), is_started=False, prefill_worker=("http://prefill",))
    answer = await gateway.get("/seamark/status")
    assert answer.headers["cache-control"] == "no-store" and answer.headers["content-type"] == "application/json"
    status = answer.json()
    assert [each["name"] for each in status["workers"]] == ["worker-0"]
    assert [each["name"] for each in status["prefill_workers"]] == ["prefill"]
    assert {name for name, value in status.items() if value in (0, [], None)} == {
        *("directory_entries", "known_positions", "hot_prefixes", "text_bytes_held"),
        *("keys", "self_check", "prefixes", "warnings"),
    }
    assert (status["since"], status["redis"]) == (gateway.gateway.created, {"state": "off"})
    assert status.keys() - {"workers", "prefill_workers"} >= {"shadow"}


async def test_a_prompt_to_pin_is_as_long_as_a_body_may_be(in_memory):
    gateway = await in_memory(RecordingWorker(), is_started=False, max_body_bytes=1000)
    for size, status, code in ((999, 400, None), (1000, 400, None), (1001, 413, "request_too_large")):
        answer = await asking(gateway.app).post("/seamark/prefixes", content=b"x" * size)
        assert (answer.status_code, error_of(answer)["code"]) == (status, code)


async def test_another_sites_page_changes_nothing(gateway):
    changes = (("POST", "prefixes"), ("DELETE", "prefixes/x"), ("POST", "self-check/reset"))
    sites = {"cross-site": False, "same-site": False, "same-origin": True, "none": True, None: True}
    for (method, path), (site, may) in itertools.product(changes, sites.items()):
        headers = {} if site is None else {"sec-fetch-site": site}
        answer = await asking(gateway.app).request(method, f"/seamark/{path}", headers=headers)
        assert (answer.status_code != 403) == may, (path, site)


async def test_a_defect_of_the_gateway_is_an_error_without_its_words(gateway, monkeypatch):
    def broken() -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(gateway.gateway.pinned, "as_json", broken)
    answer = await asking(gateway.app).get("/seamark/prefixes")
    assert (answer.status_code, error_of(answer)["type"]) == (500, "internal_server_error")
    assert "secret" not in answer.text


async def test_an_endpoint_picker_finds_the_workers_figures_beside_the_gateways(in_memory):
    for sidecar in (True, False):
        gateway = await in_memory(RecordingWorker(more_metrics="vllm:num_requests_waiting 7.0\n"), sidecar=sidecar)
        shown = await gateway.get("/metrics")
        assert shown.headers["content-type"].startswith("text/plain") and "seamark_requests_total" in shown.text
        assert ("vllm:num_requests_waiting 7.0" in shown.text) == sidecar


async def test_the_application_that_clients_reach_runs_the_gateway_and_the_pages_do_not(in_memory, monkeypatch):
    gateway = (await in_memory(RecordingWorker(), is_started=False)).gateway
    steps: list[str] = []

    async def stop() -> None:
        steps.append("stop")

    with monkeypatch.context() as patched:
        patched.setattr(gateway, "start", lambda: steps.append("start"))
        patched.setattr(gateway, "stop", stop)
        for app in (build(gateway, pages_only=True), build(gateway)):
            with suppress(ValueError):
                async with app.router.lifespan_context(app):
                    steps.append("serve")
                    raise ValueError("planned")
    assert steps == ["serve", "start", "serve", "stop"]


ENGINE = EngineInfo(version(), "0.32.0", 16, 384)
OTHER_BUILD = replace(ENGINE, version="0.0")

READ = Reports("http://worker-0:1")


def metrics(engine: EngineInfo | None = ENGINE, **fields: Any) -> WorkerMetrics:
    return WorkerMetrics("b", engine, **fields)


def set_up(worker: Worker, **fields: Any) -> None:
    """A worker that is up and has the plugin, but for `fields` of what it was found to be."""
    worker.up = True
    worker.learn(replace(Probed("http://worker-0", boot="b#1", metrics=metrics(), reports=READ), **fields))


@pytest.fixture
async def own(in_memory: Any) -> Gateway:
    """Not started: it does nothing by itself, and its workers are what a test makes of them."""
    own = (await in_memory(RecordingWorker(), RecordingWorker(), is_started=False)).gateway
    for worker in own.pool.workers:
        set_up(worker)
    return own


def test_a_worker_whose_requests_fail_is_an_alarm_unless_it_is_down(own):
    worker = own.pool.workers[0]
    for number in range(BREAKER_FAILURES):
        assert alarms(own) == []
        worker.breaker.failed(number)
    (only,) = alarms(own)
    assert only.startswith("Worker worker-0 fails")
    worker.up = False
    (only,) = alarms(own)
    assert only.startswith("Worker worker-0 is down")


@pytest.mark.parametrize(
    ("hints_off", "cache_off", "ends"),
    [
        (False, False, "Hints are still on."),
        (True, False, "Hints are off."),
        (True, True, "Hints are off and nothing is taken from the cache."),
    ],
)
def test_answers_that_differ_are_an_alarm_with_what_is_done_about_it(own, hints_off, cache_off, ends):
    check = own.self_check
    check.checked, check.differs = 1234, 1
    for _ in range(hints_off + cache_off):
        own.pool.workers[1].quarantine()
    (only,) = alarms(own)
    assert only.startswith("Answers differ: 1,234 prompts") and " 1 of them" in only and only.endswith(" " + ends)
    assert warnings(own) == []  # the alarm says it
    check.differs = 0
    assert alarms(own) == [] and warnings(own) == ([ends] if hints_off else [])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"metrics": metrics(replace(ENGINE, refused="two groups"))}, "Worker worker-0 gets no hints: two groups."),
        ({"metrics": metrics(None)._replace(other_release="update it")}, "Worker worker-0 gets no hints: update it."),
        ({"metrics": metrics(OTHER_BUILD)}, f"Worker worker-0: {OTHER_BUILD.other_version}."),
        ({"reports": Reports(why_not="404")}, "What the engine of worker worker-0 reports cannot be read: 404."),
    ],
)
def test_what_a_worker_that_is_up_lacks_is_told(own, fields, says):
    set_up(own.pool.workers[0], **fields)
    assert warnings(own) == [says]
    own.pool.workers[0].up = False
    assert warnings(own) == []


async def test_a_worker_that_drafts_is_on_trial_while_it_is_up_and_how_far_that_is(in_memory):
    gateway = (await in_memory(RecordingWorker(), is_started=False)).gateway
    (worker,) = gateway.pool.workers
    worker.hear_of_drafts(GateReport("open", "of another state", float("-inf")))
    for state in ("trial", "open", "closed", "on", "off", ""):
        set_up(worker, metrics=metrics(replace(ENGINE, drafts=state)))
        assert len(warnings(gateway)) == (state == "trial"), state
        assert (drafts_status(worker) or {"state": "", "trial": ""}) == {"state": state, "trial": ""}
    for figures, says in (("", "trial is over."), ("7 of 7 agree", "trial is over (7 of 7 agree).")):
        worker.hear_of_drafts(GateReport("trial", figures, float("inf")))
        set_up(worker, metrics=metrics(replace(ENGINE, drafts="trial")))
        (only,) = warnings(gateway)
        assert only.startswith("Worker worker-0 drafts") and says in only
        assert worker_status(worker, gateway)["drafts"] == {"state": "trial", "trial": figures}
    worker.up = False
    assert warnings(gateway) == []


async def test_in_shadow_mode_that_comes_first_and_no_plugin_is_missed(in_memory):
    gateway = (await in_memory(RecordingWorker(), is_started=False, shadow=True)).gateway
    (worker,) = gateway.pool.workers
    set_up(worker, metrics=metrics(None))
    (only,) = warnings(gateway)
    assert only.startswith("Shadow mode")
    set_up(worker, metrics=metrics(None, drafts=True))
    first, second = warnings(gateway)
    assert first == only and second.startswith("Worker worker-0 drafts")
    worker.up = False
    assert warnings(gateway) == [only]
    set_up(worker, reports=Reports(why_not="HTTP 404"))
    assert warnings(gateway)[0] == only and len(warnings(gateway)) == 2


@pytest.mark.parametrize(("state", "is_told"), [("down", True), ("up", False)])
def test_a_redis_that_is_down_is_a_warning(own, state, is_told):
    assert redis_status(own) == {"state": "off"}
    own.redis_sync = SimpleNamespace(status=lambda: {"state": state})
    assert redis_status(own) == {"state": state}
    assert [told.startswith("Redis does not answer") for told in warnings(own)] == [True] * is_told
    own.redis_sync = None  # whose end this one cannot wait for


def test_the_cause_is_what_cost_most_lately_and_no_salt():
    def request(text: str | None, lost: int, began: float, where: tuple[str, str] = ("message", "user")) -> Explanation:
        changed = {"what": where[0], "role": where[1], "text": text, "cure": text and f"Move {text}.", "lost": lost}
        return Explanation("r", CHAT, began=began, changed=changed)

    now = time.time()
    newest = [
        request("an id", 300, now),
        Explanation("r", CHAT, began=now),
        request("a path", 9000, now - 2 * HOUR),
        request("a date", 200, now),
        request("a date", 200, now - HOUR / 2),
        request(None, 9000, now, ("setting", "cache_salt")),
        request("a model", 1, now, ("setting", "user")),
    ]
    found = changing(Totals(9, 2000, 0, 0, 0, 700), newest)
    assert found is not None and (found["text"], found["cure"]) == ("a date", "Move a date.")
    for what, role in (("setting", "tools"), ("message", "cache_salt")):
        found = changing(Totals(9, 2000, 0, 0, 0, 700), [*newest, request("another", 9000, now, (what, role))])
        assert found is not None and found["text"] == "another"


def test_two_expositions_are_one_that_a_strict_reader_takes():
    first = '# TYPE a gauge\na{b="}"} 1 1700000000\n'
    assert merged(first + "# EOF\n", '# comment\n\n# TYPE a gauge\na{b="}"} 2\n') == first
    assert merged("a 1\n", "# TYPE b gauge\nb 1\n") == "a 1\n# TYPE b gauge\nb 1\n"
