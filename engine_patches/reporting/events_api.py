"""What became of each request, and of the states it left: a path of the worker that no client of the gateway reaches.

A stream cannot carry it: its headers leave before the request is scheduled, its body is the client's, and a state may
go while no request asks. So the process that collects reports keeps the latest outcomes and events in order, and the
gateway reads what is new. This is read at the collector's own address. vLLM's `--middleware` gives the same at the API
server's, for gateways that know no other; what needs it besides are three things that HTTP's messages carry: a hint in
a header, the outcome in the head of an answer that is no stream, and a stream's opening in one piece.
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import islice
from typing import Any
from urllib.parse import parse_qs, urlencode

import msgspec
from prometheus_client import make_asgi_app
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine_patches.footprint import FOLDER, READ_INSIDE
from engine_patches.reporting import header_fields
from engine_patches.reporting.report import EngineReport
from engine_patches.scheduler.counters import AdmittedRequest, GatewayLoad
from engine_patches.scheduler.states import CacheCleared, StateEvent, StateStored

PATH = "/seamark/outcomes"

# vLLM's metrics by name (`name[]=N`, as Prometheus' own client has it): all of them take a worker 8 ms of CPU.
METRICS_PATH = "/seamark/metrics"

MAX_KEPT = 8192  # requests, and states that came or went; some 300 bytes each
MAX_TOLD = 512  # of them in one answer, which is read in one go; who reads it reads on at once
MAX_ID = 512  # characters kept of an id; vLLM takes headers of megabytes, and the gateway's ids have at most 265

# Of a request with the value 1, and of its answer: REASON,HIT,SHARED,POSITION:POSITION.., lengths in tokens. Of one
# that pins its prompt: also ,FATE.
HEADER = b"x-seamark-outcome"
MAX_WAIT = 10.0  # seconds; a worker that is to stop finishes its answers first

# What a step reports is added up so long after its tokens, which go to their clients first: on a machine of few cores
# that, and each gateway that it wakes, would take their time.
SETTLE_SECONDS = 0.003

# A report leaves the engine before the answer does, and by another way: on a busy machine it comes a moment later.
LATE_SECONDS, LATE_STEP = 0.05, 0.002

LINES_PER_SECOND, LINES_AT_ONCE = 10.0, 10.0  # of a stream of answers: on the average, and before that counts

# vLLM's name of a request: [child of n > 1]_[API]-[X-Request-Id][-prompt of a completion]-[8 random characters].
_COMPLETION = re.compile(r"(?:\d+_)?cmpl-(.*)-\d+-[0-9a-f]{8}")
_OTHER = re.compile(r"(?:\d+_)?(?:chatcmpl-|resp_)?(.*?)-[0-9a-f]{8}")

# vLLM names the first request of a response after it: `resp_ID_0`. The id stands at the beginning of the answer.
RESPONSES = "/v1/responses"
_RESPONSE_ID = re.compile(rb'"id": ?"(?:resp_)?([\w.:-]+)"', re.ASCII)
ID_WITHIN = 1024  # bytes

# All children of a request but the first: they share its whole prompt, with the first one.
_LATER_CHILD = re.compile(r"[1-9]\d*_(?:chatcmpl-|cmpl-|resp_)", re.ASCII)

_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_SECONDS = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)

# An event of a feed, in JSON: ["admitted", REQUEST, REASON, HIT, SHARED, [POSITION..]], ["pinned", REQUEST, FATE],
# ["came", REQUEST, END, [[POSITION, STATE]..]], ["gone", STATE], ["cleared"] or ["adapter", NAME]. Requests go by their
# X-Request-Id, lengths are in tokens.
Event = AdmittedRequest | StateEvent | tuple[str, str, str]


def client_id(engine_id: str) -> str:
    """The `X-Request-Id` in vLLM's name of a request, or the name itself if it has another form; its beginning."""
    match = _COMPLETION.fullmatch(engine_id) or _OTHER.fullmatch(engine_id)
    return (match[1] if match else engine_id)[:MAX_ID]


class Feed:
    """The latest events of one engine, numbered."""

    def __init__(self, boot: str, catch_up: Callable[[], None] = lambda: None) -> None:
        """`catch_up` is called before anything is read: what was put off is added then."""
        self.boot, self._catch_up = boot, catch_up
        self._cursor = 0
        self._kept: deque[tuple[int, Event]] = deque(maxlen=MAX_KEPT)
        self._last_number = 0  # of an event
        self.drafts = ("", "")  # as of `EngineReport`
        self._readers: set[asyncio.Event] = set()  # those that wait
        # What gateways have the engine do, by their names; "" for what comes past them.
        self.loads: Mapping[str, GatewayLoad] = {}

    def add_event(self, number: int, event: StateEvent) -> None:
        """States came or went in the engine, which numbers its events without gaps."""
        if number != self._last_number + 1:
            self.keep(CacheCleared("lost"))  # those that are missing could have been any
        self._last_number = number
        if isinstance(event, StateStored):
            event = msgspec.structs.replace(event, request_id=client_id(event.request_id))
        self.keep(event)

    def beside(self, gateway: str) -> GatewayLoad:
        """What all others have it do."""
        others = [load for name, load in self.loads.items() if name != gateway]
        return GatewayLoad(sum(load.requests for load in others), sum(load.prefill_tokens for load in others))

    def keep(self, event: Event) -> None:
        """An event, in which requests have their clients' names."""
        self._cursor += 1
        self._kept.append((self._cursor, event))

    def wake_readers(self) -> None:
        """Something was added. Call in the event loop that serves."""
        for reader in self._readers:
            reader.set()

    def after(self, cursor: int, boot: str | None = None, gateway: str | None = None) -> dict[str, Any]:
        """The first `MAX_TOLD` events later than `cursor`, or of all if `boot` is another process's.

        `reset`: some were lost to the reader, so it no longer knows what the cache holds. `load`, for a `gateway` that
        names itself: the requests of all others here, and the tokens of their prompts to compute. `drafts`, of an
        engine that drafts: whether hints are used beside them.
        """
        self._catch_up()
        foreign = boot != self.boot
        oldest = self._kept[0][0] if self._kept else self._cursor + 1
        start = 0 if foreign else max(0, cursor + 1 - oldest)
        told = list(islice(self._kept, start, start + MAX_TOLD))
        answer: dict[str, Any] = {
            "boot": self.boot,
            "cursor": told[-1][0] if told else self._cursor,
            "events": [event for _, event in told],
            "reset": bool(boot) and (foreign or cursor + 1 < oldest),
        }
        if self.drafts[0]:
            answer["drafts"] = self.drafts
        if gateway is not None:
            answer["load"] = self.beside(gateway)
        return answer

    async def answers(
        self, cursor: int, boot: str | None, seconds: float, gateway: str | None = None, load: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """As `after`, one answer after the other until `seconds` are over.

        Each comes once there is something, or the load is not what the gateway knows (`load`, as REQUESTS:TOKENS).
        """
        clock = asyncio.get_running_loop().time
        now = clock()
        ends, credit = now + seconds, LINES_AT_ONCE
        while True:
            is_known = gateway is None or load is None or load == "{}:{}".format(*self.beside(gateway))
            if now < ends and boot == self.boot and cursor >= self._cursor and is_known:
                added = asyncio.Event()
                self._readers.add(added)
                try:
                    async with asyncio.timeout_at(ends):
                        await added.wait()
                except TimeoutError:
                    pass
                finally:
                    self._readers.remove(added)
            yield (answer := self.after(cursor, boot, gateway))
            cursor, boot = answer["cursor"], self.boot
            if "load" in answer:
                load = "{}:{}".format(*answer["load"])
            before, now = now, clock()
            if now >= ends:
                return
            credit = min(credit + (now - before) * LINES_PER_SECOND, LINES_AT_ONCE) - 1
            if credit < 1:
                await asyncio.sleep((1 - credit) / LINES_PER_SECOND)


class Feeds:
    """Of all engines behind one server, and what became of their requests."""

    def __init__(self) -> None:
        self.collected_by: int | None = None  # id of the process; None: not known here
        self.alone = Feed(uuid.uuid4().hex, self.catch_up)  # of the only engine; every process numbers from 1
        self._of_several = defaultdict[int, Feed](lambda: Feed(self.alone.boot, self.catch_up))  # by rank
        self._latest: OrderedDict[str, bytes] = OrderedDict()  # values of `HEADER`, by X-Request-Id
        self._late: list[Callable[[], None]] = []  # put off by `later`

    def of(self, engine: int | None) -> Feed | None:
        """The feed of an engine, by its rank; None if it has not reported, or none of several is named."""
        if self._of_several:
            return self._of_several.get(engine) if engine is not None else None
        return None if engine else self.alone

    def add_requests(self, report: EngineReport) -> None:
        """Requests were admitted, or pinned. Of one with several answers (`n`) the first child counts."""
        feed = self._of(report)
        for request in report.requests:
            if not _LATER_CHILD.match(request.request_id):
                name = client_id(request.request_id)
                feed.keep(msgspec.structs.replace(request, request_id=name))
                facts = (request.reason, request.hit_tokens, request.shared, ":".join(map(str, request.resolved)))
                self._latest[name] = ",".join(map(str, facts)).encode()
                self._latest.move_to_end(name)
                if len(self._latest) > MAX_KEPT:
                    self._latest.popitem(last=False)
        for engine_id, fate in report.pinned:
            name = client_id(engine_id)
            feed.keep(("pinned", name, fate))
            if (header := self._latest.get(name)) is not None:
                self._latest[name] = b",".join((*header.split(b",")[:4], fate.encode()))
        feed.drafts = report.drafts

    def take_latest(self, request_id: str) -> bytes | None:
        """The latest outcome under an `X-Request-Id`, for `HEADER`, once; None if this process knows none."""
        return self._latest.pop(request_id, None)

    async def outcome_of(self, request_id: str) -> bytes | None:
        """What became of a request that is answered, once; waited for only where the reports of the one engine come."""
        late = not self._of_several and self.collected_by == os.getpid()
        for _ in range(round(LATE_SECONDS / LATE_STEP) if late else 0):
            if (outcome := self.take_latest(request_id)) is not None:
                return outcome
            await asyncio.sleep(LATE_STEP)
        return self.take_latest(request_id)

    def add_events(self, report: EngineReport) -> None:
        """States came or went, and gateways have other loads; readers learn of all that was added."""
        feed = self._of(report)
        for number, event in report.events:
            feed.add_event(number, event)
        feed.loads = report.loads
        feed.wake_readers()

    def later(self, work: Callable[[], None]) -> None:
        """Do `work`, which adds to what is read here or to metrics, when tokens no longer wait for it.

        Outside of an event loop nothing waits, and it is done at once.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            work()
            return
        if not self._late:
            loop.call_later(SETTLE_SECONDS, self.catch_up)
        self._late.append(work)

    def catch_up(self) -> None:
        """Do now, in order, what was put off: somebody reads."""
        late, self._late = self._late, []
        for work in late:
            work()

    def _of(self, report: EngineReport) -> Feed:
        return self.alone if report.engines == 1 else self._of_several[report.engine]


feeds = Feeds()

_metrics = make_asgi_app()


async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
    """The app beneath the collector's own address, which has nothing else to tell."""
    if scope["type"] == "http":
        await _error(send, 404, f"only {PATH} and {METRICS_PATH} are read here")


class EventsEndpoint:
    """ASGI middleware for vLLM's `--middleware`: `GET /seamark/outcomes?boot=B&after=N&wait=S`, all else to the app.

    With `engine=RANK` one of several engines is meant. With `gateway=ID&load=REQUESTS:TOKENS` a gateway also reads what
    others have the engine do. With a `wait` there are answers until S seconds are over, a line each, so that many cost
    as one read.

    `METRICS_PATH` gives metrics by name. The app's answer to a request with `HEADER` gets that header, if it is no
    stream and its outcome is known here; a stream's first events go out in one piece. A hint in a header of a request
    from a trusted hop goes into its body (`header_fields`).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in (PATH, METRICS_PATH):
            if (elsewhere := collected_at()) is not None:
                await _pass_on(elsewhere, scope, send)
            elif scope["path"] == PATH:
                await _tell(scope, send)
            else:
                feeds.catch_up()
                # Its app chokes on bytes that are no UTF-8, and on versions of formats that are none.
                names = parse_qs(scope["query_string"].decode("latin-1")).get("name[]", [])
                query = urlencode({"name[]": names}, doseq=True).encode()
                await _metrics({**scope, "query_string": query, "headers": []}, receive, send)
        else:
            if scope["path"].startswith("/metrics"):
                feeds.catch_up()
            if any(name == header_fields.NAME for name, _ in scope["headers"]):
                receive = await header_fields.into_body(scope, receive)
            wants = any(name == HEADER and value == b"1" for name, value in scope["headers"])
            await self._app(scope, receive, _joins_first(_adds_outcome(scope, send)) if wants else send)


def collected_at() -> str | None:
    """The socket where another process of this machine gives what is read here; None: this one collects, or nobody."""
    folder = os.environ.get(FOLDER)
    return None if not folder or feeds.collected_by == os.getpid() else f"{folder}/{READ_INSIDE}"


async def _pass_on(address: str, scope: Scope, send: Send) -> None:
    """The answer of the process that collects, as it comes."""
    import aiohttp

    target = scope["path"] + "?" + scope["query_string"].decode("latin-1")
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=address)) as session,
            session.request(scope["method"], "http://localhost" + target) as answer,
        ):
            of_body = (b"content-type", b"x-accel-buffering")
            headers = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() in of_body]
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for piece, _ in answer.content.iter_chunks():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
    except aiohttp.ClientConnectorError:
        await _error(send, 503, "the process that collects what engines report has ended")


async def _tell(scope: Scope, send: Send) -> None:
    if scope["method"] != "GET":
        return await _error(send, 405, f"{PATH} can only be read: use GET")
    query = parse_qs(scope["query_string"].decode("latin-1"))
    after, wait = (query.get(name, ["0"])[-1] for name in ("after", "wait"))
    engine = query.get("engine", [""])[-1]
    if not _NUMBER.fullmatch(after):
        return await _error(send, 400, "after: use the cursor of the last answer, a number")
    if not _SECONDS.fullmatch(wait):
        return await _error(send, 400, "wait: use a number of seconds")
    feeds.catch_up()
    feed = feeds.of(int(engine)) if _NUMBER.fullmatch(engine) else None if engine else feeds.of(None)
    if feed is None:
        return await _error(send, 404, "engine: use the data parallel rank of an engine that has reported here")
    boot, gateway, load = (query.get(name, [None])[-1] for name in ("boot", "gateway", "load"))
    # A proxy in between must not collect them.
    headers = [(b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for answer in feed.answers(int(after), boot, min(float(wait), MAX_WAIT), gateway, load):
        await send({"type": "http.response.body", "body": msgspec.json.encode(answer) + b"\n", "more_body": True})
    return await send({"type": "http.response.body", "body": b""})


def _adds_outcome(scope: Scope, send: Send) -> Send:
    """`send`, with the outcome of the request among the headers of its answer.

    An error tells none: what is known under its id is that of an earlier request, perhaps a stream. The engine knows a
    response by the id in its answer, so that answer's head waits for its body, which follows at once.
    """
    request_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    waiting: Message | None = None

    async def with_outcome(head: Message, name: str) -> Message:
        outcome = await feeds.outcome_of(name)
        return head if outcome is None else {**head, "headers": [*head.get("headers", ()), (HEADER, outcome)]}

    async def send_with_outcome(message: Message) -> None:
        nonlocal waiting
        if message["type"] == "http.response.start" and message["status"] == 200:
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            if not any(kind.startswith(b"text/event-stream") for kind in kinds):
                if scope["path"] == RESPONSES:
                    waiting = message
                    return
                message = await with_outcome(message, request_id)
        elif waiting is not None:
            head, waiting = waiting, None
            named = _RESPONSE_ID.search(message.get("body", b"")[:ID_WITHIN])
            await send(await with_outcome(head, f"{named[1].decode()}_0") if named else head)
        await send(message)

    return send_with_outcome


def _joins_first(send: Send) -> Send:
    """`send`, with all pieces of a stream that come before the event loop turns for the first time in one.

    vLLM opens an answer with events of their own once it has the first token. Sent alone, they wake up the gateway and
    its client, and on a machine of few cores these take the time that the first token needs to follow.
    """
    opening: list[Message] = []
    is_open = False  # the loop has turned
    sending: asyncio.Task[None] | None = None  # the opening, nothing of which may be overtaken

    def joined() -> Message:
        message = {**opening[-1], "body": b"".join(message.get("body", b"") for message in opening)}
        opening.clear()
        return message

    def turn() -> None:
        nonlocal is_open, sending
        is_open = True
        if opening:
            sending = asyncio.ensure_future(send(joined()))

    async def send_joined(message: Message) -> None:
        nonlocal sending
        if message["type"] == "http.response.body" and not is_open:
            if not opening:
                asyncio.get_running_loop().call_soon(turn)
            opening.append(message)
            if message.get("more_body"):
                return
            message = joined()
        if sending is not None:
            await sending
            sending = None
        await send(message)

    return send_joined


async def _error(send: Send, status: int, why: str) -> None:
    body = msgspec.json.encode({"error": why})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
