"""A worker on a raw socket, for what no HTTP server shows.

It takes HTTP by the letter, notices when a connection closes, and closes one without an answer. To the gateway it looks
like a patched vLLM. A request's header `x-mock` says how it is answered, `x-mock-id` under which name it is remembered;
the answer is marked `x-mock: answer`. With `raw_worker(reply)` a function answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from proxy.bench.harness.servers import Server
from tests.harness.fake_engine import engine_info, template, token_ids
from tests.harness.recording_worker import COMPLETION

# How a request is answered.
WHOLE, SILENT, STALLED, DRIPPING, SLOW_BODY = "whole", "silent", "stalled", "dripping", "slow-body"

DRIP_SECONDS = 0.01

EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"\xc3\xa9"}}]}\n\n'

JSON = b"application/json"

_METRICS = b"process_start_time_seconds 1.7e+09\n" + engine_info().encode(), b"text/plain"

PAGES = {
    b"/health": (b"", b"text/plain"),
    b"/metrics": _METRICS,
    b"/seamark/metrics": _METRICS,
    b"/kv_event_sources": (b"{}", JSON),
    b"/v1/models": (b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":131072}]}', JSON),
    b"/version": (b'{"version":"0.32.0"}', JSON),
    b"/seamark/outcomes": (b'{"boot":"b","cursor":0,"events":[],"reset":false}', JSON),
    # For other gateways.
    **dict.fromkeys((b"/get_model_info", b"/model_info"), (b'{"model_path":"m","is_generation":true}', JSON)),
    **dict.fromkeys((b"/get_server_info", b"/server_info"), (b'{"model_path":"m","served_model_name":"m"}', JSON)),
}

RENDER, DETOKENIZE = b"/v1/chat/completions/render", b"/detokenize"

_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"

_REQUEST_LINE = rb"(%b) (/[\x21-\x7e]*) HTTP/1\.1" % _TOKEN

_HEAD = re.compile(rb"%b((?:\r\n%b:[^\r\n\x00]*)*)" % (_REQUEST_LINE, _TOKEN))

_FRAMING = re.compile(rb"\r\n(content-length|transfer-encoding):[ \t]*([^\r\n]*?)[ \t]*(?=\r\n|$)", re.I)


class Head(NamedTuple):
    """A request's head, and which bytes behind its beginning are its body."""

    method: bytes
    target: bytes
    fields: bytes
    start: int
    end: int

    @property
    def headers(self) -> dict[bytes, bytes]:
        """By lower-case name; the last of several equal ones."""
        pairs = (field.split(b":", 1) for field in self.fields.split(b"\r\n")[1:])
        return {name.lower(): value.strip(b" \t") for name, value in pairs}


def head_of(data: bytes) -> Head | None:
    """The head that `data` begins with, None while it is incomplete. Raises `ValueError` for what RFC 9112 forbids."""
    start = data.find(b"\r\n\r\n")
    if start < 0:
        return None
    if (match := _HEAD.fullmatch(data, 0, start)) is None:
        raise ValueError("header field" if re.match(_REQUEST_LINE + rb"\r\n", data) else "request line")
    method, target, fields = match.groups()
    framing = _FRAMING.findall(fields)
    if len(framing) > 1:
        raise ValueError("framed more than once")
    size = 0
    for name, value in framing:
        if name.lower() == b"transfer-encoding":
            raise ValueError("chunked, although the whole body was known")
        if not re.fullmatch(rb"[0-9]+", value):
            raise ValueError("content-length")
        size = int(value)
    return Head(method, target, fields, start + 4, start + 4 + size)


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    body: bytes
    connection: int  # number of the connection it came on

    @property
    def id(self) -> str:
        """What the client called it, empty if it has no name."""
        return self.headers.get(b"x-mock-id", b"").decode("latin-1")


class Malformed(NamedTuple):
    """Bytes that are no request by RFC 9112, and what is wrong with them."""

    why: str
    data: bytes


class Connection(asyncio.Protocol):
    """One connection, cut into requests."""

    def __init__(self) -> None:
        self.rest = b""  # arrived, and not yet answered
        self._head: Head | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.rest = self.rest + data if self.rest else data
        try:
            while self.rest and not self.transport.is_closing():
                head = self._head = self._head or head_of(self.rest)
                if head is None or len(self.rest) < head.end:
                    return
                body, self.rest, self._head = self.rest[head.start : head.end], self.rest[head.end :], None
                self.received(head, body)
        except ValueError as error:
            self.malformed(str(error))
            self.transport.close()

    def received(self, head: Head, body: bytes) -> None:
        """Answer a request."""
        raise NotImplementedError

    def malformed(self, why: str) -> None:
        """What has arrived is no request."""


def whole(body: Any = COMPLETION, status: str = "200 OK", kind: bytes = JSON, mark: bytes = b"") -> bytes:
    """A whole answer; a body that is not bytes as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n"
    return head % (status.encode(), kind, mark, len(raw)) + raw


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


Reply = Callable[[bytes, int], bytes | None]  # (body, requests before it on this connection); None: closed unanswered


class RawWorker:
    """Use as an async context manager; `url` is known then."""

    def __init__(self, reply: Reply | None = None) -> None:
        self.url = ""
        self.reply = reply
        # By id, what clients sent; not what the gateway asks for itself. Those without a name are under "".
        self.seen: defaultdict[str, list[Seen]] = defaultdict(list)
        self.malformed: list[Malformed] = []
        self.connections = 0  # ever made
        self.open: set[_Connection] = set()
        self.has_arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.has_flown: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.has_left: defaultdict[str, asyncio.Future[float]] = defaultdict(asyncio.get_running_loop().create_future)

    async def __aenter__(self) -> RawWorker:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()

    async def arrived(self, request_id: str) -> None:
        """Return once a request of that id is here."""
        await self.has_arrived[request_id].wait()

    async def flowing(self, request_id: str) -> None:
        """Return once a part of the answer to it has been sent."""
        await self.has_flown[request_id].wait()

    async def left(self, request_id: str) -> float:
        """`time.perf_counter()` of the moment when the connection of that unfinished request was closed."""
        return await asyncio.shield(self.has_left[request_id])

    def pop(self, request_id: str) -> list[Seen]:
        """The requests of that id, forgotten from here on."""
        for kept in (self.has_arrived, self.has_flown, self.has_left):
            kept.pop(request_id, None)
        return self.seen.pop(request_id, [])


class _Connection(Connection):
    def __init__(self, worker: RawWorker) -> None:
        super().__init__()
        self._worker = worker
        self._served = 0
        self._open: Seen | None = None  # being answered
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._worker.connections += 1
        self._number = self._worker.connections
        self._worker.open.add(self)

    def malformed(self, why: str) -> None:
        self._worker.malformed.append(Malformed(why, self.rest))

    def eof_received(self) -> None:
        self._closed()

    def connection_lost(self, error: Exception | None) -> None:
        self._worker.open.discard(self)
        self._closed()

    def _closed(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        if self._open is not None:
            if not self._worker.has_left[self._open.id].done():
                self._worker.has_left[self._open.id].set_result(time.perf_counter())
            self._open = None
        elif self.rest:
            self.malformed("cut off")
            self.rest = b""

    def received(self, head: Head, body: bytes) -> None:
        seen = Seen(head.method, head.target, head.headers, body, self._number)
        if not seen.id and (found := page(head.method, head.target.partition(b"?")[0], body)) is not None:
            self.transport.write(whole(*found))
            return
        self._worker.seen[seen.id].append(seen)
        self._worker.has_arrived[seen.id].set()
        if self._worker.reply is not None:
            answer = self._worker.reply(body, self._served)
            self._served += 1
            self.transport.abort() if answer is None else self.transport.write(answer)
            return
        how = seen.headers.get(b"x-mock", b"whole").decode("latin-1")
        if how == WHOLE:
            answer = whole(mark=b"x-mock: answer\r\n")
            self.transport.write(answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if seen.method == b"HEAD" else answer)
            return
        self._open = seen
        if how in (STALLED, DRIPPING):
            self._begin(b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")
            self.transport.write(chunk(EVENT))
        if how == SLOW_BODY:
            self._begin(JSON, b"content-length: 1000000")
        if how in (DRIPPING, SLOW_BODY):
            self._answering = asyncio.ensure_future(self._drip(chunk(EVENT) if how == DRIPPING else b" ", seen.id))

    def _begin(self, kind: bytes, framing: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nx-mock: answer\r\n%b\r\n\r\n" % (kind, framing))

    async def _drip(self, piece: bytes, seen_id: str) -> None:
        while True:
            self.transport.write(piece)
            await asyncio.sleep(DRIP_SECONDS)
            self._worker.has_flown[seen_id].set()


def page(method: bytes, path: bytes, body: bytes) -> tuple[bytes, str, bytes] | None:
    """What a gateway asks for itself; nothing of what is no chat or no tokens: clients ask too."""
    if method == b"POST" and path in (RENDER, DETOKENIZE):
        answer: dict[str, Any] = {}
        with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError, OverflowError, RecursionError):
            asked = json.loads(body)
            if path == RENDER:
                answer = {"token_ids": token_ids(template(asked))}
            else:
                answer = {"prompt": "".join(map(chr, asked["tokens"]))}
        return json.dumps(answer).encode(), "200 OK", JSON
    if method != b"GET" or path not in PAGES:
        return None
    text, kind = PAGES[path]
    return text, "200 OK", kind


@contextmanager
def raw_worker(reply: Reply) -> Iterator[RawWorker]:
    """The worker in a thread, for tests without an event loop."""
    loop = asyncio.new_event_loop()

    async def start() -> RawWorker:
        return await RawWorker(reply).__aenter__()

    worker = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(worker.__aexit__())
        for connection in worker.open:
            connection.transport.abort()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def started(server: Server, path: str = "/ready") -> Server:
    """The server once it is ready; the raw worker answers meanwhile."""
    await asyncio.to_thread(server.wait_until_ready, path)
    return server
