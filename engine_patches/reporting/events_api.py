"""What became of each request, and of the states it left: a path of the worker that no client of the gateway reaches.

An answer cannot carry it: a stream's headers leave before the request is scheduled, its body is the client's, and a
state goes when nobody asks. So the API server keeps the latest of both, in order, and the gateway asks for what is new.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from engine_patches.scheduler.state_events import CacheCleared, StateEvent, StateEvicted, StateStored

PATH = "/seamark/outcomes"

MAX_KEPT = 8192  # requests, and states that came or went; some 300 bytes each

MAX_WAIT = 10.0  # seconds; a worker that is told to stop finishes its answers first

# vLLM's name of a request: [child of n > 1]_[API]-[X-Request-Id][-prompt of a completion]-[8 random characters].
_COMPLETION = re.compile(r"(?:\d+_)?cmpl-(.*)-\d+-[0-9a-f]{8}")

_SECONDS = re.compile(r"\d{1,6}(\.\d{1,6})?", re.ASCII)

_OTHER = re.compile(r"(?:\d+_)?(?:chatcmpl-|resp_)?(.*?)-[0-9a-f]{8}")

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Outcome(NamedTuple):
    """What became of one request."""

    request_id: str  # its X-Request-Id
    reason: str
    hit_tokens: int


def client_id(engine_id: str) -> str:
    """The `X-Request-Id` in vLLM's name of a request; the name itself where it has another form."""
    match = _COMPLETION.fullmatch(engine_id) or _OTHER.fullmatch(engine_id)
    return match[1] if match else engine_id


class Feed:
    """The latest outcomes and news of one API server, numbered."""

    def __init__(self) -> None:
        self.boot = uuid.uuid4().hex  # numbers begin anew with every process
        self.hears_all = True  # an engine with several API servers tells each a part of its news: worse than none
        self._cursor = 0
        self._kept: deque[tuple[int, Outcome | list[Any]]] = deque(maxlen=MAX_KEPT)
        self._last_news: dict[int, int] = {}  # by engine
        self._waiting: set[asyncio.Event] = set()

    def add(self, engine_id: str, reason: str, hit_tokens: int) -> None:
        """A request was admitted with `hit_tokens` from the cache, for `reason`."""
        self._keep(Outcome(client_id(engine_id), reason, hit_tokens))

    def add_news(self, engine: int, number: int, news: StateEvent) -> None:
        """States came or went in an engine, which numbers what it tells without gaps."""
        if number != self._last_news.get(engine, 0) + 1:
            self._keep(["cleared"])  # what was lost could have been anything
        self._last_news[engine] = number
        match news:
            case StateStored(request_id, end, states):
                self._keep(["came", client_id(request_id), end, states])
            case StateEvicted(name):
                self._keep(["gone", name])
            case CacheCleared():
                self._keep(["cleared"])

    def _keep(self, entry: Outcome | list[Any]) -> None:
        self._cursor += 1
        self._kept.append((self._cursor, entry))

    def publish(self) -> None:
        """Wake who waits for what was added. Call in the event loop that serves."""
        for waiting in self._waiting:
            waiting.set()

    def after(self, cursor: int, boot: str | None = None) -> dict[str, Any]:
        """What is later than `cursor`, all that is kept if it is another process's. States only where all are heard of.

        `reset`: something between was lost to the asker, who knows no longer what the cache holds.
        """
        foreign = boot != self.boot
        oldest = self._kept[0][0] if self._kept else self._cursor + 1
        reset = bool(boot) and (foreign or cursor + 1 < oldest)
        outcomes: list[Outcome] = []
        states: list[list[Any]] = []
        for number, entry in reversed(self._kept):
            if number <= cursor and not foreign:
                break
            (outcomes if isinstance(entry, Outcome) else states).append(entry)
        told = {"boot": self.boot, "cursor": self._cursor, "outcomes": outcomes[::-1]}
        return {**told, "states": states[::-1], "reset": reset} if self.hears_all else told

    async def later_than(self, cursor: int, boot: str | None, seconds: float) -> dict[str, Any]:
        """As `after`, but not before there is something, or `seconds` have passed."""
        if seconds and boot == self.boot and cursor >= self._cursor:
            news = asyncio.Event()
            self._waiting.add(news)
            try:
                await asyncio.wait_for(news.wait(), seconds)
            except TimeoutError:
                pass
            finally:
                self._waiting.discard(news)
        return self.after(cursor, boot)


feed = Feed()


class EventsEndpoint:
    """ASGI middleware for vLLM's `--middleware`: `GET /seamark/outcomes?boot=B&after=N&wait=S`, all else to the app."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Callable, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        if scope["method"] != "GET":
            await _answer(send, 405, {"error": f"{PATH} is only read: GET"})
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        after, wait = query.get("after", ["0"])[-1], query.get("wait", ["0"])[-1]
        if not (after.isascii() and after.isdigit()):
            await _answer(send, 400, {"error": "after: the cursor of the last answer, a number"})
            return
        if not _SECONDS.fullmatch(wait):
            await _answer(send, 400, {"error": "wait: seconds to wait for something new, a number"})
            return
        seconds = min(float(wait), MAX_WAIT)
        await _answer(send, 200, await feed.later_than(int(after), query.get("boot", [None])[-1], seconds))


async def _answer(send: Send, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
