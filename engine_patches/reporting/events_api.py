"""What became of each request, and of the states it left: a path of the worker that no client of the gateway reaches.

A stream cannot carry it: its headers leave before the request is scheduled, its body is the client's, and a state may
go while no request asks. So the API server keeps the latest outcomes and events in order, and the gateway reads what is
new. An answer that is no stream carries its outcome in a header, if the request asks for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from prometheus_client import make_asgi_app

from engine_patches.reporting import hint_header
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.state_events import AdapterReplaced, CacheCleared, StateEvent, StateEvicted, StateStored

PATH = "/seamark/outcomes"

# vLLM's metrics by name (`name[]=N`, as Prometheus' own client has it): all of them take a worker 8 ms of CPU.
METRICS_PATH = "/seamark/metrics"

MAX_KEPT = 8192  # requests, and states that came or went; some 300 bytes each

MAX_ID = 512  # characters kept of an id; vLLM takes headers of megabytes, and the gateway's ids have at most 265

# Of a request with the value 1, and of its answer: REASON,HIT,SHARED,POSITION:POSITION.., lengths in tokens. Of one
# that pins its prompt: also ,FATE.
HEADER = b"x-seamark-outcome"

# Of a request from a gateway: GATEWAY,PROMPT,LEFT. Its tokens, and how many of them the gateway expects to be computed.
LOAD_HEADER = b"x-seamark-load"

_LOAD = re.compile(rb"([0-9a-f]{1,32}),(\d{1,8}),(\d{1,8})", re.ASCII)

MAX_WAIT = 10.0  # seconds; a worker that is to stop finishes its answers first

# What a step reports is added up so long after its tokens, which go to their clients first: on a machine of few cores
# that, and each gateway that it wakes, would take their time.
SETTLE_SECONDS = 0.003

LINES_PER_SECOND = 10.0  # of a stream of answers, on the average

LINES_AT_ONCE = 10.0  # before the average counts

# vLLM's name of a request: [child of n > 1]_[API]-[X-Request-Id][-prompt of a completion]-[8 random characters].
_COMPLETION = re.compile(r"(?:\d+_)?cmpl-(.*)-\d+-[0-9a-f]{8}")

_OTHER = re.compile(r"(?:\d+_)?(?:chatcmpl-|resp_)?(.*?)-[0-9a-f]{8}")

# vLLM names the first request of a response after it: `resp_ID_0`. The id stands at the beginning of the answer.
RESPONSES = "/v1/responses"
_RESPONSE_ID = re.compile(rb'"id": ?"(?:resp_)?([\w.:-]+)"', re.ASCII)
ID_WITHIN = 1024  # bytes

# All children of a request but the first: they share its whole prompt, with the first one.
_LATER_CHILD = re.compile(r"[1-9]\d*_(?:chatcmpl-|cmpl-|resp_)", re.ASCII)

_SECONDS = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Outcome(NamedTuple):
    """What became of one request. Lengths in tokens."""

    request_id: str  # its X-Request-Id
    reason: str
    hit_tokens: int
    shared: int  # with an earlier prompt that the engine has seen
    resolved: tuple[int, ...]  # what each entry of its hint names, in the hint's order; 0: not there
    pin: str = ""  # what became of its wish to pin its prompt, or to release it

    @property
    def header(self) -> bytes:
        """The value of `HEADER`."""
        fields = [self.reason, self.hit_tokens, self.shared, ":".join(map(str, self.resolved)), self.pin]
        return ",".join(map(str, fields if self.pin else fields[:-1])).encode()


def client_id(engine_id: str) -> str:
    """The `X-Request-Id` in vLLM's name of a request, or the name itself if it has another form; its beginning."""
    match = _COMPLETION.fullmatch(engine_id) or _OTHER.fullmatch(engine_id)
    return (match[1] if match else engine_id)[:MAX_ID]


class GatewayLoad(NamedTuple):
    """What there is to do."""

    requests: int  # under way
    prefill_tokens: int  # of their prompts, still to be computed


@dataclass(eq=False)
class CountedRequest:
    """A request under way, as its gateway counts it; lengths in tokens."""

    gateway: str
    request_id: str  # its X-Request-Id
    prompt: int
    left: int  # to be computed


class GatewayLoads:
    """What each gateway has at this API server. Each counts its own; here they learn of one another."""

    def __init__(self) -> None:
        self._loads: dict[str, GatewayLoad] = {}  # by gateway; those with requests
        self._requests: dict[str, CountedRequest] = {}  # by X-Request-Id

    def begin(self, header: bytes, request_id: str) -> CountedRequest | None:
        """A request with this `LOAD_HEADER` comes; None if that is nonsense, and the request is not counted."""
        match = _LOAD.fullmatch(header)
        if match is None:
            return None
        request = CountedRequest(match[1].decode(), request_id, int(match[2]), int(match[3]))
        self._requests[request_id] = request
        self._add(request.gateway, 1, request.left)
        return request

    def computed(self, request_id: str, end: int) -> None:
        """So many tokens of a prompt are computed."""
        if (request := self._requests.get(request_id)) is not None:
            self._leave(request, max(0, request.prompt - end))

    def answered(self, request: CountedRequest) -> None:
        """Its answer begins: the prompt is computed."""
        self._leave(request, 0)

    def end(self, request: CountedRequest) -> None:
        """It is over."""
        self._leave(request, 0)
        self._add(request.gateway, -1, 0)
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]

    def beside(self, gateway: str) -> GatewayLoad:
        """What all other gateways have."""
        others = [load for name, load in self._loads.items() if name != gateway]
        return GatewayLoad(sum(load.requests for load in others), sum(load.prefill_tokens for load in others))

    def _leave(self, request: CountedRequest, left: int) -> None:
        if left < request.left:
            self._add(request.gateway, 0, left - request.left)
            request.left = left

    def _add(self, gateway: str, requests: int, tokens: int) -> None:
        before = self._loads.get(gateway, GatewayLoad(0, 0))
        load = GatewayLoad(before.requests + requests, before.prefill_tokens + tokens)
        if load.requests:
            self._loads[gateway] = load
        else:
            self._loads.pop(gateway, None)


class Feed:
    """The latest outcomes and events of one API server, numbered."""

    def __init__(self) -> None:
        self.boot = uuid.uuid4().hex  # every process numbers from 1
        # An engine with several API servers sends each a part of its events, which is worse than none.
        self.has_all_events = True
        self._cursor = 0
        self._kept: deque[tuple[int, Outcome | list[Any]]] = deque(maxlen=MAX_KEPT)
        self._latest: OrderedDict[str, Outcome] = OrderedDict()  # of those kept, by X-Request-Id
        self._last_number: dict[int, int] = {}  # of an event, by engine
        self._readers: dict[asyncio.Event, str | None] = {}  # those that wait, with the gateway that each is
        self._late: list[Callable[[], None]] = []  # put off by `later`
        self.loads = GatewayLoads()

    def add_outcome(self, request: AdmittedRequest) -> None:
        """A request was admitted. One with several answers (`n`) has the outcome of its first child."""
        if _LATER_CHILD.match(request.request_id):
            return
        name = client_id(request.request_id)
        outcome = Outcome(name, request.reason, request.hit_tokens, request.shared, request.resolved)
        self._keep(outcome)
        self._latest[name] = outcome
        self._latest.move_to_end(name)
        if len(self._latest) > MAX_KEPT:
            self._latest.popitem(last=False)

    def add_pin(self, engine_id: str, fate: str) -> None:
        """What became of a request's wish to pin its prompt, or to release it; it was admitted before."""
        name = client_id(engine_id)
        if (outcome := self._latest.get(name)) is not None:
            self._latest[name] = outcome._replace(pin=fate)

    def take_latest(self, request_id: str) -> Outcome | None:
        """The latest outcome under an `X-Request-Id`, once; None if this process knows none."""
        return self._latest.pop(request_id, None)

    def add_event(self, engine: int, number: int, event: StateEvent) -> None:
        """States came or went in an engine, which numbers its events without gaps."""
        if number != self._last_number.get(engine, 0) + 1:
            self._keep(["cleared"])  # the dropped events could have been any
        self._last_number[engine] = number
        match event:
            case StateStored(request_id, end, states):
                self.loads.computed(client_id(request_id), end)
                self._keep(["came", client_id(request_id), end, states])
            case StateEvicted(name):
                self._keep(["gone", name])
            case CacheCleared():
                self._keep(["cleared"])
            case AdapterReplaced(name):
                self._keep(["adapter", name])

    def _keep(self, entry: Outcome | list[Any]) -> None:
        self._cursor += 1
        self._kept.append((self._cursor, entry))

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

    def wake_readers(self) -> None:
        """Something was added. Call in the event loop that serves."""
        for reader in self._readers:
            reader.set()

    def wake_others(self, gateway: str) -> None:
        """A gateway's load has changed. Call in the event loop that serves."""
        for reader, name in self._readers.items():
            if name is not None and name != gateway:
                reader.set()

    def after(self, cursor: int, boot: str | None = None, gateway: str | None = None) -> dict[str, Any]:
        """Everything later than `cursor`, or everything kept if `boot` is another process's.

        `outcomes`: id, reason and hit tokens of each request; `resolved`, in the same order: id, shared tokens, and
        what its hint's entries name. `states` only if this process gets all events. `reset`: entries were lost to the
        reader, so it no longer knows what the cache holds. `load`, with `states` and for a `gateway` that names itself:
        the requests of all others here, and the tokens of their prompts to compute.
        """
        self.catch_up()
        foreign = boot != self.boot
        oldest = self._kept[0][0] if self._kept else self._cursor + 1
        reset = bool(boot) and (foreign or cursor + 1 < oldest)
        outcomes: list[Outcome] = []
        states: list[list[Any]] = []
        for number, entry in reversed(self._kept):
            if number <= cursor and not foreign:
                break
            if isinstance(entry, Outcome):
                outcomes.append(entry)
            else:
                states.append(entry)
        outcomes.reverse()
        answer = {
            "boot": self.boot,
            "cursor": self._cursor,
            "outcomes": [(outcome.request_id, outcome.reason, outcome.hit_tokens) for outcome in outcomes],
            "resolved": [(outcome.request_id, outcome.shared, outcome.resolved) for outcome in outcomes],
        }
        if not self.has_all_events:
            return answer
        load = {"load": self.loads.beside(gateway)} if gateway is not None else {}
        return {**answer, "states": states[::-1], "reset": reset, **load}

    async def wait_after(
        self, cursor: int, boot: str | None, seconds: float, gateway: str | None = None, load: str | None = None
    ) -> dict[str, Any]:
        """As `after`, once there is something, the load is not what the gateway knows, or after `seconds`.

        `load`: what it knows, as REQUESTS:TOKENS.
        """
        is_known = gateway is None or load is None or load == "{}:{}".format(*self.loads.beside(gateway))
        if seconds and boot == self.boot and cursor >= self._cursor and is_known:
            added = asyncio.Event()
            self._readers[added] = gateway
            try:
                async with asyncio.timeout(seconds):
                    await added.wait()
            except TimeoutError:
                pass
            finally:
                self._readers.pop(added, None)
        return self.after(cursor, boot, gateway)

    async def answers(
        self, cursor: int, boot: str | None, seconds: float, gateway: str | None = None, load: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """As `wait_after`, one answer after the other until `seconds` are over, each later than the one before."""
        clock = asyncio.get_running_loop().time
        now = clock()
        ends, credit = now + seconds, LINES_AT_ONCE
        while True:
            answer = await self.wait_after(cursor, boot, max(0.0, ends - now), gateway, load)
            yield answer
            cursor, boot = answer["cursor"], self.boot
            if "load" in answer:
                load = "{}:{}".format(*answer["load"])
            before, now = now, clock()
            if now >= ends:
                return
            credit = min(credit + (now - before) * LINES_PER_SECOND, LINES_AT_ONCE) - 1
            if credit < 1:
                await asyncio.sleep((1 - credit) / LINES_PER_SECOND)


feed = Feed()


_metrics = make_asgi_app()


class EventsEndpoint:
    """ASGI middleware for vLLM's `--middleware`: `GET /seamark/outcomes?boot=B&after=N&wait=S`, all else to the app.

    With `gateway=ID&load=REQUESTS:TOKENS` a gateway also reads what others have here, by the `LOAD_HEADER` of each
    request. With `lines=1` there are answers until S seconds are over, a line each, so that many cost as one read.

    `METRICS_PATH` gives metrics by name. The app's answer to a request with `HEADER` gets that header, if it is no
    stream and its outcome is known here; a stream's first events go out in one piece. A hint in a header of a request
    from a trusted hop goes into its body (`hint_header`).
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] in (METRICS_PATH, "/metrics", "/metrics/"):
            feed.catch_up()
        if scope["type"] == "http" and scope["path"] == METRICS_PATH:
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # no single process has the numbers of several API servers
                await self._app({**scope, "path": "/metrics", "raw_path": b"/metrics"}, receive, send)
            else:
                await _metrics(scope, receive, send)
            return
        if scope["type"] == "http" and hint_header.is_in(scope):
            receive = await hint_header.into_body(scope, receive)
        if scope["type"] != "http" or scope["path"] != PATH:
            headers = dict(scope["headers"]) if scope["type"] == "http" else {}
            sends = _joins_first(_adds_outcome(scope, send)) if headers.get(HEADER) == b"1" else send
            if LOAD_HEADER in headers:
                await _counted(self._app, scope, receive, sends, headers)
            else:
                await self._app(scope, receive, sends)
            return
        if scope["method"] != "GET":
            await _answer(send, 405, {"error": f"{PATH} can only be read: use GET"})
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        after, wait = query.get("after", ["0"])[-1], query.get("wait", ["0"])[-1]
        if not (after.isascii() and after.isdigit()):
            await _answer(send, 400, {"error": "after: use the cursor of the last answer, a number"})
            return
        if not _SECONDS.fullmatch(wait):
            await _answer(send, 400, {"error": "wait: use a number of seconds"})
            return
        seconds = min(float(wait), MAX_WAIT)
        boot, gateway, load = (query.get(name, [None])[-1] for name in ("boot", "gateway", "load"))
        if query.get("lines") == ["1"]:
            await _answer_in_lines(send, feed.answers(int(after), boot, seconds, gateway, load))
            return
        await _answer(send, 200, await feed.wait_after(int(after), boot, seconds, gateway, load))


async def _counted(app: AsgiApp, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes]) -> None:
    """The app's answer, while the request counts as its gateway's."""
    request_id = headers.get(b"x-request-id", b"").decode("latin-1")[:MAX_ID]
    request = feed.loads.begin(headers[LOAD_HEADER], request_id)
    if request is None:
        await app(scope, receive, send)
        return
    counted = request
    feed.wake_others(counted.gateway)

    async def send_counted(message: Message) -> None:
        if counted.left and message.get("body"):
            feed.loads.answered(counted)
            feed.wake_others(counted.gateway)
        await send(message)

    try:
        await app(scope, receive, send_counted)
    finally:
        feed.loads.end(counted)
        feed.wake_others(counted.gateway)


def _adds_outcome(scope: Scope, send: Send) -> Send:
    """`send`, with the outcome of the request among the headers of its answer.

    An error tells none: what is known under its id is that of an earlier request, perhaps a stream. The engine knows a
    response by the id in its answer, so that answer's head waits for its body, which follows at once.
    """
    request_id = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    waiting: Message | None = None

    def with_outcome(head: Message, name: str) -> Message:
        outcome = feed.take_latest(name)
        return head if outcome is None else {**head, "headers": [*head.get("headers", ()), (HEADER, outcome.header)]}

    async def send_with_outcome(message: Message) -> None:
        nonlocal waiting
        if message["type"] == "http.response.start" and message["status"] == 200:
            kinds = [value for name, value in message.get("headers", ()) if name.lower() == b"content-type"]
            if not any(kind.startswith(b"text/event-stream") for kind in kinds):
                if scope["path"] == RESPONSES:
                    waiting = message
                    return
                message = with_outcome(message, request_id)
        elif waiting is not None:
            head, waiting = waiting, None
            named = _RESPONSE_ID.search(message.get("body", b"")[:ID_WITHIN])
            await send(with_outcome(head, f"{named[1].decode()}_0") if named else head)
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
        pieces = b"".join(message.get("body", b"") for message in opening)
        last = opening[-1]
        opening.clear()
        return {**last, "body": pieces}

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


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _answer_in_lines(send: Send, answers: AsyncIterator[Any]) -> None:
    # A proxy in between must not collect them.
    headers = [(b"content-type", b"application/x-ndjson"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for answer in answers:
        await send({"type": "http.response.body", "body": json.dumps(answer).encode() + b"\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})
