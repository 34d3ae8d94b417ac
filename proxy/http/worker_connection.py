"""A connection to a worker by HTTP/1.1, and the answers that come over it; httptools reads their heads and chunks.

A connection waits for its next request only once the last answer has ended as it should. Whatever else happens, a
client that leaves in between for example, closes it.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from math import inf
from typing import Any

import httptools

from proxy.http.asgi import codings
from proxy.http.json_body import OverBound

Headers = Sequence[tuple[bytes, bytes]]

# uvicorn, which serves vLLM, closes idle connections after 5 seconds. Closing earlier avoids writing into a closed one.
KEEPALIVE_SECONDS = 4.0

MOST_HELD = 2**16  # bytes of an answer that wait to be read; with more, the worker waits, too

CODING = b"transfer-encoding"


class Broken(Exception):
    """The worker broke off after it had received the request."""


class Silent(Broken):
    """No byte came within the read timeout."""


class Stale(Broken):
    """A kept-alive connection had been closed: the worker has not read the request, or it is one of `SAFE`."""


class Malformed(Broken):
    """The answer is no HTTP, or its head is too long. What the request asked for may be the reason."""


class Answer:
    """A worker's answer, its body still to be read. Call `close` afterwards."""

    __slots__ = ("_connection", "_error", "_waiter", "headers", "held", "named", "pieces", "sink", "status")

    def __init__(self, connection: WorkerConnection) -> None:
        self.status = 0  # until its head is here
        self.headers: Headers = ()  # names and values as they came
        self.named: Mapping[bytes, bytes] = {}  # the first value of each name, in lower case
        self.pieces: list[bytes] = []  # of its body, not yet read
        self.held = 0  # bytes of them
        self._connection: WorkerConnection | None = connection  # until its end is here
        self._error: Exception | None = None  # why there is no more of it
        self._waiter: asyncio.Future[None] | None = None
        self.sink: Callable[[bytes], bool] | None = None  # is given pieces, and says whether it has taken them

    def header(self, name: str) -> str | None:
        value = self.named.get(name.lower().encode())
        return None if value is None else value.decode(errors="surrogateescape")

    @property
    def is_encoded(self) -> bool:
        if self.header("content-encoding") is None:
            return False
        return bool(codings((name.lower(), value) for name, value in self.headers))

    async def next_chunk(self) -> bytes:
        """The next piece of the body, undecoded; empty at its end. Raises `Broken` when the worker breaks off."""
        while not (pieces := self.pieces):
            if self._connection is None and self._error is None:
                return b""
            await self.more()
        self.pieces, self.held = [], 0
        if self._connection is not None:
            self._connection.resume()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def lines(self, most: int) -> AsyncIterator[bytes]:
        """The body's lines, the last one ended or not. Raises `Broken`, `OverBound` past about `most` bytes of one."""
        begun = bytearray()
        while chunk := await self.next_chunk():
            goes_on, *rest = chunk.split(b"\n")
            begun += goes_on
            for each in rest:
                yield bytes(begun)
                begun = bytearray(each)
            if len(begun) > most:
                raise OverBound(f"a line of more than {most:,} bytes")
        if begun:
            yield bytes(begun)

    async def read(self, most: float = inf) -> bytes:
        """The whole body. Raises `Broken`: `Malformed` past `most` bytes."""
        whole = bytearray()
        while chunk := await self.next_chunk():
            whole += chunk
            if len(whole) > most:
                raise Malformed(f"more than {most:,} bytes")
        return bytes(whole)

    def close(self) -> None:
        """Close the connection if the body has not come to its end; otherwise that may serve another request by now."""
        if self._connection is not None:
            self._connection.end(Broken("given up"))

    async def more(self) -> None:
        """Return once more of it is here, or its end. Raises `Broken`."""
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def end(self, error: Exception | None) -> None:
        """No more will come: it is complete, or this is why it is not."""
        self._connection, self._error = None, error
        self.wake()


class WorkerConnection(asyncio.Protocol):
    """One connection, and at most one request under way on it. By RFC 9110 and 9112:

    - A bare CR or LF, a null byte, a space before a colon and a folded line are no HTTP (9112, 2.2, 5.1, 5.2).
    - Answers of 1xx are passed over (9110, 15.2), except 101: nobody asked for another protocol (9110, 7.8).
    - A body ends at once for HEAD, 204 and 304; with the last chunk; at its length; else where the worker closes, by
      TLS with a closure alert (9112, 6.3, 9.8). Cut before that it is broken (9112, 8). A length that is repeated or
      beside chunks is no HTTP, and neither is a transfer coding but `chunked` (9112, 6.1): nobody here would undo it.
    - Extensions of chunks and trailers are left out (9112, 7.1).
    - The connection is kept unless the worker says `close`, speaks HTTP/1.0, answers before it has read the request
      (9112, 9.3, 9.5), or sends more than its answer: what follows is nobody's (9112, 6.3).
    """

    def __init__(self, most_head: int, idle: list[WorkerConnection] | None, open_ones: set[WorkerConnection]) -> None:
        """`most_head` in bytes, of a head; `idle`: where it waits for its next request, None: it serves one only."""
        self._most_head, self._idle, self._open_ones = most_head, idle, open_ones
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []  # of a body, out of the bytes that have just come
        self.on_body = self._pieces.append  # a function of Python's would cost more than the parser
        self._parser = httptools.HttpResponseParser(self)
        self._answer: Answer | None = None  # to the request under way
        self._limit: float | None = None  # seconds of silence
        self._is_head_all = self._may_repeat = False  # of the request
        self._fields: list[tuple[bytes, bytes]] = []  # of the head that comes, or trailers
        self._unread = 0  # bytes that came since the last head, or piece of a body
        self._unsent = 0  # bytes of the request, when it was last looked at
        self._is_framed = self._is_complete = self._keeps = False  # of the answer; framed: it says where it ends
        self._is_paused = False
        self.was_kept = False  # it has served a request before
        self._heard = 0.0  # when something came last, or a request was sent (loop time)

    def is_stale(self) -> bool:
        """Whether the worker has closed it or sent what nobody asked for, even if the event loop has not seen it."""
        return self._transport.is_closing() or (self.was_kept and bool(self._poll.poll(0)))

    async def ask(self, head: bytes, body: bytes, limit: float | None, *, is_head: bool, may_repeat: bool) -> Answer:
        """Send a request, and return once the answer's head is here. The body goes all at once: it is in memory anyway.

        `limit`: seconds of silence, or without progress of a body on its way; `is_head`: the method is HEAD;
        `may_repeat`: it may be sent again although the worker may have read it. Raises `Broken`.
        """
        self._answer = answer = Answer(self)
        self._limit, self._is_head_all, self._may_repeat = limit, is_head, may_repeat and self.was_kept
        self._fields, self._unread, self._is_complete = [], 0, False
        self._heard = self._loop.time()
        try:
            self._transport.writelines((head, body) if body else (head,))  # asyncio never drops an empty one
            while not answer.status:
                await answer.more()
        except BaseException:
            answer.close()
            raise
        return answer

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused, self._heard = False, self._loop.time()
            self._transport.resume_reading()

    def end(self, error: Exception | None, keeps: bool = False) -> None:
        """The answer under way is complete, or this is why it never will be. Close at once, unless this `keeps` it."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end(error)
        if keeps and self._idle is not None and not self._transport.get_write_buffer_size():
            self.was_kept = True
            self._idle.append(self)
            return
        if self._idle and self in self._idle:
            self._idle.remove(self)
        self._transport.abort()

    def check(self) -> None:
        """End what is idle or silent for too long. A worker is not silent while its answer waits here."""
        now = self._loop.time()
        if self._answer is None:
            if now - self._heard > KEEPALIVE_SECONDS:
                self.end(None)
        elif self._limit is not None and not self._is_paused:
            unsent = self._transport.get_write_buffer_size()
            if unsent != self._unsent:
                self._unsent, self._heard = unsent, now
            elif now - self._heard > self._limit:
                self.end(Silent(f"nothing came for {self._limit:g} s"))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport  # uvloop's is none by inheritance
        self._heard = self._loop.time()
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._open_ones.add(self)

    def data_received(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if (answer := self._answer) is None:  # nobody asked for it
            self.end(None)
            return
        self._unread += len(data)
        fault: Exception | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = Malformed(str(error.__context__ or error))
        if pieces := self._pieces:
            piece = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._unread = 0
            try:  # while nothing waits to be read, and whoever reads is then not woken
                if answer.sink is None or answer.pieces or not answer.sink(piece):
                    answer.pieces.append(piece)
                    answer.held += len(piece)
            except Exception as error:  # half taken: whoever reads meets this, and nothing more
                self._is_complete, fault = False, error
        if self._is_complete:
            self.end(None, keeps=self._keeps and fault is None)
        elif fault is not None or self._unread > self._most_head:
            self.end(fault or Malformed("a head, or what stands between the pieces of a body, is too long"))
        elif answer.pieces or answer.sink is None:
            if answer.held > MOST_HELD:
                self._is_paused = True
                self._transport.pause_reading()
            answer.wake()

    def eof_received(self) -> None:
        tls = self._transport.get_extra_info("ssl_object")
        try:
            is_cut = tls is not None and bool(tls.read(1))
        except ssl.SSLError:  # there was no alert
            is_cut = True
        if self._answer is not None and self._answer.status and not (self._is_framed or is_cut):
            self.end(None)
        else:
            self.connection_lost(None)  # now, although some of the request may still be unsent

    def connection_lost(self, error: Exception | None) -> None:
        self._open_ones.discard(self)
        is_unread = self._answer is not None and not (self._answer.status or self._unread)
        kind = Stale if self._may_repeat and is_unread else Broken
        self.end(kind(str(error or "the worker closed the connection")))

    def on_message_begin(self) -> None:  # here begin the parser's calls; an error stops it
        if self._is_complete:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if b"\t" in value and name.lower() == CODING:
            raise ValueError("a tab behind a transfer coding")  # httptools would not see that it is `chunked`
        self._fields.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        fields, self._fields = self._fields, []
        status, answer = self._parser.get_status_code(), self._answer
        if self._unread > self._most_head < sum(len(name) + len(value) + 4 for name, value in fields):
            raise ValueError("its head is too long")
        if answer is None or status == 101 or not 100 <= status < 600:
            raise ValueError(f"status {status}")
        self._unread = 0
        if status < 200:
            return
        named = {name.lower(): value for name, value in reversed(fields)}
        if CODING in named and [value.lower() for name, value in fields if name.lower() == CODING] != [b"chunked"]:
            raise ValueError("a transfer coding other than chunked")
        self._is_framed = CODING in named or b"content-length" in named
        self._keeps = self._parser.should_keep_alive() and self._parser.get_http_version() == "1.1"
        answer.status, answer.headers, answer.named = status, fields, named
        if self._is_head_all:
            self._is_complete = True
            raise ValueError("a body")

    def on_message_complete(self) -> None:
        self._is_complete = self._answer is not None and self._answer.status > 0
