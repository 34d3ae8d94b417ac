"""A worker for what no engine can show: it notes the moment its connections are closed, and takes HTTP by the letter.

To the gateway it looks like a patched vLLM. What a client writes into `x-mock` says how it answers, `x-mock-id` under
which name it remembers the request; every answer of its own is marked `x-mock: answer`.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

# How it answers.
WHOLE, SILENT, STALLED, DRIPPING, SLOW_BODY = "whole", "silent", "stalled", "dripping", "slow-body"

DRIP_SECONDS = 0.01

EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"\xc3\xa9"}}]}\n\n'

USAGE = {"prompt_tokens": 9, "total_tokens": 10, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}

COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "é"}, "finish_reason": "stop"}],
    "usage": USAGE,
}

MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 8192}]}

METRICS = (
    b"process_start_time_seconds 1.7e+09\n"
    b'seamark_engine_info{block_size="384",match_unit="16",version="0.1.0",vllm="0.32.0"} 1.0\n'
)

_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (/[\x21-\x7e]*) HTTP/1\.1")

_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\x00]*?)[ \t]*")

_RENDER = b"/v1/chat/completions/render"


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]  # lower-case names; of several equal ones the last
    body: bytes
    connection: int  # number of the connection it came on

    @property
    def id(self) -> str:
        """What the client called it, empty where it has no name."""
        return self.headers.get(b"x-mock-id", b"").decode("latin-1")


class Malformed(NamedTuple):
    """Bytes that are no request by RFC 9112, and what is wrong with them."""

    why: str
    data: bytes


class StrictWorker:
    """Use as an async context manager; `url` is known then."""

    def __init__(self) -> None:
        self.url = ""
        # By id, what clients sent; not what the gateway asks for itself. Those without a name are under "".
        self.seen: defaultdict[str, list[Seen]] = defaultdict(list)
        self.malformed: list[Malformed] = []
        self.connections = 0  # ever made
        self._arrived: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._flowing: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._left: defaultdict[str, asyncio.Future[float]] = defaultdict(asyncio.get_running_loop().create_future)

    async def __aenter__(self) -> StrictWorker:
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()

    async def arrived(self, request_id: str) -> None:
        """Return once a request of that id is here."""
        await self._arrived[request_id].wait()

    async def flowing(self, request_id: str) -> None:
        """Return once a part of the answer to it has been sent."""
        await self._flowing[request_id].wait()

    async def left(self, request_id: str) -> float:
        """`time.perf_counter()` of the moment when the connection of that unfinished request was closed."""
        return await asyncio.shield(self._left[request_id])

    def pop(self, request_id: str) -> list[Seen]:
        """The requests of that id, forgotten from here on."""
        for kept in (self._arrived, self._flowing, self._left):
            kept.pop(request_id, None)
        return self.seen.pop(request_id, [])

    def take(self, seen: Seen) -> None:
        """A request is complete."""
        self.seen[seen.id].append(seen)
        self._arrived[seen.id].set()

    def flows(self, request_id: str) -> None:
        """A part of its answer has been sent."""
        self._flowing[request_id].set()

    def gone(self, request_id: str) -> None:
        """Its connection is closed, and it was not answered in full."""
        if not self._left[request_id].done():
            self._left[request_id].set_result(time.perf_counter())


class _Connection(asyncio.Protocol):
    def __init__(self, worker: StrictWorker) -> None:
        self._worker = worker
        self._data = b""
        self._open: Seen | None = None  # being answered
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._worker.connections += 1
        self._number = self._worker.connections

    def data_received(self, data: bytes) -> None:
        self._data += data
        try:
            while self._data and (framed := frame(self._data)) is not None:
                request, self._data = framed
                self._answer(Seen(*request, connection=self._number))
        except ValueError as error:
            self._worker.malformed.append(Malformed(str(error), self._data))
            self._transport.close()

    def eof_received(self) -> None:
        self._closed()

    def connection_lost(self, error: Exception | None) -> None:
        self._closed()

    def _closed(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        if self._open is not None:
            self._worker.gone(self._open.id)
            self._open = None
        elif self._data:
            self._worker.malformed.append(Malformed("cut off", self._data))
            self._data = b""

    def _answer(self, seen: Seen) -> None:
        path = seen.target.partition(b"?")[0]
        if not seen.id and (own := _own_pages(seen, path)) is not None:
            self._whole(*own)
            return
        self._worker.take(seen)
        how = seen.headers.get(b"x-mock", b"whole").decode("latin-1")
        if how == WHOLE:
            self._whole(json.dumps(COMPLETION).encode(), bare=seen.method == b"HEAD")
            return
        self._open = seen
        if how in (STALLED, DRIPPING):
            self._head(b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")
            self._transport.write(_chunk(EVENT))
        if how == SLOW_BODY:
            self._head(b"application/json", b"content-length: 1000000")
        if how in (DRIPPING, SLOW_BODY):
            self._answering = asyncio.ensure_future(self._drip(_chunk(EVENT) if how == DRIPPING else b" ", seen.id))

    async def _drip(self, piece: bytes, seen_id: str) -> None:
        while True:
            self._transport.write(piece)
            await asyncio.sleep(DRIP_SECONDS)
            self._worker.flows(seen_id)

    def _whole(self, body: bytes, kind: bytes = b"application/json", bare: bool = False) -> None:
        self._head(kind, b"content-length: %d" % len(body))
        self._transport.write(b"" if bare else body)

    def _head(self, kind: bytes, framing: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\nx-mock: answer\r\n%b\r\n\r\n" % (kind, framing))


def _own_pages(seen: Seen, path: bytes) -> tuple[bytes, bytes] | None:
    """What the gateway asks for itself: body and media type."""
    pages = {
        b"/health": (b"", b"text/plain"),
        b"/metrics": (METRICS, b"text/plain"),
        b"/v1/models": (json.dumps(MODELS).encode(), b"application/json"),
        b"/seamark/outcomes": (b'{"boot":"b","cursor":0,"outcomes":[]}', b"application/json"),
    }
    if path == _RENDER:
        return _rendered(seen.body), b"application/json"
    return pages.get(path) if seen.method == b"GET" else None


def _rendered(body: bytes) -> bytes:
    """One token per character of the messages, whatever they are; nothing where there are none: clients ask too."""
    try:
        request = json.loads(body)
        text = "".join(f"<{json.dumps(message)}>" for message in request.get("messages") or ())
    except (ValueError, AttributeError, TypeError, RecursionError):
        return b"{}"
    text += "<assistant>" if request.get("add_generation_prompt", True) else ""
    return json.dumps({"token_ids": list(map(ord, text))}).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


Framed = tuple[tuple[bytes, bytes, dict[bytes, bytes], bytes], bytes]  # (method, target, headers, body), what follows


def frame(data: bytes) -> Framed | None:
    """The first request in `data`, None while it is incomplete. Raises `ValueError` for what RFC 9112 forbids."""
    head, end, rest = data.partition(b"\r\n\r\n")
    if not end:
        return None
    line, *lines = head.split(b"\r\n")
    if (request := _REQUEST_LINE.fullmatch(line)) is None:
        raise ValueError("request line")
    fields = [_FIELD.fullmatch(field) for field in lines]
    if None in fields:
        raise ValueError("header field")
    pairs = [(match[1].lower(), match[2]) for match in fields if match is not None]
    headers = dict(pairs)
    lengths = [value for name, value in pairs if name == b"content-length"]
    codings = [value for name, value in pairs if name == b"transfer-encoding"]
    if len(lengths) + len(codings) > 1:
        raise ValueError("framed more than once")
    if codings:
        raise ValueError("chunked, where the whole body was known")
    size = 0
    if lengths:
        if not re.fullmatch(rb"[0-9]+", lengths[0]):
            raise ValueError("content-length")
        size = int(lengths[0])
    if len(rest) < size:
        return None
    return (request[1], request[2], headers, rest[:size]), rest[size:]
