"""What became of each request, and of the states it left: a path of the worker that no client of the gateway reaches.

A stream cannot carry it: its headers leave before the request is scheduled, its body is the client's, and a state may
go while no request asks. So the API server keeps the latest outcomes and events in order, and the gateway reads what is
new. An answer that is no stream carries its outcome in a header, if the request asks for it.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.state_events import CacheCleared, StateEvent, StateEvicted, StateStored

PATH = "/seamark/outcomes"

MAX_KEPT = 8192  # requests, and states that came or went; some 300 bytes each

MAX_ID = 512  # characters kept of an id; vLLM takes headers of megabytes, and the gateway's ids have at most 265

# Of a request with the value 1, and of its answer: REASON,HIT,SHARED,POSITION:POSITION.., lengths in tokens.
HEADER = b"x-seamark-outcome"

MAX_WAIT = 10.0  # seconds; a worker that is to stop finishes its answers first

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


class Outcome(NamedTuple):
    """What became of one request. Lengths in tokens."""

    request_id: str  # its X-Request-Id
    reason: str
    hit_tokens: int
    shared: int  # with an earlier prompt that the engine has seen
    resolved: tuple[int, ...]  # what each entry of its hint names, in the hint's order; 0: not there

    @property
    def header(self) -> bytes:
        """The value of `HEADER`."""
        positions = ":".join(map(str, self.resolved))
        return f"{self.reason},{self.hit_tokens},{self.shared},{positions}".encode()


def client_id(engine_id: str) -> str:
    """The `X-Request-Id` in vLLM's name of a request, or the name itself if it has another form; its beginning."""
    match = _COMPLETION.fullmatch(engine_id) or _OTHER.fullmatch(engine_id)
    return (match[1] if match else engine_id)[:MAX_ID]


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
        self._readers: set[asyncio.Event] = set()  # those that wait

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
                self._keep(["came", client_id(request_id), end, states])
            case StateEvicted(name):
                self._keep(["gone", name])
            case CacheCleared():
                self._keep(["cleared"])

    def _keep(self, entry: Outcome | list[Any]) -> None:
        self._cursor += 1
        self._kept.append((self._cursor, entry))

    def wake_readers(self) -> None:
        """Something was added. Call in the event loop that serves."""
        for reader in self._readers:
            reader.set()

    def after(self, cursor: int, boot: str | None = None) -> dict[str, Any]:
        """Everything later than `cursor`, or everything kept if `boot` is another process's.

        `outcomes`: id, reason and hit tokens of each request; `resolved`, in the same order: id, shared tokens, and
        what its hint's entries name. `states` only if this process gets all events. `reset`: entries were lost to the
        reader, so it no longer knows what the cache holds.
        """
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
        return {**answer, "states": states[::-1], "reset": reset} if self.has_all_events else answer

    async def wait_after(self, cursor: int, boot: str | None, seconds: float) -> dict[str, Any]:
        """As `after`, once there is something, or `seconds` have passed."""
        if seconds and boot == self.boot and cursor >= self._cursor:
            added = asyncio.Event()
            self._readers.add(added)
            try:
                await asyncio.wait_for(added.wait(), seconds)
            except TimeoutError:
                pass
            finally:
                self._readers.discard(added)
        return self.after(cursor, boot)


feed = Feed()


class EventsEndpoint:
    """ASGI middleware for vLLM's `--middleware`: `GET /seamark/outcomes?boot=B&after=N&wait=S`, all else to the app.

    The app's answer to a request with `HEADER` gets that header, if it is no stream and its outcome is known here.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            asked = scope["type"] == "http" and (HEADER, b"1") in scope["headers"]
            await self._app(scope, receive, _adds_outcome(scope, send) if asked else send)
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
        await _answer(send, 200, await feed.wait_after(int(after), query.get("boot", [None])[-1], seconds))


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


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
