"""The outcome of a request beside its answer: in the feed, and in a header of whole answers for those who ask."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from engine_patches.reporting import events_api
from engine_patches.reporting.events_api import HEADER, METRICS_PATH, PATH, EventsEndpoint, Feed, Feeds, not_found
from engine_patches.scheduler.counters import AdmittedRequest
from tests.harness.virtual_time import VirtualTimeLoop


def on_virtual_time(scenario: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


def admitted(request_id: str, reason: str, *told: Any) -> AdmittedRequest:
    return AdmittedRequest(f"{request_id}-00000000", reason, *(told or (0, 0, ())))


@pytest.fixture
def feeds(monkeypatch) -> Feeds:
    monkeypatch.setattr(events_api, "feeds", Feeds())
    return events_api.feeds


@pytest.fixture
def feed(feeds) -> Feed:
    return feeds.main


def sent_by(app: Any, **scope: Any) -> list[Any]:
    """Messages that an application sends for a request."""
    sent: list[Any] = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": PATH, "query_string": b"", "headers": [], **scope}
    on_virtual_time(app(scope, receive, send))
    return sent


ASKS = [(b"x-request-id", b"a"), (HEADER, b"1")]


def answer_of(*messages: Any, headers: Any = ASKS, **scope: Any) -> list[Any]:
    """What becomes of an application's messages behind the middleware."""

    async def app(scope, receive, send):
        for message in messages:
            await send(message)
            await asyncio.sleep(0)  # so that no pieces go out in one

    return sent_by(EventsEndpoint(app), headers=headers, **{"path": "/v1/chat/completions", **scope})


def head(kind: bytes = b"application/json", status: int = 200) -> Any:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def piece(body: bytes = b"{}", more_body: bool = False) -> Any:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


RESPONSE = b'{"id":"resp_0af3","created_at":1,"output":[{"id":"msg_1"}]}'

TELLS, RESPONDS = b"hit,160,176,163:0", {"path": "/v1/responses"}


@pytest.mark.parametrize(
    ("kind", "body", "how", "told"),
    [
        (b"application/json", b"{}", {}, TELLS),
        (b"application/json", b"{}", {"type": "websocket"}, None),
        (b"application/json", b"{}", {"headers": [ASKS[0]]}, None),  # nobody asks
        (b"application/json", b"{}", {"headers": [ASKS[0], (HEADER, b"0")]}, None),
        (b"application/json", b"{}", {"headers": [ASKS[1]]}, None),
        (b"application/json", b"{}", {"headers": [ASKS[1], (b"x-request-id", b"c")]}, None),
        (b"text/event-stream; charset=utf-8", b"{}", {}, None),
        (b"application/json", RESPONSE, RESPONDS, b"cold,0,0,"),
        (b"application/json", RESPONSE.replace(b"resp_", b"").replace(b":", b": "), RESPONDS, b"cold,0,0,"),
        (b"application/json", RESPONSE.replace(b"0af3", b"other"), RESPONDS, None),
        (b"application/json", b"", RESPONDS, None),
        (b"application/json", b" " * (events_api.ID_WITHIN - 16) + b'"id":"resp_0af3" ', RESPONDS, b"cold,0,0,"),
        (b"application/json", b" " * (events_api.ID_WITHIN - 15) + b'"id":"resp_0af3" ', RESPONDS, None),
        (b"text/event-stream", RESPONSE, RESPONDS, None),
    ],
)
def test_a_whole_answer_carries_the_outcome_of_its_own_request_to_who_asks(feed, kind, body, how, told):
    feed.add_outcome(admitted("chatcmpl-a", "hit", 160, 176, (163, 0)))
    feed.add_outcome(admitted("resp_0af3_0", "cold"))
    start, *rest = answer_of(head(kind), piece(body), **how)
    assert dict(start["headers"]).get(HEADER) == told and rest == [piece(body)]
    failed, *_ = answer_of(head(kind, 404), piece(body), **how)
    assert HEADER not in dict(failed["headers"]), "an error tells nothing of an earlier request with its id"


def test_an_outcome_that_its_answer_has_overtaken_is_waited_for_where_it_comes(feeds, feed, monkeypatch):
    for collector, found, comes in ((os.getpid(), True, True), (os.getpid(), False, False), (1, True, False)):
        hit = [SimpleNamespace(header=TELLS)] if found else []
        tries = itertools.chain([None], hit, itertools.repeat(None))
        monkeypatch.setattr(feed, "take_latest", lambda _, tries=tries: next(tries))
        feeds.collected_by = collector
        assert (HEADER in dict(answer_of(head(), piece())[0]["headers"])) is comes


def test_the_head_of_a_response_waits_for_its_first_piece_alone(feed):
    feed.add_outcome(admitted("resp_0af3_0", "hit"))
    start, *pieces = answer_of(head(), piece(b"{", more_body=True), piece(RESPONSE), path="/v1/responses")
    assert start == head() and b"".join(each["body"] for each in pieces) == b"{" + RESPONSE
    assert feed.take_latest("0af3_0") is not None


@pytest.mark.parametrize(
    ("steps", "sent"),
    [
        ([b"opens ", b"first", 0.1, b"second", b"third"], [b"opens first", 0.1, b"second", b"third", b"END"]),
        ([b"alone", 5.0, b"late"], [b"alone", 5.0, b"late", b"END"]),
        ([b"all ", b"of it"], [b"all of itEND"]),
        ([], [b"END"]),
    ],
)
def test_the_first_events_of_a_stream_go_out_in_one_piece_if_they_come_together(steps, sent):
    found: list[Any] = []

    async def app(scope, receive, send):
        await send(head(b"text/event-stream"))
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
                found.append(step)
            else:
                await send(piece(step, more_body=True))
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(0)  # for a client that reads slowly
            found.append(message["body"] + (b"" if message.get("more_body") else b"END"))

    on_virtual_time(EventsEndpoint(app)({"type": "http", "path": "/v1/x", "headers": ASKS}, None, send))
    assert found == sent


@pytest.mark.parametrize(
    ("path", "hurries"),
    [("/metrics", True), ("/metrics/x", True), (METRICS_PATH, True), ("/v1/metrics", False), ("/v1/models", False)],
)
def test_only_metrics_hurry_what_was_put_off(feeds, path, hurries, monkeypatch):
    done, read = [], []

    async def app(scope, receive, send):
        read.append((scope["path"], bool(done)))

    async def scenario(scope, receive, send):
        feeds.later(lambda: done.append(1))
        await EventsEndpoint(app)(scope, receive, send)

    monkeypatch.setattr(events_api, "_metrics", app)
    sent_by(scenario, path=path)
    assert read == [(path, hurries)]


@pytest.mark.parametrize(
    ("query", "status", "told"),
    [
        ("after=1&after=x", 400, "after: "),
        ("after=x&after=0", 200, ""),  # the last one counts
        ("after=", 200, ""),  # as if it were not there
        ("wait=1.1234567", 400, "wait: "),
        ("wait=1234567", 400, "wait: "),
        ("engine=0&engine=5", 404, "engine: "),
        *(
            (urlencode({name: digits}), status, f"{name}: ")
            for digits in ("9" * 19, "1" * 5000, "-1", "1e3", "1_0", "\u0661")  # Python reads at most 4,300 digits
            for name, status in (("after", 400), ("wait", 400), ("engine", 404))
        ),
    ],
)
def test_a_value_that_no_gateway_sends_is_refused_by_name(feeds, query, status, told):
    start, body = sent_by(EventsEndpoint(None), query_string=query.encode())
    assert start["status"] == status and json.loads(body["body"]).get("error", "").startswith(told)
    told_length = dict(start["headers"])[b"content-length"]
    assert int(told_length) == len(body["body"]) and dict(start["headers"])[b"content-type"] == b"application/json"


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE"])
def test_outcomes_can_only_be_read_and_beside_what_is_read_there_is_nothing(feeds, method):
    start, body = sent_by(EventsEndpoint(None), method=method)
    assert start["status"] == 405 and "GET" in json.loads(body["body"])["error"]
    start, body = sent_by(not_found, path="/", method=method)
    assert start["status"] == 404 and PATH in body["body"].decode() and METRICS_PATH in body["body"].decode()
    assert sent_by(not_found, type="lifespan") == []


@pytest.mark.parametrize(
    ("query", "seconds"),
    [("", 0.0), ("wait=2.5", 2.5), ("wait=9.999999", 9.999999), ("wait=11", 10.0), ("wait=100000", 10.0)],
)
def test_a_read_waits_as_long_as_it_asks_for_and_not_much_longer(feeds, query, seconds):
    times: list[float] = []

    async def timed(scope, receive, send):
        await EventsEndpoint(None)(scope, receive, send)
        times.append(asyncio.get_running_loop().time())

    for boot in (feeds.main.boot, "another"):
        sent_by(timed, query_string=f"boot={boot}&{query}".encode())
    assert times == pytest.approx([seconds, seconds])


def test_lines_are_parts_of_one_answer_that_no_proxy_collects(feed):
    feed.add_outcome(admitted("chatcmpl-a", "cold"))
    query = f"boot={feed.boot}&after=0&wait=0.000001"
    start, *lines, end = sent_by(EventsEndpoint(None), query_string=query.encode())
    assert dict(start["headers"]) == {b"content-type": b"application/x-ndjson", b"x-accel-buffering": b"no"}
    assert all(line["body"].endswith(b"\n") and line["more_body"] for line in lines) and not end.get("more_body")
    first, *later = [json.loads(line["body"])["outcomes"] for line in lines]
    assert first == [["a", "cold", 0]] and not any(later)
    plain, _ = sent_by(EventsEndpoint(None), query_string=query.partition("&wait")[0].encode())
    assert b"content-length" in dict(plain["headers"])


@pytest.mark.parametrize("path", [PATH, METRICS_PATH])
async def test_an_api_server_beside_others_passes_on_what_the_collector_tells(feeds, path, tmp_path, monkeypatch):
    """As it comes, with its status; and says so if that process has ended."""
    asked_for, sent, may_go_on = [], [], asyncio.Event()

    async def collector(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked_for.append((await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[0])
        start = "HTTP/1.1 418 x\r\ncontent-type: application/x-ndjson\r\nx-own: 1\r\nconnection: close\r\n\r\n"
        writer.write(start.encode() + b"first\n")
        await may_go_on.wait()
        writer.write(b"second\n")
        writer.close()

    async def send(message):
        sent.append(message)
        if message.get("body") == b"first\n":
            may_go_on.set()

    monkeypatch.setenv(events_api.FOLDER, str(tmp_path))
    scope = {"type": "http", "path": path, "method": "GET", "query_string": b"after=3&lines=1", "headers": []}
    async with await asyncio.start_unix_server(collector, tmp_path / events_api.READ_INSIDE):
        await EventsEndpoint(None)(scope, None, send)
    (tmp_path / events_api.READ_INSIDE).unlink(missing_ok=True)
    await EventsEndpoint(None)(scope, None, send)
    start, *pieces, gone, said = sent
    assert asked_for == [f"GET {path}?after=3&lines=1 HTTP/1.1"]
    assert start["status"] == 418 and start["headers"] == [(b"content-type", b"application/x-ndjson")]
    assert [(each["body"], each.get("more_body", False)) for each in pieces] == [
        (b"first\n", True),
        (b"second\n", True),
        (b"", False),
    ]
    assert gone["status"] == 503 and b"has ended" in said["body"]
