"""What readers of a feed, and whole answers, are told of requests and states: each thing once, and what was lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine_patches.reporting import events_api
from engine_patches.reporting.events_api import HEADER, METRICS_PATH, PATH, EventsEndpoint, Feed, Feeds, client_id
from engine_patches.reporting.report import EngineReport
from engine_patches.scheduler.counters import AdmittedRequest, GatewayLoad
from engine_patches.scheduler.state_events import StateEvicted, StateStored
from tests.harness.virtual_time import VirtualTimeLoop


def on_virtual_time(scenario: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(scenario)


def admitted(request_id: str, reason: str, *told: Any) -> EngineReport:
    request = AdmittedRequest(f"{request_id}-00000000", reason, *(told or (0, 0, ())))
    return EngineReport(match_unit=16, block_size=384, requests=[request])


@pytest.fixture
def feeds(monkeypatch) -> Feeds:
    monkeypatch.setattr(events_api, "feeds", Feeds())
    return events_api.feeds


@pytest.fixture
def feed(feeds) -> Feed:
    return feeds.alone


def sent_by(app: Any, **scope: Any) -> list[Any]:
    """Messages that an application sends for a request."""
    sent: list[Any] = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": PATH, "query_string": b"", "headers": [], **scope}
    on_virtual_time(app(scope, None, send))
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
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)] * bool(kind)}


def piece(body: bytes = b"{}", more_body: bool = False) -> Any:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


RESPONSE = b'{"id":"resp_0af3","created_at":1,"output":[{"id":"msg_1"}]}'

TELLS, RESPONDS = b"hit,160,176,163:0", {"path": "/v1/responses"}


@pytest.mark.parametrize(
    ("kind", "body", "how", "told"),
    [
        (b"application/json", b"{}", {}, TELLS),
        (b"", b"{}", {}, TELLS),
        (b"application/json", b"{}", {"type": "websocket"}, None),
        (b"application/json", b"{}", {"headers": [ASKS[0]]}, None),  # nobody asks
        (b"application/json", b"{}", {"headers": [ASKS[1], (b"x-request-id", b"c")]}, None),
        (b"text/event-stream; charset=utf-8", b"{}", {}, None),
        (b"application/json", RESPONSE, RESPONDS, b"cold,0,0,"),
        (b"application/json", RESPONSE.replace(b"resp_", b"").replace(b":", b": "), RESPONDS, b"cold,0,0,"),
        (b"application/json", RESPONSE.replace(b"0af3", b"other"), RESPONDS, None),
        (b"application/json", b" " * (events_api.ID_WITHIN - 16) + b'"id":"resp_0af3" ', RESPONDS, b"cold,0,0,"),
        (b"application/json", b" " * (events_api.ID_WITHIN - 15) + b'"id":"resp_0af3" ', RESPONDS, None),
    ],
)
def test_a_whole_answer_carries_the_outcome_of_its_own_request_to_who_asks(feeds, kind, body, how, told):
    feeds.add_requests(admitted("chatcmpl-a", "hit", 160, 176, (163, 0)))
    feeds.add_requests(admitted("resp_0af3_0", "cold"))
    start, *rest = answer_of(head(kind), piece(body), **how)
    assert dict(start["headers"]).get(HEADER) == told and rest == [piece(body)]
    failed, *_ = answer_of(head(kind, 404), piece(body), **how)
    assert HEADER not in dict(failed["headers"]), "an error tells nothing of an earlier request with its id"


def test_an_outcome_that_its_answer_has_overtaken_is_waited_for_where_it_comes(feeds, monkeypatch):
    for collector, found, comes in ((os.getpid(), True, True), (os.getpid(), False, False), (1, True, False)):
        hit = [TELLS] if found else []
        tries = itertools.chain([None], hit, itertools.repeat(None))
        monkeypatch.setattr(feeds, "take_latest", lambda _, tries=tries: next(tries))
        feeds.collected_by = collector
        assert (HEADER in dict(answer_of(head(), piece())[0]["headers"])) is comes


def test_the_head_of_a_response_waits_for_its_first_piece_alone(feeds):
    feeds.add_requests(admitted("resp_0af3_0", "hit"))
    start, *pieces = answer_of(head(), piece(b"{", more_body=True), piece(RESPONSE), path="/v1/responses")
    assert start == head() and b"".join(each["body"] for each in pieces) == b"{" + RESPONSE
    assert feeds.take_latest("0af3_0") is not None


@pytest.mark.parametrize(
    ("steps", "sent"),
    [
        ([b"opens ", b"first", 0.1, b"second", b"third"], [b"opens first", 0.1, b"second", b"third", b"END"]),
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
    ("query", "status", "told"),
    [
        ("after=1&after=x", 400, "after: "),
        ("wait=1.1234567", 400, "wait: "),
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


def test_lines_are_parts_of_one_answer_that_no_proxy_collects(feeds, feed):
    feeds.add_requests(admitted("chatcmpl-a", "cold"))
    query = f"boot={feed.boot}&after=x&after=0&wait=0.000001"  # the last one counts
    start, *lines, end = sent_by(EventsEndpoint(None), query_string=query.encode())
    assert dict(start["headers"]) == {b"content-type": b"application/x-ndjson", b"x-accel-buffering": b"no"}
    assert all(line["body"].endswith(b"\n") and line["more_body"] for line in lines) and not end.get("more_body")
    first, *later = [json.loads(line["body"])["events"] for line in lines]
    assert first == [["admitted", "a", "cold", 0, 0, []]] and not any(later)


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
    told = [(each["body"], each.get("more_body", False)) for each in pieces]
    assert told == [(b"first\n", True), (b"second\n", True), (b"", False)]
    assert gone["status"] == 503 and b"has ended" in said["body"]


KEPT, TOLD = 6, 4  # in place of thousands


class Reading(RuleBasedStateMachine):
    """Engines report, readers go on from where they were, and the process starts anew. The model is a list per feed."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in {"MAX_KEPT": KEPT, "MAX_TOLD": TOLD}.items():
            self.patch.setattr(events_api, name, value)
        self.readers: dict[tuple[str, int | None], tuple[str | None, int]] = {}  # what each has read

    def teardown(self) -> None:
        self.patch.undo()

    @initialize(engines=st.sampled_from([1, 2]))
    def starts(self, engines: int) -> None:
        """Feeds by engine; that of a lone engine is None's."""
        self.engines, self.feeds, self.numbers = engines, Feeds(), itertools.count(1)
        self.log: dict[int | None, list[list[Any]]] = {None: [], 0: [], 1: []}
        self.drafts: dict[int | None, tuple[str, str]] = {}
        self.loads: dict[int | None, dict[str, tuple[int, int]]] = {}
        self.latest: dict[str, bytes] = {}
        self.last_event = [0, 0]
        for engine in range(engines):
            self.feeds.add_events(self.report(engine))

    def report(self, engine: int, **more: Any) -> EngineReport:
        numbers = {"engine": engine * (self.engines - 1), "engines": self.engines}
        return EngineReport(**numbers, match_unit=16, block_size=384, **more)

    def feed_of(self, engine: int) -> int | None:
        return None if self.engines == 1 else engine

    def note(self, engine: int, *entry: Any) -> None:
        self.log[self.feed_of(engine)].append([*entry])

    @rule(engine=st.sampled_from([0, 1]), name=st.sampled_from("abcdefgh"), child=st.sampled_from(["", "0_", "1_"]))
    def admits(self, engine: int, name: str, child: str) -> None:
        hit = next(self.numbers)
        request = AdmittedRequest(f"{child}chatcmpl-{name}-0a1b2c3d", "hit", hit, hit + 16, (hit, 0))
        self.feeds.add_requests(self.report(engine, requests=[request]))
        self.drafts[self.feed_of(engine)] = ("", "")
        if child != "1_":  # the first of several answers stands for all
            self.note(engine, "admitted", name, "hit", hit, hit + 16, [hit, 0])
            self.latest.pop(name, None)
            self.latest[name] = b"hit,%d,%d,%d:0" % (hit, hit + 16, hit)
            if len(self.latest) > KEPT:
                del self.latest[next(iter(self.latest))]

    @rule(engine=st.sampled_from([0, 1]), name=st.sampled_from("abcdefgh"), fate=st.sampled_from(["pinned", "no_room"]))
    def pins(self, engine: int, name: str, fate: str) -> None:
        self.feeds.add_requests(self.report(engine, pinned=[(f"chatcmpl-{name}-0a1b2c3d", fate)]))
        self.drafts[self.feed_of(engine)] = ("", "")
        self.note(engine, "pinned", name, fate)
        if name in self.latest:
            self.latest[name] = b",".join([*self.latest[name].split(b",")[:4], fate.encode()])

    @rule(engine=st.sampled_from([0, 1]), state=st.sampled_from(["", "open", "closed"]))
    def drafts_were(self, engine: int, state: str) -> None:
        drafts = (state, "figures")
        self.feeds.add_requests(self.report(engine, drafts=drafts))
        self.drafts[self.feed_of(engine)] = drafts

    @rule(engine=st.sampled_from([0, 1]), lost=st.sampled_from([0, 0, 1]), came=st.booleans(), load=st.integers(0, 2))
    def states_change(self, engine: int, lost: int, came: bool, load: int) -> None:
        """Events of a report, some of which may have been lost before it."""
        own, slot = self.feed_of(engine), engine * (self.engines - 1)
        number = self.last_event[slot] = self.last_event[slot] + 1 + lost
        event = StateStored("chatcmpl-a-0a1b2c3d", 16, ()) if came else StateEvicted(str(number))
        loads = {"a": (1, load), "b": (2, 100), "": (3, 7)} if load else {}
        self.loads[own] = {name: GatewayLoad(*each) for name, each in loads.items()}
        self.feeds.add_events(self.report(engine, events=[(number, event)], loads=self.loads[own]))
        if lost:
            self.log[own].append(["cleared", "lost"])
        self.log[own].append(["came", "a", 16, []] if came else ["gone", str(number)])

    @rule(name=st.sampled_from("abcdefgh"))
    def is_answered(self, name: str) -> None:
        outcome = self.feeds.take_latest(name)
        assert outcome == self.latest.pop(name, None), "once"

    @rule(
        reader=st.sampled_from("xy"),
        engine=st.sampled_from([None, 0, 1]),
        gateway=st.sampled_from([None, "a", "c"]),
        knows=st.sampled_from([None, "right", "9:9"]),
        meanwhile=st.sampled_from([None, 0, 1]),
    )
    def reads(self, reader: str, engine: int | None, gateway: str | None, knows: str | None, meanwhile: Any) -> None:
        feed = self.feeds.of(engine)
        if self.engines == 1:
            engine = None if engine == 0 else engine
        nobodys = 1 if self.engines == 1 else None
        assert (feed is None) == (engine == nobodys), "of no engine that has reported"
        if feed is None:
            return
        boot, cursor = self.readers.get((reader, engine), (None, 0))
        right = "{}:{}".format(*self.load_beside(engine, gateway))
        known = right if knows == "right" else knows
        waits = boot == feed.boot and cursor >= len(self.log[engine]) and (gateway is None or known in (None, right))

        async def scenario() -> tuple[float, dict[str, Any]]:
            loop = asyncio.get_running_loop()
            if waits and meanwhile is not None:
                loop.call_later(1.0, lambda: self.states_change(meanwhile, 0, came=False, load=1))
            answer = await anext(feed.answers(cursor, boot, 5.0, gateway, known))
            return loop.time(), answer

        seconds, answer = on_virtual_time(scenario())
        wakes = meanwhile is not None and (self.engines == 1 or engine == meanwhile)
        assert seconds == ((1.0 if wakes else 5.0) if waits else 0.0)
        answer = json.loads(msgspec.json.encode(answer))
        assert answer == self.answer(engine, feed.boot, boot, cursor, gateway)
        self.readers[reader, engine] = answer["boot"], answer["cursor"]

    def load_beside(self, engine: int | None, gateway: str | None) -> tuple[int, ...]:
        others = [load for name, load in self.loads.get(engine, {}).items() if name != gateway]
        return tuple(map(sum, zip(*others, strict=True))) or (0, 0)

    def answer(
        self, engine: int | None, now: str, boot: str | None, cursor: int, gateway: str | None
    ) -> dict[str, Any]:
        log, drafts = self.log[engine], self.drafts.get(engine, ("", ""))
        oldest = max(1, len(log) - KEPT + 1)
        first = oldest if boot != now else max(oldest, cursor + 1)
        told = [(number, entry) for number, entry in enumerate(log, 1) if number >= first][:TOLD]
        cursor_now = told[-1][0] if told else len(log)
        answer = {"boot": now, "cursor": cursor_now, "events": [entry for _, entry in told]}
        answer["reset"] = boot is not None and (boot != now or cursor + 1 < oldest)
        if drafts[0]:
            answer["drafts"] = [*drafts]
        if gateway is not None:
            answer["load"] = [*self.load_beside(engine, gateway)]
        return answer


Reading.starts_anew = rule(engines=st.sampled_from([1, 2]))(lambda self, engines: self.starts(engines))
Reading.TestCase.settings = settings(max_examples=80, stateful_step_count=30)
TestReading = Reading.TestCase


def test_the_numbers_that_gateways_and_documents_count_on():
    api = events_api
    assert (api.MAX_KEPT, api.MAX_TOLD, api.MAX_ID, api.ID_WITHIN) == (8192, 512, 512, 1024)
    assert (api.MAX_WAIT, api.SETTLE_SECONDS, api.LINES_PER_SECOND, api.LINES_AT_ONCE) == (10.0, 0.003, 10.0, 10.0)


@pytest.mark.parametrize(
    ("engine_id", "name"),
    [
        ("cmpl-a-b-12-00000000", "a-b"),
        ("2_cmpl-a-0-00000000", "a"),
        ("a-b-0abcdef9", "a-b"),
        ("a-0000000", "a-0000000"),  # of another form
        ("chatcmpl-" + "x" * 600 + "-00000000", "x" * 512),
    ],
)
def test_the_clients_name_is_in_vllms_and_a_long_one_is_not_kept_whole(engine_id, name):
    assert client_id(engine_id) == name


def test_what_can_wait_is_done_in_its_order_a_little_later_or_when_somebody_reads():
    done: list[Any] = []
    feeds = Feeds()

    async def scenario():
        clock = asyncio.get_running_loop().time
        for number in range(3):
            feeds.later(lambda number=number: done.append((number, clock())))
        assert done == []
        await asyncio.sleep(events_api.SETTLE_SECONDS)
        assert done == [(number, events_api.SETTLE_SECONDS) for number in range(3)]
        feeds.later(lambda: done.append("read"))
        feeds.alone.after(0)
        assert done[3:] == ["read"]
        await asyncio.sleep(1.0)

    on_virtual_time(scenario())
    feeds.later(lambda: done.append("no event loop"))
    assert done[3:] == ["read", "no event loop"]


async def read_in_lines(feed: Feed, seconds: float, happens: Any) -> list[Any]:
    """Answers of one read, each with when it came, while `happens` runs."""
    clock, beside = asyncio.get_running_loop().time, asyncio.create_task(happens)
    found = [(clock(), answer) async for answer in feed.answers(0, feed.boot, seconds, "a", "0:0")]
    beside.cancel()
    return found


def test_a_read_in_lines_gives_each_thing_once_as_it_comes_and_ends(feeds, feed):
    async def happens():
        for at, name in ((0.5, "a"), (0.25, "b")):
            await asyncio.sleep(at)
            feeds.add_requests(admitted(f"chatcmpl-{name}", "cold"))
            feed.wake_readers()
        await asyncio.sleep(0.5)
        feed.loads = {"b": GatewayLoad(1, 400)}
        feed.wake_readers()

    found = on_virtual_time(read_in_lines(feed, 2.0, happens()))
    told = [
        (at, [event.request_id for event in answer["events"]], answer["load"], answer["cursor"]) for at, answer in found
    ]
    assert told == [(0.5, ["a"], (0, 0), 1), (0.75, ["b"], (0, 0), 2), (1.25, [], (1, 400), 2), (2.0, [], (1, 400), 2)]
    assert not any(answer["reset"] for _, answer in found) and not feed._readers


def test_a_busy_feed_gives_no_more_lines_than_allowed_and_leaves_nothing_out(feeds, feed):
    async def happens():
        for number in range(10**6):
            feeds.add_requests(admitted(f"chatcmpl-{number}", "cold"))
            feed.wake_readers()
            await asyncio.sleep(0.01)

    found = on_virtual_time(read_in_lines(feed, 10.0, happens()))
    usual = 10 * events_api.LINES_PER_SECOND
    assert usual < len(found) <= usual + events_api.LINES_AT_ONCE + 2
    names = [int(event.request_id) for _, answer in found for event in answer["events"]]
    assert names == list(range(len(names))) and len(names) > 900
