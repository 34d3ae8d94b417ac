"""Requests to the workers. No other module knows that aiohttp sends them.

httpx would cost more here: its own transport takes more CPU than the rest of the gateway together, and on top of
aiohttp's transport its request and response objects take as much again as aiohttp itself. Health checks and renders
come through here, too: they share the workers' connections, the workers' API key and these errors.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import aiohttp
from aiohttp import http_writer
from aiohttp.connector import Connection
from aiohttp.payload import BytesPayload
from multidict import CIMultiDict
from yarl import URL

from proxy.http.asgi import codings
from proxy.http.json_body import OverBound

Headers = Sequence[tuple[bytes, bytes]]

# uvicorn, which serves vLLM, closes idle connections after 5 seconds. Closing earlier avoids writing into a closed one.
KEEPALIVE_SECONDS = 4.0

# Requests without a body by these may be sent once more although the worker may have read them (RFC 9110, 9.2.2).
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})

# A connection that cannot be made for one of these is no fault of the worker: this machine has nothing left for it.
OWN_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})

# Bytes of an answer's header beyond those of the longest request, which a redirect or an error may repeat.
MORE_HEADER_BYTES = 8192

MOST_OWN_BYTES = 2**26  # of an answer to one of the gateway's own requests
FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


class Unreachable(Exception):
    """No connection to the worker: nothing was sent, so another worker can be tried. The message says why."""


class Exhausted(Unreachable):
    """This machine has no descriptor, port or memory for another connection. No worker is to blame."""


class Refused(Unreachable):
    """Nothing listens there: the machine is there, and the worker is not."""


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

    __slots__ = ("_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.raw_headers  # names and values as they came

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    @property
    def is_encoded(self) -> bool:
        """Whether its body is compressed, or otherwise no text as it comes."""
        if self.header("content-encoding") is None:
            return False
        return bool(codings((name.lower(), value) for name, value in self.headers))

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, undecoded. Raises `Broken` when the worker breaks off."""
        while chunk := await self.next_chunk():
            yield chunk

    async def next_chunk(self) -> bytes:
        """The next piece of the body, undecoded; empty at its end. Raises `Broken` when the worker breaks off."""
        try:
            return await self._response.content.readany()
        except FAILURES as error:
            raise _broken(error) from error

    async def lines(self, most: int) -> AsyncIterator[bytes]:
        """The body's lines, the last one ended or not. Raises `Broken`, `OverBound` past about `most` bytes of one."""
        begun = bytearray()
        async for chunk in self.chunks():
            *ended, last = chunk.split(b"\n")
            for line in ended:
                yield bytes(begun) + line  # of two pieces of which each is within the bound
                begun.clear()
            begun += last
            if len(begun) > most:
                raise OverBound(f"a line of more than {most:,} bytes")
        if begun:
            yield bytes(begun)

    async def read(self) -> bytes:
        """The whole body. Raises `Broken`."""
        try:
            return await self._response.read()
        except FAILURES as error:
            raise _broken(error) from error

    def close(self) -> None:
        """Give the connection back, or close it if the body was not read to its end."""
        self._response.close()


class Upstream:
    """Connections to all workers. It needs a running event loop; call `aclose` afterwards."""

    def __init__(self, connect_timeout: float, max_header_bytes: int, api_key: str | None = None) -> None:
        """`connect_timeout` in seconds; `max_header_bytes`: of a request; `api_key`: the workers', for own requests."""
        self._connect_timeout = connect_timeout
        self._max_field = max_header_bytes + MORE_HEADER_BYTES
        # The whole has no limit: a cold prefill takes minutes, and an answer may take any time.
        self._timeout = cache(lambda read: aiohttp.ClientTimeout(sock_connect=connect_timeout, sock_read=read))
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether each request opens a new connection
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
        closed, `Malformed` if the answer is no HTTP, `Broken` if it failed otherwise: the worker may have read it.
        """
        if self._credentials:
            headers = self._authorized(url, headers)
        payload = _Payload(body) if body or method not in SAFE else None
        try:
            session, timeout = self._session(fresh), self._timeout(read_timeout)
            response = await session.request(
                method, _parsed(url), headers=_as_text(headers), data=payload, allow_redirects=False, timeout=timeout
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            kind = Refused if getattr(error, "errno", None) == errno.ECONNREFUSED else Unreachable
            raise (Exhausted if _is_own_shortage(error) else kind)(self._why_not(error)) from error
        except FAILURES as error:
            if isinstance(error, aiohttp.ClientResponseError):
                raise Malformed(str(error)) from error
            if isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError):
                if payload is not None and not payload.was_written:
                    raise (Stale if _kept_alive.get() else Unreachable)(str(error)) from error
                if payload is None and _kept_alive.get():
                    raise Stale(str(error)) from error
            raise _broken(error) from error
        return Answer(response)

    async def fetch(
        self, method: str, url: str, body: bytes = b"", timeout: float | None = None, headers: Headers = ()
    ) -> tuple[int, bytes]:
        """The status and the whole body of one of the gateway's own requests; `timeout` in seconds for each read.

        Raises as `send`, and `Malformed` for a body of more than `MOST_OWN_BYTES`.
        """
        answer = await self.ask(method, url, body, timeout, headers)
        try:
            whole = bytearray()
            async for chunk in answer.chunks():
                whole += chunk
                if len(whole) > MOST_OWN_BYTES:
                    raise Malformed(f"more than {MOST_OWN_BYTES:,} bytes")
            return answer.status, bytes(whole)
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

    def _authorized(self, url: str, headers: Headers) -> Headers:
        for address, credentials in self._credentials.items():
            if url.startswith(address + "/"):
                return [*(each for each in headers if each[0] != credentials[0]), credentials]
        return headers

    def _why_not(self, error: aiohttp.ClientError) -> str:
        """Why there is no connection, in the words of an operator."""
        if isinstance(error, asyncio.TimeoutError):
            return f"no connection within {self._connect_timeout:g} s"
        if isinstance(error, aiohttp.ClientSSLError):
            return "TLS fails: http:// instead of https://, or a certificate that is not trusted here"
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return "its host name is not known here"
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.ECONNREFUSED:
            return "connection refused: nothing listens there, or not yet"
        return os.strerror(number).lower() if number else "no connection"

    async def aclose(self) -> None:
        for session in self._sessions.values():
            await session.close()

    def _session(self, fresh: bool) -> aiohttp.ClientSession:
        session = self._sessions.get(fresh)
        if session is None:
            session = self._sessions[fresh] = _new_session(fresh, self._max_field)
        return session


def _new_session(fresh: bool, max_field: int) -> aiohttp.ClientSession:
    """`max_field` in bytes, of a status line and of each header."""
    kept: dict[str, Any] = {"force_close": True} if fresh else {"keepalive_timeout": KEEPALIVE_SECONDS}
    session = aiohttp.ClientSession(
        connector=_Connector(limit=0, **kept),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        # The worker sees the client's headers and no others.
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        max_line_size=max_field,
        max_field_size=max_field,
    )
    session._retry_connection = False  # aiohttp would send again by itself, even on a new connection
    return session


@lru_cache(1024)
def _parsed(url: str) -> URL:
    """The URL with its escapes as the client wrote them. Most requests go to a handful of addresses."""
    return URL(url, encoded=True)


def _as_text(headers: Headers) -> CIMultiDict[str]:
    """Headers as aiohttp takes them, in which `_serialized` finds each byte again, whatever its encoding."""
    return CIMultiDict([(name.decode(), value.decode(errors="surrogateescape")) for name, value in headers])


def _serialized(status_line: str, headers: CIMultiDict[str]) -> bytes:
    """A request's head. aiohttp itself leaves out what stands for a byte that is no UTF-8."""
    if all(map(str.isascii, headers.values())):
        return _serialize_ascii(status_line, headers)
    fields = [f"{name}: {http_writer._safe_header(value)}\r\n" for name, value in headers.items()]
    return "".join([http_writer._safe_header(status_line), "\r\n", *fields, "\r\n"]).encode(errors="surrogateescape")


_serialize_ascii = http_writer._serialize_headers
http_writer._serialize_headers = _serialized


def _broken(error: Exception) -> Broken:
    return (Silent if isinstance(error, asyncio.TimeoutError) else Broken)(str(error))


# Whether the connection of the running task's last request had served another one before.
_kept_alive: ContextVar[bool] = ContextVar("kept_alive", default=False)


class _Connector(aiohttp.TCPConnector):
    """Records whether a request goes out on a connection that was kept alive."""

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        while True:
            connection = await super().connect(*args, **kwargs)
            protocol: Any = connection.protocol
            is_kept = hasattr(protocol, "seamark_used")
            if not is_kept or not protocol.should_close:
                break
            connection.close()  # the worker sent more than one answer, or gave up waiting: it would answer this request
        _kept_alive.set(is_kept)
        protocol.seamark_used = True
        return connection


class _Payload(BytesPayload):
    """A body that is not written to a connection which the worker has closed. aiohttp writes the head along with it."""

    was_written = False

    async def write_with_length(self, writer: Any, content_length: int | None) -> None:
        if _is_closed(writer.transport):
            raise ConnectionResetError(errno.ECONNRESET, "closed while it was idle")
        self.was_written = True
        await super().write_with_length(writer, content_length)


def _is_closed(transport: asyncio.Transport | None) -> bool:
    """Whether the other side has closed, or has sent what nobody asked for, even if the event loop has not seen it."""
    if transport is None or transport.is_closing():
        return True
    if not _kept_alive.get():
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _is_own_shortage(error: aiohttp.ClientError) -> bool:
    if isinstance(error, aiohttp.ClientConnectorDNSError):  # a resolver without descriptors knows no names
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as shortage:
            return shortage.errno in OWN_SHORTAGE
        return False
    return isinstance(error, OSError) and error.errno in OWN_SHORTAGE
