"""The outcome of a request beside its answer: in the feed, and in a header of whole answers for those who ask."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine_patches.reporting import events_api
from engine_patches.reporting.events_api import (
    HEADER,
    LINES_AT_ONCE,
    LINES_PER_SECOND,
    LOAD_HEADER,
    MAX_KEPT,
    METRICS_PATH,
    PATH,
    SETTLE_SECONDS,
    EventsEndpoint,
    Feed,
)
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.state_events import StateStored
from tests.harness.virtual_time import VirtualTimeLoop


def admitted(name="a", reason="cold", hit_tokens=0, shared=0, resolved=()):
    return AdmittedRequest(f"chatcmpl-{name}-00000000", reason, hit_tokens, shared, resolved)


@pytest.fixture
def feed(monkeypatch) -> Feed:
    monkeypatch.setattr(events_api, "feed", Feed())
    return events_api.feed


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


def test_shared_tokens_and_resolved_entries_stand_beside_the_outcomes_in_their_order(feed):
    feed.add_outcome(admitted("a", "hit", 160, 176, (163, 0)))
    feed.add_outcome(admitted("b"))
    answer = feed.after(0)
    assert answer["outcomes"] == [("a", "hit", 160), ("b", "cold", 0)]
    assert answer["resolved"] == [("a", 176, (163, 0)), ("b", 0, ())]
    assert feed.after(1, feed.boot)["resolved"] == [("b", 0, ())]


def test_an_answer_carries_its_outcome(feed):
    feed.add_outcome(admitted("a", "hit", 160, 176, (163, 0, 990)))
    assert answered(ASKS) == {b"content-type": b"application/json", HEADER: b"hit,160,176,163:0:990"}


RESPONSE = b'{"id":"resp_0af3","created_at":1,"output":[{"id":"msg_1"}]}'


@pytest.mark.parametrize("body", [RESPONSE, RESPONSE.replace(b":", b": "), RESPONSE.replace(b"resp_", b"")])
def test_a_response_carries_the_outcome_of_the_request_that_is_named_after_it(feed, body):
    feed.add_outcome(AdmittedRequest("resp_0af3_0-00000000", "hit", 160, 176, (163,)))
    feed.add_outcome(admitted("a"))
    told = answered(ASKS, path="/v1/responses", body=body)
    assert told == {b"content-type": b"application/json", HEADER: b"hit,160,176,163"}


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", RESPONSE.replace(b"0af3", b"other"), b" " * 2000 + RESPONSE])
def test_a_response_of_another_name_carries_none(feed, body):
    feed.add_outcome(AdmittedRequest("resp_0af3_0-00000000", "hit", 160, 176, (163,)))
    assert HEADER not in answered(ASKS, path="/v1/responses", body=body)
    assert HEADER not in answered(ASKS, b"text/event-stream", path="/v1/responses", body=RESPONSE)
    assert HEADER not in answered(ASKS, path="/v1/responses", body=RESPONSE, status=404)


def test_without_a_hint_there_are_no_positions(feed):
    feed.add_outcome(admitted("a", "no_boundary"))
    assert answered(ASKS)[HEADER] == b"no_boundary,0,0,"


def test_an_id_that_comes_again_gets_its_own_outcome_or_none(feed):
    feed.add_outcome(admitted("a", "cold"))
    feed.add_outcome(admitted("a", "hit", 160))
    assert answered(ASKS)[HEADER].startswith(b"hit,")
    assert HEADER not in answered(ASKS)


def test_a_long_id_is_not_kept_whole(feed):
    feed.add_outcome(admitted("a" * 1_000_000))
    feed.add_event(0, 1, StateStored("chatcmpl-" + "a" * 1_000_000 + "-00000000", 16, ()))
    assert len(json.dumps(feed.after(0))) < 5_000


def test_a_request_with_several_answers_has_the_outcome_of_the_first_one(feed):
    for child, shared in enumerate((0, 992, 992)):
        feed.add_outcome(AdmittedRequest(f"{child}_chatcmpl-a-00000000", "hit" if child else "cold", 0, shared, ()))
    feed.add_outcome(admitted("1_b"))  # a client's own name
    assert [name for name, *_ in feed.after(0)["outcomes"]] == ["a", "1_b"]
    assert answered(ASKS)[HEADER] == b"cold,0,0,"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"x-request-id", b"a")],
        [(HEADER, b"0"), (b"x-request-id", b"a")],
        [(HEADER, b"1")],
        [*ASKS[1:], (b"x-request-id", b"b")],
    ],
    ids=["neither", "not asked", "asked not to", "no id", "unknown id"],
)
def test_no_other_answer_does(feed, headers):
    feed.add_outcome(admitted("a"))
    assert HEADER not in answered(headers)
    assert answered(ASKS)[HEADER]  # it is still there for who asks


def test_an_error_does_not_tell_the_outcome_of_an_earlier_stream_with_its_id(feed):
    feed.add_outcome(admitted("a", "hit", 160))
    assert HEADER not in answered(ASKS, b"text/event-stream")
    assert HEADER not in answered(ASKS, status=400)


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


def test_a_first_event_that_nothing_follows_is_not_kept_waiting():
    assert pieces_sent(b"opens", 0.1, b"first", b"second") == [
        (b"opens", True),
        0.1,
        (b"first", True),
        (b"second", True),
        (b"", False),
    ]


def test_pieces_keep_their_order_when_the_first_is_still_being_sent():
    assert pieces_sent(b"opens", 0.0, b"first", b"second") == [
        0.0,
        (b"opens", True),
        (b"first", True),
        (b"second", True),
        (b"", False),
    ]


def test_an_answer_that_ends_with_its_first_piece_ends():
    assert pieces_sent(b"all ", b"of it") == [(b"all of it", False)]
    assert pieces_sent() == [(b"", False)]


def test_pieces_of_a_stream_that_no_gateway_asked_for_stay_as_they_are():
    assert pieces_sent(b"opens", b"first", headers=[]) == [(b"opens", True), (b"first", True), (b"", False)]


def test_what_can_wait_is_done_in_its_order_a_little_later_or_when_somebody_reads(feed):
    done = []

    async def scenario():
        clock = asyncio.get_running_loop().time
        for number in range(3):
            feed.later(lambda number=number: done.append((number, clock())))
        assert done == []
        await asyncio.sleep(SETTLE_SECONDS)
        assert done == [(number, SETTLE_SECONDS) for number in range(3)]
        feed.later(lambda: done.append("read"))
        feed.after(0)
        assert done[3:] == ["read"]
        await asyncio.sleep(1.0)
        assert len(done) == 4

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(scenario())
    feed.later(lambda: done.append("no event loop"))
    assert done[4:] == ["no event loop"]


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", METRICS_PATH])
def test_metrics_are_read_with_what_was_put_off(feed, path, monkeypatch):
    done, read = [], []

    async def app(scope, receive, send):
        read.extend(done)

    async def scenario():
        feed.later(lambda: done.append("added up"))
        await EventsEndpoint(app)({"type": "http", "path": path, "headers": []}, None, None)

    monkeypatch.setattr(events_api, "_metrics", app)
    asyncio.run(scenario())
    assert read == ["added up"]


def test_what_is_not_for_the_plugin_goes_to_the_app_as_it_is_and_hurries_nothing(feed):
    done, passed = [], []

    async def app(scope, receive, send):
        passed.append(scope)

    async def scenario():
        feed.later(lambda: done.append("added up"))
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


def counted(*requests: tuple[str, int, int], feed: Feed) -> list:
    return [
        feed.loads.begin(f"{gateway},{prompt},{left}".encode(), f"{gateway}-{at}")
        for at, (gateway, prompt, left) in enumerate(requests)
    ]


def test_a_gateway_learns_what_others_have_here_and_nothing_of_its_own(feed):
    first, second, third = counted(("a", 1000, 400), ("b", 2000, 1900), ("b", 10, 10), feed=feed)
    assert feed.after(0, gateway="a")["load"] == (2, 1910)
    assert feed.after(0, gateway="b")["load"] == (1, 400)
    assert feed.after(0, gateway="c")["load"] == (3, 2310)
    assert "load" not in feed.after(0)
    feed.loads.answered(second)
    feed.loads.end(third)
    assert feed.after(0, gateway="a")["load"] == (1, 0)
    feed.loads.end(second)
    feed.loads.end(first)
    assert feed.after(0, gateway="c")["load"] == (0, 0)


def test_what_the_engine_has_computed_of_a_prompt_is_no_longer_to_be_done(feed):
    counted(("a", 1000, 400), feed=feed)
    for number, (end, left) in enumerate([(500, 400), (800, 200), (1000, 0)], start=1):
        feed.add_event(0, number, StateStored("chatcmpl-a-0-00000000", end, ()))
        assert feed.after(0, gateway="b")["load"] == (1, left)


def test_a_request_counts_from_its_head_to_its_end_and_its_prompt_until_the_answer_begins(feed):
    seen = []

    async def app(scope, receive, send):
        seen.append(feed.loads.beside("b"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append(feed.loads.beside("b"))
        await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
        seen.append(feed.loads.beside("b"))
        raise ConnectionError("the client has left")

    async def send(message):
        pass

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": [(LOAD_HEADER, b"a,1000,400")]}
    with pytest.raises(ConnectionError):
        asyncio.run(EventsEndpoint(app)(scope, None, send))
    assert seen == [(1, 400), (1, 400), (1, 0)] and feed.loads.beside("b") == (0, 0)


@pytest.mark.parametrize(
    "header", [b"", b"a", b"a,1", b"a,1,-1", b"a,1,1,1", b"x y,1,1", b"a" * 33 + b",1,1", b"a,1,999999999"]
)
def test_a_request_with_a_load_that_is_none_is_served_and_not_counted(feed, header):
    assert answered([*ASKS, (LOAD_HEADER, header)])[b"content-type"] == b"application/json"
    assert feed.loads.begin(header, "r") is None and feed.loads.beside("b") == (0, 0)


def test_a_gateway_that_waits_is_woken_by_others_and_not_by_itself(feed):
    async def scenario():
        own = asyncio.create_task(feed.wait_after(0, feed.boot, 60.0, "a", "0:0"))
        other = asyncio.create_task(feed.wait_after(0, feed.boot, 60.0, "b", "0:0"))
        await asyncio.sleep(0)
        counted(("a", 1000, 400), feed=feed)
        feed.wake_others("a")
        assert (await other)["load"] == (1, 400)
        assert not own.done()
        own.cancel()
        # What changed between two reads is not waited for.
        assert (await feed.wait_after(0, feed.boot, 60.0, "b", "0:0"))["load"] == (1, 400)

    asyncio.run(scenario())


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
        counted(("b", 1000, 400), feed=feed)
        feed.wake_others("b")

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

    query = f"boot={feed.boot}&after=0&wait=0&lines=1".encode()
    scope = {"type": "http", "path": PATH, "method": "GET", "query_string": query, "headers": []}
    asyncio.run(EventsEndpoint(None)(scope, None, send))
    head, *lines, end = sent
    assert dict(head["headers"])[b"x-accel-buffering"] == b"no" and b"content-length" not in dict(head["headers"])
    assert all(line["body"].endswith(b"\n") and line["more_body"] for line in lines)
    assert [json.loads(line["body"])["outcomes"] for line in lines] == [[["a", "cold", 0]]]
    assert not end.get("more_body")


def test_metrics_by_name_are_given_here_or_by_the_app_that_adds_up_those_of_several_servers(monkeypatch, tmp_path):
    async def app(scope, receive, send):
        sent.append(scope["path"])

    async def send(message):
        sent.append(message)

    query = b"name%5B%5D=process_start_time_seconds"
    scope = {"type": "http", "path": METRICS_PATH, "method": "GET", "query_string": query, "headers": []}
    sent: list = []

    async def receive():
        return {"type": "http.request", "body": b""}

    asyncio.run(EventsEndpoint(app)(scope, receive, send))
    lines = sent[-1]["body"].decode().splitlines()
    assert [line.split()[0] for line in lines if line[0] != "#"] == ["process_start_time_seconds"]
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    sent = []
    asyncio.run(EventsEndpoint(app)(scope, receive, send))
    assert sent == ["/metrics"] and scope["path"] == METRICS_PATH


def test_one_of_several_api_servers_says_nothing_of_load(feed):
    feed.has_all_events = False
    assert "load" not in feed.after(0, gateway="a")
