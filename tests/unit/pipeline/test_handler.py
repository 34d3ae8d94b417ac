"""What is taken in of a request, who is told what of a failure, and what a gateway is made of."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from proxy import errors
from proxy.chat.chat import CHAT
from proxy.errors import GatewayError, NotFound, NoWorker, Overloaded, SettingsError, Unauthorized, WorkerFailed
from proxy.fleet.part import Change
from proxy.http import asgi
from proxy.http.client import Broken, Unreachable
from proxy.pipeline.error_responses import error_event, send_error
from proxy.pipeline.gateway import Gateway
from proxy.pipeline.handler import Preflights, is_preflight
from proxy.settings import Settings
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.probed import pool_of
from tests.harness.scripted_upstream import Said, ScriptedUpstream
from tests.harness.waiting import until


@pytest.fixture
async def own(in_memory, worker) -> InMemoryGateway:
    return await in_memory(worker)


async def sent_by(call: Callable[[asgi.Send], Awaitable[None]]) -> list[Any]:
    got: list[Any] = []

    async def send(message: Any) -> None:
        got.append(message)

    await call(send)
    return got


def counted(own: InMemoryGateway) -> dict[str, float]:
    samples = (sample for family in own.gateway.metrics.registry.collect() for sample in family.samples)
    return {each.labels["code"]: each.value for each in samples if each.name == "seamark_requests_total"}


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        *((CHAT, {}, body, 400) for body in (b"", b"[]", b"\xff\xfe")),
        (CHAT, {"content-type": "a/b"}, b"{", 400),
        ("/v1/other", {}, b'{"a":' * 300 + b"1" + b"}" * 300, 400),
        *(
            (path, {"content-encoding": coding}, gzip.compress(b"{}", mtime=0), 415)
            for path, coding in ((CHAT, "gzip"), ("/tokenize", "identity, GZIP"))
        ),
        ("/v1/other", {"content-type": "application/x-www-form-urlencoded"}, b"a=b", 400),
    ],
)
async def test_what_no_worker_should_read_is_refused_in_openais_envelope(own, worker, path, headers, body, status):
    refused = await own.post(body, path, **headers)
    error = refused.json()["error"]
    assert refused.status_code == status and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and not worker.requests
    assert counted(own) == {str(status): 1} and float(refused.headers["x-seamark-overhead-ms"]) >= 0
    assert status != 415 or (refused.headers["accept-encoding"] == "identity" and "gzip" in error["message"])


async def test_an_unknown_path_is_refused_in_openais_envelope(own):
    answer = await own.get("/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def fails(own: InMemoryGateway, error: BaseException, started: bool = False, delivered: bool = False) -> None:
    """Each request does, with what has been sent by then."""

    async def answer(request: Any) -> None:
        if started:
            await request.send({"type": "http.response.start", "status": 200, "headers": []})
        request.delivered = delivered
        raise error

    own.gateway.handler._answer = answer


@pytest.mark.parametrize("origin", [None, "https://a"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (NotFound("No such thing."), 404, "not_found"),
        (Unauthorized("Who are you?"), 401, "invalid_api_key"),
        (KeyError("You pilot ships."), 500, None),
        (MemoryError(), 503, "overloaded"),
        (asyncio.CancelledError(), 503, "stopping"),
    ],
)
async def test_a_failure_is_told_in_the_apis_envelope(own, caplog, error, status, code, origin):
    fails(own, error)
    answer = await own.post(chat("Tide?"), x_request_id="r", **({"origin": origin} if origin else {}))
    told = answer.json()["error"]
    assert (answer.status_code, told["code"], answer.headers["x-request-id"]) == (status, code, "r")
    lets_in = answer.headers.get("access-control-allow-origin")
    assert lets_in == ("*" if origin and status != 401 else None)
    assert ("retry-after" in answer.headers) is (status == 503) and counted(own) == {str(status): 1}
    assert "pilot" not in caplog.text + told["message"] and own.gateway.handler._bodies.memory.held == 0
    assert ("request r failed: KeyError" in caplog.text and "in answer" in caplog.text) is (status == 500)


@pytest.mark.parametrize(
    ("error", "started", "delivered", "status"),
    [
        (GatewayError("no"), True, False, "500"),
        (asgi.ClientGone(), True, False, "499"),
        (asgi.ClientGone(), True, True, "200"),  # it has all of it
        (asgi.ClientGone(), False, True, "499"),
    ],
)
async def test_behind_the_head_of_an_answer_a_failure_ends_it_and_is_counted(own, error, started, delivered, status):
    fails(own, error, started, delivered)
    call = own.opened(chat("Tide?"))
    types = []
    while (message := await call.message()) is not None:
        types.append(message["type"])
    await call.task
    await own.gateway.idle.caught_up()
    assert types == ["http.response.start"] * started and counted(own) == {status: 1}


async def test_large_bodies_take_turns_and_small_ones_wait_for_none(own):
    def sized(size: int) -> bytes:
        return json.dumps(chat("x" * (size - len(json.dumps(chat("")))))).encode()

    await own.gateway.handler._bodies._turns.acquire()
    assert (await own.post(sized(65_536))).status_code == 200
    waiting = asyncio.create_task(own.post(sized(65_537)))
    await asyncio.wait((waiting,), timeout=0.05)
    assert not waiting.done()
    own.gateway.handler._bodies._turns.release()
    assert (await waiting).status_code == 200


@pytest.fixture
async def with_keys(in_memory, worker, tmp_path: Path) -> InMemoryGateway:
    (tmp_path / "keys.toml").write_text(entry("ann") + entry("bob"))
    return await in_memory(worker, api_keys=tmp_path / "keys.toml")


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        *((name, True) for name in ("a", "one two/3?#", "x" * 256)),
        *((name, False) for name in ("x" * 257, " a", "a\tb", "\xe9", "own-", "own-drafts-0-1")),
    ],
)
async def test_a_request_is_called_as_its_client_says_if_that_can_be_kept(own, worker, given, is_kept):
    for body, headers in (({}, {"x-request-id": given.encode("latin-1")}), ({"request_id": given}, {})):
        answer = await own.post(chat("Tide?", **body), **headers)
        named = worker.requests[-1].header(b"x-request-id").decode("latin-1")
        assert (answer.headers["x-request-id"] == given) is is_kept and (named == given) is is_kept


@pytest.mark.parametrize(("kind", "status"), [("application/json", 400), ("a/b", 200)])
async def test_with_a_key_what_claims_to_be_json_is_read_or_refused(with_keys, kind, status):
    """A worker that reads it all the same would not see the key's salt."""
    answer = await with_keys.post(b"{", "/v1/embeddings", **{"content-type": kind}, **bearer("ann"))
    assert answer.status_code == status


async def test_who_is_refused_at_the_door_is_no_request(with_keys, worker):
    assert (await with_keys.post(chat("Tide?"))).status_code == 401
    call = with_keys.opened(chat("Tide?"), "/v1/../x", **bearer("ann"))
    assert (await call.message())["status"] == 404
    crowded = {"method": "POST", "path": "/v1/x", "headers": [], asgi.SERVED: Mock(is_crowded=True)}
    start, _ = await sent_by(lambda send: with_keys.gateway.handler({"type": "http", **crowded}, None, send))
    assert start["status"] == 503
    asks = {"origin": "https://a", "access-control-request-method": "POST"}
    asked = await with_keys.client.options(CHAT, headers=asks)  # a browser asks this without a key
    assert asked.status_code != 401 and asked.headers["x-request-id"]
    assert not counted(with_keys) and with_keys.gateway.handler._bodies.memory.held == 0
    assert [request.method for request in worker.requests] == ["OPTIONS"]


ERROR = WorkerFailed("It broke off.")

CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"r","status":"in_progress"}}\n\n'

RESPONSE = {"status": "failed", "error": {"code": "server_error", "message": "It broke off."}}


@pytest.mark.parametrize(
    ("endpoint", "first", "last", "name", "told"),
    [
        ("/v1/chat/completions", b"", b"", b"", json.loads(ERROR.body())),
        ("/v1/messages", b"", b"", b"error", {"type": "error", "error": {**ERROR.as_dict(), "type": "api_error"}}),
        (
            "/v1/responses", CREATED, b'event: x\ndata: {"type":"x","sequence_number":7}\n\n', b"response.failed",
            {"type": "response.failed", "sequence_number": 8, "response": {"id": "r", **RESPONSE}},
        ),
        (
            "/v1/responses", b"", b"data: {\n\n", b"response.failed",
            {"type": "response.failed", "sequence_number": 0,
             "response": {**RESPONSE, "object": "response", "output": []}},
        ),
    ],
)  # fmt: skip
def test_each_apis_last_word_is_a_whole_event(endpoint, first, last, name, told):
    event = error_event(ERROR, endpoint, first, last)
    assert event.endswith(b"\n\n") and event.count(b"\n\n") == 1
    fields = dict(line.split(b": ", 1) for line in event.strip().splitlines())
    assert fields.get(b"event", b"") == name and json.loads(fields[b"data"]) == told


@pytest.mark.parametrize(
    ("kind", "more", "anthropic"),
    [
        ("Unauthorized", {"www-authenticate": "Bearer"}, "authentication_error"),
        ("UnreadableCoding", {"accept-encoding": "identity"}, "api_error"),
        ("KeyBusy", {"retry-after": "2"}, "rate_limit_error"),
        ("Overloaded", {"retry-after": "2"}, "overloaded_error"),
    ],
)
async def test_an_error_is_sent_whole_with_what_belongs_to_it(kind, more, anthropic):
    error: Any = getattr(errors, kind)("no")
    for path in ("/v1/chat/completions", "/v1/messages"):
        start, body = await sent_by(lambda send, path=path: send_error(send, error, path, [(b"x-mine", b"1")]))
        told = {name.decode(): value.decode() for name, value in start["headers"]}
        length = {"content-length": str(len(body["body"]))}
        assert told == {"x-mine": "1", "content-type": "application/json", **more, **length}
        assert start["status"] == error.status
        assert body["body"] == error.body() or json.loads(body["body"])["error"]["type"] == anthropic


HEADERS = [(b"origin", b"https://a"), (b"access-control-request-method", b"POST")]

SCOPE = {"method": "OPTIONS", "path": "/v1/x", "query_string": b"a=b", "headers": HEADERS}


def before(*script: Said | Exception) -> tuple[Preflights, ScriptedUpstream]:
    upstream = ScriptedUpstream(*script)
    return Preflights(pool_of(upstream, "a", "b"), upstream), upstream


async def answered(those: Preflights) -> list[Any]:
    scope = {**SCOPE, "headers": [*HEADERS, (b"authorization", b"x")]}
    return await sent_by(lambda send: those.answer(scope, "id-1", send))


def test_a_browser_names_its_site_and_what_it_is_about_to_do():
    lacks = ({"method": "GET"}, {"headers": HEADERS[:1]}, {"headers": HEADERS[1:]})
    assert is_preflight(SCOPE) and not any(is_preflight({**SCOPE, **more}) for more in lacks)


async def test_what_a_worker_says_is_passed_on_up_to_a_bound_and_no_key_goes_to_it():
    allowed = (b"access-control-allow-origin", b"https://a")
    said = Said(200, b"x" * 65_535, b"y", headers=[allowed, (b"X-Request-Id", b"the worker's")])
    those, upstream = before(said, too_large := Said(200, b"x" * 65_536, b"y"))
    start, body = await answered(those)
    length = (b"content-length", b"65536")
    assert (start["status"], start["headers"]) == (200, [allowed, (b"x-request-id", b"id-1"), length])
    assert len(body["body"]) == 65_536 and said.closed
    (sent,) = upstream.sent
    assert (sent.method, sent.url, sent.headers) == ("OPTIONS", "http://a/v1/x?a=b", dict(HEADERS))
    with pytest.raises(WorkerFailed, match="too large"):
        await answered(those)
    assert too_large.closed == 1


@pytest.mark.parametrize("failure", [Unreachable("refused"), Broken("gone"), Said(200, b"a", Broken("gone"))])
async def test_a_worker_that_fails_is_named_as_the_cause_and_where_none_is_ready_nobody_is_asked(failure):
    those, upstream = before(failure)
    with pytest.raises(WorkerFailed):
        await answered(those)
    assert not isinstance(failure, Said) or failure.closed == 1
    upstream.say = lambda sent: Unreachable("refused")
    for worker in those._pool.workers:
        those._pool.mark_down(worker)
    with pytest.raises(NoWorker):
        await answered(those)
    assert [sent.method for sent in upstream.sent].count("OPTIONS") == 1


async def test_32_are_asked_at_once_and_each_gives_its_place_back_however_it_ends():
    those, upstream = before()
    for failure in (None, Broken("gone"), None):
        upstream.say = lambda sent, failure=failure: failure or Said(200)
        upstream.may_answer.clear()
        waiting = [asyncio.create_task(answered(those)) for _ in range(33)]
        with pytest.raises(Overloaded):
            await waiting[32]
        assert [each.done() for each in waiting] == [False] * 32 + [True]
        upstream.may_answer.set()
        ended = await asyncio.gather(*waiting[:32], return_exceptions=True)
        assert {isinstance(each, WorkerFailed) for each in ended} == {failure is not None}


NUMBER = "9" * 5000  # more digits than Python reads


@pytest.mark.parametrize(
    ("setting", "good", "bad"),
    [
        ("api_keys", entry("ann"), entry("bob") + f"max_inflight = {NUMBER}\n"),
        ("api_keys", entry("ann"), entry("bob") * 2),
        ("workers_file", "worker = []", f'[[worker]]\nurl = "http://127.0.0.1:9"\nmax_inflight = {NUMBER}\n'),
        ("workers_file", "worker = []", "a = " + "[" * 5000 + "]" * 5000),
        ("prefixes_file", "[]", '[{"name":"a","body":{"messages":[{}],"model":"m","seed":' + NUMBER + "}}]"),
    ],
)
async def test_a_file_that_its_reader_chokes_on_is_told_as_not_read_whichever_it_is(
    tmp_path, caplog, setting, good, bad
):
    """By a metric, and once by a line; a key that it would revoke is valid until that is mended."""
    path = tmp_path / "file"
    path.write_text(good)
    gateway = Gateway(Settings(worker=() if setting == "workers_file" else ("http://127.0.0.1:9",), **{setting: path}))
    value = gateway.metrics.registry.get_sample_value
    path.write_text(bad)
    for _ in range(2):
        gateway.read_files()
    assert value("seamark_file_current", {"setting": setting}) == 0.0
    assert value("seamark_config_reload_errors_total", {"file": setting}) == 1.0
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"{setting}: {path}") and "stays in force" in line and "\n" not in line and len(line) < 300
    path.write_text(good + "\n")
    gateway.read_files()
    assert value("seamark_file_current", {"setting": setting}) == 1.0
    others = {"api_keys", "workers_file", "prefixes_file"} - {setting}
    assert {value("seamark_file_current", {"setting": other}) for other in others} == {None}
    await gateway.stop()
    path.write_text(bad)
    with pytest.raises(SettingsError, match=f"^{setting}: "):
        Gateway(Settings(worker=("http://127.0.0.1:9",), **{setting: path}))


async def test_a_file_is_read_once_it_is_not_written_any_more_whatever_happens_to_others(tmp_path, monkeypatch):
    monkeypatch.setattr("proxy.pipeline.gateway.FILES_INTERVAL", 0)
    (path := tmp_path / "keys.toml").write_text(entry("ann"))
    (busy := tmp_path / "workers.toml").write_text('[[worker]]\nurl = "http://127.0.0.1:9"\n')
    gateway, parts = Gateway(Settings(workers_file=busy, api_keys=path)), iter(entry("bob").splitlines(keepends=True))
    names: list[set[str]] = []

    async def lull():
        names.append({name for name in ("ann", "bob") if gateway.keys.named(name) is not None})
        for written, more in ((path, next(parts, "")), (busy, "# a line\n")):
            with written.open("a") as file:
                file.write(more)

    monkeypatch.setattr(gateway.idle, "lull", lull)
    watching = asyncio.create_task(gateway._watch_files())
    await until(lambda: "bob" in names[-1] if names else False)
    watching.cancel()
    assert next(look for look, known in enumerate(names) if "bob" in known) < 9 and gateway.keys.file.is_current
    await gateway.stop()


async def test_nothing_of_a_worker_whose_answers_differ_is_used():
    gateway = Gateway(Settings(worker=("http://127.0.0.1:9",)))
    gateway.prefix_index.forget_all, gateway.shelf.tell = Mock(), Mock()
    (worker,) = gateway.pool.workers
    gateway._distrust(worker)
    gateway.prefix_index.forget_all.assert_called_once_with(worker.boot)
    gateway.shelf.tell.assert_called_once_with(worker, Change.DISTRUSTED)


def test_the_lack_of_opentelemetry_is_a_matter_of_the_setting(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "proxy.observability.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SettingsError, match="otlp_traces_endpoint"):
        Gateway(Settings(worker=("http://127.0.0.1:9",), otlp_traces_endpoint="http://127.0.0.1:9"))


# The class that alone assigns to an attribute of these names, on whatever object.
WRITERS = {
    "Reply": {"failure", "started"},  # which make the status
    "Exchange": {"expected", "response_id", "kept_id"},
    "Dispatcher": {"slot", "under_way"},  # of an API key
    "Slot": {"inflight", "prefill_tokens", "dispatched"},
    "Worker": {"probed", "takes_hints", "match_unit", "draft_gate"},  # what a worker says of itself
    "WorkerPool": {"up"},
    "Accounting": {"outcome", "record", "reason", "change"},  # of the explanation
}


def test_each_fact_has_one_writer():
    found: defaultdict[str, set[str]] = defaultdict(set)
    for room in ("pipeline", "fleet", "routing", "observability"):
        for path in (Path(__file__).parents[3] / "proxy" / room).rglob("*.py"):
            for owner in ast.parse(path.read_text()).body:
                for node in ast.walk(owner):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        found[node.attr].add(getattr(owner, "name", path.stem))
    for writer, facts in WRITERS.items():
        assert {fact: found[fact] for fact in facts} == {fact: {writer} for fact in facts}
