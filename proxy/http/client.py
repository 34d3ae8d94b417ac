"""Requests to the workers: over which connection each one goes, its answer by HTTP/1.1, and why there may be none.

Health checks and renders come through here, too: they share the workers' connections, the workers' API key and these
errors. No proxy that the environment names is asked.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
import ssl
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import cache
from math import inf
from typing import Any
from urllib.parse import urlsplit

import aiohappyeyeballs
import httptools
from cachetools import TTLCache

from proxy.http.asgi import codings, head_of
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
    """One connection, and at most one request under way on it.

    It waits for its next request only once the last answer has ended as it should. Whatever else happens, a client that
    leaves in between for example, closes it. httptools reads heads and chunks. By RFC 9110 and 9112:

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


# Requests without a body by these may be sent once more although the worker may have read them (RFC 9110, 9.2.2).
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

# A connection that cannot be made for one of these is no fault of the worker: this machine has nothing left for it.
OWN_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

# Bytes of an answer's head beyond those of the longest request, which a redirect or an error may repeat.
MORE_HEADER_BYTES = 8192

MOST_OWN_BYTES = 2**26  # of an answer to one of the gateway's own requests

CHECK_SECONDS = 0.25  # between two looks at all connections: so exactly are bounds of time held
NAME_SECONDS = 10.0  # that the addresses of a name are believed
NEXT_ADDRESS_SECONDS = 0.25  # that one address may take before the next one is tried beside it (RFC 8305, 5)


class Unreachable(Exception):
    """No connection to the worker: nothing was sent, so another worker can be tried. The message says why."""


class Exhausted(Unreachable):
    """This machine has no descriptor, port or memory for another connection. No worker is to blame."""


class Refused(Unreachable):
    """Nothing listens there: the machine is there, and the worker is not."""


class Upstream:
    """Connections to all workers. Requests need a running event loop; call `aclose` afterwards."""

    def __init__(self, connect_timeout: float, max_header_bytes: int, api_key: str | None = None) -> None:
        """`connect_timeout` in seconds; `max_header_bytes`: of a request; `api_key`: the workers', for own requests."""
        self._connect_timeout = connect_timeout
        self._most_head = max_header_bytes + MORE_HEADER_BYTES
        self._open: set[WorkerConnection] = set()
        self._idle: defaultdict[str, list[WorkerConnection]] = defaultdict(list)  # by scheme, host and port
        self._names: TTLCache[str, asyncio.Future[list[Any]]] = TTLCache(1024, NAME_SECONDS)  # addresses, by place
        self._checking: asyncio.TimerHandle | None = None
        self._credentials: dict[str, tuple[bytes, bytes]] = {}  # header, by address
        self.own_headers: Headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []

    async def send(
        self,
        method: str,
        url: str,
        headers: Headers = (),
        body: bytes = b"",
        read_timeout: float | None = None,
        fresh: bool = False,
    ) -> Answer:
        """Send a request, on a new connection if `fresh`.

        `read_timeout` in seconds between two pieces of the answer; None waits for ever. Raises `Unreachable` if no
        connection could be made (`Exhausted`: for want of descriptors here), `Stale` if a kept-alive one had been
        closed, `Malformed` if the answer is no HTTP, `Broken` if it failed otherwise: the worker may have read it;
        and `ValueError` for a header that would not end where its line does.
        """
        if self._credentials:
            headers = self._authorized(url, headers)
        scheme, _, rest = url.partition("://")
        host, _, target = rest.partition("#")[0].partition("/")
        has_body = bool(body) or method not in SAFE
        named = host.removesuffix(":443" if scheme == "https" else ":80")
        first = b"%b /%b HTTP/1.1\r\nHost: %b\r\n" % (method.encode(), target.encode("latin-1"), named.encode())
        head = head_of(first, headers, b"Content-Length: %d\r\n" % len(body) if has_body else b"", 2 + has_body)
        connection = await self._connection(f"{scheme}://{host}", fresh)
        if connection.is_stale():
            connection.end(None)
            raise (Stale if connection.was_kept else Unreachable)("it closes connections, or speaks before it is asked")
        return await connection.ask(head, body, read_timeout, is_head=method == "HEAD", may_repeat=not has_body)

    async def fetch(
        self, method: str, url: str, body: bytes = b"", timeout: float | None = None, headers: Headers = ()
    ) -> tuple[int, bytes]:
        """The status and the whole body of one of the gateway's own requests; `timeout` in seconds for each read.

        Raises as `send`, and `Malformed` for a body of more than `MOST_OWN_BYTES`.
        """
        answer = await self.ask(method, url, body, timeout, headers)
        try:
            return answer.status, await answer.read(MOST_OWN_BYTES)
        finally:
            answer.close()

    async def ask(
        self, method: str, url: str, body: bytes = b"", timeout: float | None = None, headers: Headers = ()
    ) -> Answer:
        """The answer to one of the gateway's own requests, to be read and closed, as `fetch`."""
        headers = [*self.own_headers, *headers, *([(b"content-type", b"application/json")] if body else [])]
        try:
            return await self.send(method, url, headers, body, read_timeout=timeout)
        except Stale:
            return await self.send(method, url, headers, body, read_timeout=timeout, fresh=True)

    def trust(self, address: str, userinfo: str | None) -> None:
        """Requests to this address carry `userinfo` (`user:password`), and no other authorization."""
        self._credentials.pop(address, None)
        if userinfo is not None:
            self._credentials[address] = (b"authorization", b"Basic " + b64encode(userinfo.encode()))

    async def aclose(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
            self._checking = None
        for connection in [*self._open]:
            connection.end(Broken("the gateway stops"))
        await asyncio.sleep(0)  # the loop closes them

    def _authorized(self, url: str, headers: Headers) -> Headers:
        for address, credentials in self._credentials.items():
            if url.startswith(address + "/"):
                return [*(each for each in headers if each[0] != credentials[0]), credentials]
        return headers

    async def _connection(self, place: str, fresh: bool) -> WorkerConnection:
        """The one that became idle last, so that the others may end, or a new one. Raises `Unreachable`."""
        idle = self._idle[place]
        if idle and not fresh:
            return idle.pop()
        try:
            return await self._dial(place, None if fresh else idle)
        except (OSError, UnicodeError) as error:
            number = getattr(error, "errno", None)
            kind = Refused if number == errno.ECONNREFUSED else Unreachable
            raise (Exhausted if _is_own_shortage(error) else kind)(self._why_not(error, number)) from error

    async def _dial(self, place: str, idle: list[WorkerConnection] | None) -> WorkerConnection:
        """A new one. Of several addresses, those of IPv6 and IPv4 are tried alternately (RFC 8305, 4 and 5)."""
        loop, parts = asyncio.get_running_loop(), urlsplit(place)
        is_tls, host = parts.scheme == "https", parts.hostname or ""
        async with asyncio.timeout(self._connect_timeout):
            asked = self._names.get(place)  # one lookup for all who wait for it, and beyond the time of each
            if asked is None or (asked.done() and (asked.cancelled() or asked.exception())):
                looking = loop.getaddrinfo(host, parts.port or (443 if is_tls else 80), type=socket.SOCK_STREAM)
                asked = self._names[place] = asyncio.ensure_future(looking)
            known = await asyncio.shield(asked)
            addresses = [*known]
            known.append(known.pop(0))  # the next connection begins with the next one
            made = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_SECONDS)
            tls: Any = {"ssl": _tls(), "server_hostname": host.rstrip(".")} if is_tls else {}
            _, connection = await loop.create_connection(
                lambda: WorkerConnection(self._most_head, idle, self._open), sock=made, **tls
            )
        if self._checking is None:
            self._check()
        return connection

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        self._checking = loop.call_later(CHECK_SECONDS, self._check) if self._open else None
        for connection in [*self._open]:
            connection.check()

    def _why_not(self, error: Exception, number: int | None) -> str:
        if isinstance(error, TimeoutError) and number is None:
            return f"no connection within {self._connect_timeout:g} s"
        if isinstance(error, ssl.SSLError):
            return "TLS fails: http:// instead of https://, or a certificate that is not trusted here"
        if isinstance(error, socket.gaierror | UnicodeError):
            return "its host name is not known here"
        if number == errno.ECONNREFUSED:
            return "connection refused: nothing listens there, or not yet"
        return os.strerror(number).lower() if number else "no connection"


_tls = cache(ssl.create_default_context)


def _is_own_shortage(error: Exception) -> bool:
    if isinstance(error, socket.gaierror):  # a resolver without descriptors knows no names
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as shortage:
            error = shortage
    return getattr(error, "errno", None) in OWN_SHORTAGE
