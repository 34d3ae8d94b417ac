"""The outcome of a request beside its answer: in the feed, and in a header of whole answers for those who ask."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from urllib.parse import urlencode

import pytest

from engine_patches.reporting import events_api
from engine_patches.reporting.events_api import (
    HEADER,
    ID_WITHIN,
    LINES_AT_ONCE,
    LINES_PER_SECOND,
    MAX_ID,
    MAX_KEPT,
    MAX_TOLD,
    MAX_WAIT,
    METRICS_PATH,
    PATH,
    SETTLE_SECONDS,
    EventsEndpoint,
    Feed,
    Feeds,
    Outcome,
    not_found,
)
from engine_patches.reporting.report import EngineReport
from engine_patches.scheduler.counters import AdmittedRequest, DraftedRequest
from engine_patches.scheduler.load import GatewayLoad
from tests.harness.virtual_time import VirtualTimeLoop


def admitted(name="a", reason="cold", hit_tokens=0, shared=0, resolved=()):
    return AdmittedRequest(f"chatcmpl-{name}-00000000", reason, hit_tokens, shared, resolved)


@pytest.fixture
def feeds(monkeypatch) -> Feeds:
    monkeypatch.setattr(events_api, "feeds", Feeds())
    return events_api.feeds


@pytest.fixture
def feed(feeds) -> Feed:
    return feeds.main


def answered(
    headers, content_type=b"application/json", scheme="http", path="/v1/chat/completions", status=200, body=b"{}"
):
    """Headers of an application's answer behind the middleware."""
    sent = []

    async def app(scope, receive, send):
        start = {"type": "http.response.start", "status": status, "headers": [(b"content-type", content_type)]}
        await send(start)
        await send({"type": "http.response.body", "body": body})

    async def send(message):
        sent.append(message)

    asyncio.run(EventsEndpoint(app)({"type": scheme, "path": path, "headers": headers}, None, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return dict(sent[0]["headers"])


ASKS = [(b"x-request-id", b"a"), (HEADER, b"1")]


def test_what_became_of_pins_is_told_whether_or_not_an_answer_has_carried_it(feed):
    feed.add_outcome(admitted("a"))
    feed.add_pin("chatcmpl-a-0a1b2c3d", "pinned")
    feed.add_pin("chatcmpl-b-0a1b2c3d", "no_room")
    assert feed.take_latest("a").pin == "pinned"
    assert feed.after(0)["pins"] == [("a", "pinned"), ("b", "no_room")]
    assert feed.after(2, feed.boot)["pins"] == [("b", "no_room")]


def test_what_became_of_drafts_is_told_by_the_request_that_had_them(feeds):
    drafted = [DraftedRequest("chatcmpl-a-0a1b2c3d", 7, 12)]
    told = EngineReport(match_unit=16, block_size=64, window_of=[("cmpl-a-0-0a1b2c3d", "healed")], drafted=drafted)
    assert {"windows", "drafted", "drafts"}.isdisjoint(feeds.main.after(0))
    feeds.add_drafts(told)
    assert feeds.main.after(0)["windows"] == [("a", "healed")] and feeds.main.after(0)["drafted"] == [("a", 7, 12)]
    assert feeds.main.after(1, feeds.main.boot)["drafted"] == [("a", 7, 12)]
    assert "windows" not in feeds.main.after(1, feeds.main.boot)
    assert "drafts" not in feeds.main.after(0)  # this engine has none that it would tell of
    feeds.add_drafts(EngineReport(match_unit=16, block_size=64, drafts=("closed", "0f", "it drafts worse")))
    assert feeds.main.after(0)["drafts"] == {"state": "closed", "id": "0f", "why": "it drafts worse"}
    assert feeds.main.after(feeds.main.after(0)["cursor"], feeds.main.boot)["drafted"] == []


def test_an_answer_carries_its_outcome(feed):
    feed.add_outcome(admitted("a", "hit", 160, 176, (163, 0, 990)))
    assert answered(ASKS) == {b"content-type": b"application/json", HEADER: b"hit,160,176,163:0:990"}


def test_an_outcome_that_its_answer_has_overtaken_is_waited_for_where_it_comes(feeds, feed, monkeypatch):
    hit = Outcome("a", "hit", 160, 176, ())
    for collector, found, comes in ((os.getpid(), [hit], True), (os.getpid(), [], False), (1, [hit], False)):
        tries = itertools.chain([None], found, itertools.repeat(None))
        monkeypatch.setattr(feed, "take_latest", lambda _, tries=tries: next(tries))
        feeds.collected_by = collector
        assert (HEADER in answered(ASKS)) is comes


RESPONSE = b'{"id":"resp_0af3","created_at":1,"output":[{"id":"msg_1"}]}'


def test_a_request_with_several_answers_has_the_outcome_of_the_first_one(feed):
    for child, shared in enumerate((0, 992, 992)):
        feed.add_outcome(AdmittedRequest(f"{child}_chatcmpl-a-00000000", "hit" if child else "cold", 0, shared, ()))
    feed.add_outcome(admitted("1_b"))  # a client's own name
    assert [name for name, *_ in feed.after(0)["outcomes"]] == ["a", "1_b"]
    assert answered(ASKS)[HEADER] == b"cold,0,0,"


def test_streams_and_other_connections_do_not(feed):
    feed.add_outcome(admitted("a"))
    assert HEADER not in answered(ASKS, b"text/event-stream; charset=utf-8")
    assert HEADER not in answered(ASKS, scheme="websocket")
    assert HEADER in answered(ASKS)


def pieces_sent(*steps: bytes | float, headers=ASKS):
    """Bodies that go out for an application that sends `steps`, and waits for as many seconds between."""
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
                sent.append(step)
            else:
                await send({"type": "http.response.body", "body": step, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.sleep(0)  # for a client that reads slowly
            sent.append((message["body"], message.get("more_body", False)))

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": headers}
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(EventsEndpoint(app)(scope, None, send))
    return sent


def test_the_first_events_of_a_stream_go_out_in_one_piece_if_they_come_together():
    assert pieces_sent(b"opens ", b"this, too, ", b"first", 0.1, b"second", b"third", 0.1) == [
        (b"opens this, too, first", True),
        0.1,
        (b"second", True),
        (b"third", True),
        0.1,
        (b"", False),
    ]


def test_an_answer_that_ends_with_its_first_piece_ends():
    assert pieces_sent(b"all ", b"of it") == [(b"all of it", False)]
    assert pieces_sent() == [(b"", False)]


def test_what_can_wait_is_done_in_its_order_a_little_later_or_when_somebody_reads(feeds):
    done = []

    async def scenario():
        clock = asyncio.get_running_loop().time
        for number in range(3):
            feeds.later(lambda number=number: done.append((number, clock())))
        assert done == []
        await asyncio.sleep(SETTLE_SECONDS)
        assert done == [(number, SETTLE_SECONDS) for number in range(3)]
        feeds.later(lambda: done.append("read"))
        feeds.catch_up()
        assert done[3:] == ["read"]
        await asyncio.sleep(1.0)
        assert len(done) == 4

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
    feeds.later(lambda: done.append("no event loop"))
    assert done[4:] == ["no event loop"]


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", METRICS_PATH])
def test_metrics_are_read_with_what_was_put_off(feeds, path, monkeypatch):
    done, read = [], []

    async def app(scope, receive, send):
        read.extend(done)

    async def scenario():
        feeds.later(lambda: done.append("added up"))
        await EventsEndpoint(app)({"type": "http", "path": path, "headers": []}, None, None)

    monkeypatch.setattr(events_api, "_metrics", app)
    asyncio.run(scenario())
    assert read == ["added up"]


def test_what_is_not_for_the_plugin_goes_to_the_app_as_it_is_and_hurries_nothing(feeds):
    done, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope)

    async def scenario():
        feeds.later(lambda: done.append("added up"))
        for scope in scopes:
            await EventsEndpoint(app)(scope, None, None)
        assert not done

    scopes = [{"type": "lifespan"}, {"type": "http", "path": "/v1/chat/completions", "headers": []}]
    asyncio.run(scenario())
    assert passed == scopes


def test_what_is_kept_for_answers_is_bounded(feed):
    for number in range(MAX_KEPT + 10):
        feed.add_outcome(admitted(str(number)))
    assert feed.take_latest("9") is None and feed.take_latest("10") is not None
    assert len(feed._latest) == MAX_KEPT - 1


def reported(*events, engine=0, engines=1, loads=(), requests=()) -> EngineReport:
    """A report of an engine."""
    return EngineReport(
        engine=engine,
        engines=engines,
        match_unit=16,
        block_size=384,
        events=list(events),
        loads=dict(loads),
        requests=list(requests),
    )


def test_a_gateway_learns_what_others_have_the_engine_do_and_nothing_of_its_own(feeds):
    feeds.add_events(reported(loads={"a": (1, 400), "b": (2, 1910), "": (3, 7)}))
    assert feeds.main.after(0, gateway="a")["load"] == (5, 1917)
    assert feeds.main.after(0, gateway="b")["load"] == (4, 407)
    assert feeds.main.after(0, gateway="c")["load"] == (6, 2317)
    assert "load" not in feeds.main.after(0)
    feeds.add_events(reported())
    assert feeds.main.after(0, gateway="c")["load"] == (0, 0)


def test_a_gateway_that_waits_is_woken_by_others_and_not_by_itself(feeds):
    async def scenario():
        own = asyncio.create_task(feeds.main.wait_after(0, feeds.main.boot, 60.0, "a", "0:0"))
        other = asyncio.create_task(feeds.main.wait_after(0, feeds.main.boot, 60.0, "b", "0:0"))
        await asyncio.sleep(0)
        feeds.main.set_loads({"a": GatewayLoad(1, 400)})
        assert (await other)["load"] == (1, 400)
        await asyncio.sleep(0)
        assert not own.done()
        own.cancel()
        # What changed between two reads is not waited for.
        assert (await feeds.main.wait_after(0, feeds.main.boot, 60.0, "b", "0:0"))["load"] == (1, 400)

    asyncio.run(scenario())


@pytest.mark.parametrize("digits", ["9" * 19, "1" * 5000, "-1", "1e3", "1_0", "\u0661"])
def test_a_number_that_no_gateway_sends_is_refused_by_name(feeds, digits):
    """Python reads at most 4,300 digits."""
    for name, status in (("after", 400), ("wait", 400), ("engine", 404)):
        code, body = asked(PATH, urlencode({name: digits}))
        assert code == status and json.loads(body)["error"].startswith(f"{name}: ")


def asked(path: str, query: str = "") -> tuple[int, bytes]:
    """Status and body of what is read behind the middleware."""
    sent: list = []

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": path, "method": "GET", "query_string": query.encode(), "headers": []}
    asyncio.run(EventsEndpoint(None)(scope, receive, send))
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def read_in_lines(feed, seconds, happens):
    """Answers of one read, each with when it came, while `happens` runs."""

    async def scenario():
        clock, beside = asyncio.get_running_loop().time, asyncio.create_task(happens())
        answers = feed.answers(0, feed.boot, seconds, "a", "0:0")
        found = [(clock(), answer) async for answer in answers]
        beside.cancel()
        return found

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario())


def test_a_read_in_lines_gives_each_thing_once_as_it_comes_and_ends(feed):
    async def happens():
        for at, name in ((0.5, "a"), (0.25, "b")):
            await asyncio.sleep(at)
            feed.add_outcome(admitted(name))
            feed.wake_readers()
        await asyncio.sleep(0.5)
        feed.set_loads({"b": GatewayLoad(1, 400)})

    found = read_in_lines(feed, 2.0, happens)
    assert [at for at, _ in found] == [0.5, 0.75, 1.25, 2.0]
    assert [[name for name, *_ in answer["outcomes"]] for _, answer in found] == [["a"], ["b"], [], []]
    assert [answer["load"] for _, answer in found] == [(0, 0), (0, 0), (1, 400), (1, 400)]
    assert [answer["cursor"] for _, answer in found] == [1, 2, 2, 2] and not any(a["reset"] for _, a in found)
    assert not feed._readers


def test_a_busy_feed_gives_no_more_lines_than_allowed_and_leaves_nothing_out(feed):
    async def happens():
        for number in range(10**6):
            feed.add_outcome(admitted(str(number)))
            feed.wake_readers()
            await asyncio.sleep(0.01)

    found = read_in_lines(feed, 10.0, happens)
    assert 10 * LINES_PER_SECOND < len(found) <= LINES_AT_ONCE + 10 * LINES_PER_SECOND + 2
    names = [int(name) for _, answer in found for name, *_ in answer["outcomes"]]
    assert names == list(range(len(names))) and len(names) > 900


def test_lines_are_parts_of_one_answer_that_no_proxy_collects(feed):
    feed.add_outcome(admitted("a"))
    sent = []

    async def send(message):
        sent.append(message)

    query = f"boot={feed.boot}&after=0&wait=0.000001".encode()
    scope = {"type": "http", "path": PATH, "method": "GET", "query_string": query, "headers": []}
    asyncio.run(EventsEndpoint(None)(scope, None, send))
    head, *lines, end = sent
    assert dict(head["headers"])[b"x-accel-buffering"] == b"no" and b"content-length" not in dict(head["headers"])
    assert all(line["body"].endswith(b"\n") and line["more_body"] for line in lines)
    assert [json.loads(line["body"])["outcomes"] for line in lines] == [[["a", "cold", 0]]]
    assert not end.get("more_body")


@pytest.mark.parametrize("path", [PATH, METRICS_PATH])
def test_an_api_server_beside_others_passes_on_what_the_collecting_process_tells(feeds, path, tmp_path, monkeypatch):
    """As it comes, with its status; and says so if that process has ended."""

    async def scenario() -> list:
        asked_for: list[str] = []
        may_go_on = asyncio.Event()

        async def collector(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked_for.append((await reader.readuntil(b"\r\n\r\n")).decode().splitlines()[0])
            head = "HTTP/1.1 418 x\r\ncontent-type: application/x-ndjson\r\nx-own: 1\r\nconnection: close\r\n\r\n"
            writer.write(head.encode() + b"first\n")
            await may_go_on.wait()
            writer.write(b"second\n")
            writer.close()

        sent: list = []

        async def send(message):
            sent.append(message)
            if message.get("body") == b"first\n":
                may_go_on.set()

        monkeypatch.setenv(events_api.FOLDER, str(tmp_path))
        scope = {"type": "http", "path": path, "method": "GET", "query_string": b"after=3&wait=1", "headers": []}
        server = await asyncio.start_unix_server(collector, tmp_path / events_api.READ_INSIDE)
        async with server:
            await EventsEndpoint(None)(scope, None, send)
        assert asked_for == [f"GET {path}?after=3&wait=1 HTTP/1.1"]
        (tmp_path / events_api.READ_INSIDE).unlink(missing_ok=True)
        await EventsEndpoint(None)(scope, None, send)
        return sent

    head, *pieces, gone, said = asyncio.run(scenario())
    assert head["status"] == 418 and head["headers"] == [(b"content-type", b"application/x-ndjson")]
    assert [piece["body"] for piece in pieces] == [b"first\n", b"second\n", b""]
    assert [piece.get("more_body", False) for piece in pieces] == [True, True, False]
    assert gone["status"] == 503 and b"has ended" in said["body"]


def test_the_numbers_that_gateways_and_documents_count_on():
    assert (MAX_KEPT, MAX_TOLD, MAX_ID, ID_WITHIN) == (8192, 2048, 512, 1024)
    assert (MAX_WAIT, SETTLE_SECONDS, LINES_PER_SECOND, LINES_AT_ONCE) == (10.0, 0.003, 10.0, 10.0)


def test_a_pin_is_told_of_each_feed_of_its_engine(feeds):
    request = admitted("a")
    report = reported(engine=1, engines=2, requests=[request])
    feeds.add_outcome(report, request)
    feeds.add_pin(report, request.request_id, "pinned")
    assert feeds.main.after(0)["pins"] == feeds.of(1).after(0)["pins"] == [("a", "pinned")]
    assert feeds.main.take_latest("a").header == b"cold,0,0,,pinned"


def test_drafts_are_told_of_each_feed_of_their_engine(feeds):
    drafted = [DraftedRequest("chatcmpl-a-0a1b2c3d", 7, 12)]
    told = EngineReport(match_unit=16, block_size=64, engine=1, engines=2, drafted=drafted, drafts=("open", "", ""))
    feeds.add_drafts(told)
    for feed in (feeds.main, feeds.of(1)):
        assert feed.after(0)["drafted"] == [("a", 7, 12)] and feed.after(0)["windows"] == []
    assert feeds.of(1).after(0)["drafts"]["state"] == "open" and "drafts" not in feeds.main.after(0)


def waited(feed: Feed, *read: object, happens: object = None) -> float:
    """Seconds after which a read of a feed that has one entry is answered."""

    async def scenario() -> float:
        loop = asyncio.get_running_loop()
        if happens is not None:
            loop.call_later(1.0, happens)
        await feed.wait_after(*read)
        return loop.time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario())


@pytest.mark.parametrize("which", [None, 0, 1])
def test_a_report_wakes_readers_of_its_engine_and_of_all(feeds, which):
    for engine in (0, 1):
        feeds.add_events(reported(engine=engine, engines=2))
    seconds = waited(
        feeds.of(which),
        0,
        feeds.main.boot,
        60.0,
        happens=lambda: feeds.add_events(reported((1, ["gone", "a"]), engine=1, engines=2)),
    )
    assert seconds == (60.0 if which == 0 else 1.0)


def asked_when(query: str) -> float:
    """Seconds after which a read is answered."""

    async def scenario() -> float:
        async def send(message):
            assert message.get("status", 200) == 200

        scope = {"type": "http", "path": PATH, "method": "GET", "query_string": query.encode(), "headers": []}
        await EventsEndpoint(None)(scope, None, send)
        return asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario())


@pytest.mark.parametrize(
    ("query", "seconds"),
    [("", 0.0), ("wait=2.5", 2.5), ("wait=9.999999", 9.999999), ("wait=11", 10.0), ("wait=100000", 10.0)],
)
def test_a_read_waits_as_long_as_it_asks_for_and_not_much_longer(feeds, query, seconds):
    assert asked_when(f"boot={feeds.main.boot}&{query}") == pytest.approx(seconds)
    assert asked_when(f"boot=another&{query}") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("query", "status", "told"),
    [
        ("after=1&after=x", 400, "after: "),
        ("after=x&after=0", 200, ""),
        ("after=", 200, ""),  # as if it were not there
        ("wait=1.1234567", 400, "wait: "),
        ("wait=1234567", 400, "wait: "),
        ("engine=0&engine=5", 404, "engine: "),
    ],
)
def test_of_a_parameter_the_last_value_counts(feeds, query, status, told):
    found, body = asked(PATH, query)
    assert found == status and json.loads(body).get("error", "").startswith(told)


def sent_by(app: object, **scope: object) -> list:
    """Messages that an application sends for a request."""
    sent: list = []

    async def send(message):
        sent.append(message)

    asyncio.run(app({"type": "http", "path": PATH, "query_string": b"", "headers": [], **scope}, None, send))
    return sent


@pytest.mark.parametrize("method", ["POST", "HEAD", "DELETE"])
def test_outcomes_can_only_be_read(feeds, method):
    head, body = sent_by(EventsEndpoint(None), method=method)
    assert head["status"] == 405 and "GET" in json.loads(body["body"])["error"]


def test_an_answer_says_what_it_is_and_how_long(feeds):
    head, body = sent_by(EventsEndpoint(None), method="GET")
    assert head["status"] == 200
    assert dict(head["headers"]) == {
        b"content-type": b"application/json",
        b"content-length": str(len(body["body"])).encode(),
    }
    head, *_ = sent_by(EventsEndpoint(None), method="GET", query_string=b"wait=0.1")
    assert head["status"] == 200 and dict(head["headers"])[b"content-type"] == b"application/x-ndjson"
    assert sent_by(EventsEndpoint(None), method="GET", query_string=b"wait=0")[0]["headers"] != head["headers"]


def test_beside_what_is_read_there_is_nothing():
    head, body = sent_by(not_found, path="/")
    assert head["status"] == 404 and PATH in body["body"].decode() and METRICS_PATH in body["body"].decode()
    assert sent_by(not_found, type="lifespan") == []


def answer_of(*messages: dict, path: str = "/v1/chat/completions") -> list:
    """What becomes of an application's messages behind the middleware."""

    async def app(scope, receive, send):
        for message in messages:
            await send(message)
            await asyncio.sleep(0)  # so that no pieces go out in one

    return sent_by(EventsEndpoint(app), path=path, headers=ASKS)


@pytest.mark.parametrize(("blanks", "is_found"), [(0, True), (ID_WITHIN - 16, True), (ID_WITHIN - 15, False)])
def test_a_responses_id_stands_at_its_beginning(feed, blanks, is_found):
    feed.add_outcome(AdmittedRequest("resp_0af3_0-00000000", "hit", 160, 176, (163,)))
    told = answered(ASKS, path="/v1/responses", body=b" " * blanks + b'"id":"resp_0af3" ')
    assert (HEADER in told) is is_found


def test_the_head_of_a_response_waits_for_its_first_piece_alone(feed):
    feed.add_outcome(AdmittedRequest("resp_0af3_0-00000000", "hit", 160, 176, (163,)))
    start = {"type": "http.response.start", "status": 200, "headers": []}
    first = {"type": "http.response.body", "body": b"{", "more_body": True}
    second = {"type": "http.response.body", "body": RESPONSE}
    head, *pieces = answer_of(start, first, second, path="/v1/responses")
    assert head["headers"] == [] and b"".join(piece["body"] for piece in pieces) == b"{" + RESPONSE
    assert feed.take_latest("0af3_0") is not None


@pytest.mark.parametrize(("path", "hurries"), [("/metrics", True), ("/metrics/x", True), ("/v1/metrics", False)])
def test_only_metrics_hurry_what_was_put_off(feeds, path, hurries):
    done = []

    async def scenario():
        async def app(scope, receive, send):
            assert bool(done) is hurries

        feeds.later(lambda: done.append(1))
        await EventsEndpoint(app)({"type": "http", "path": path, "headers": []}, None, None)

    asyncio.run(scenario())
