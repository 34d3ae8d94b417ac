"""Requests to the workers. No other module knows that aiohttp sends them.

httpx would cost more here: its own transport takes more CPU than the rest of the gateway together, and on top of
aiohttp's transport its request and response objects take as much again as aiohttp itself. Health checks and renders
come through here, too: they share the workers' connections, the workers' API key and these errors.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import aiohttp
from aiohttp.connector import Connection
from aiohttp.payload import BytesPayload
from multidict import CIMultiDict
from yarl import URL

Headers = Sequence[tuple[bytes, bytes]]

# uvicorn, which serves vLLM, closes idle connections after 5 seconds. Closing earlier avoids writing into a closed one.
KEEPALIVE_SECONDS = 4.0

# Writing to a closed connection fails at once. If it breaks later, the worker has had the request.
STALE_SECONDS = 0.1

FAILURES = (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError)


class Unreachable(Exception):
    """No connection to the worker: nothing was sent, so another worker can be tried."""


class Broken(Exception):
    """The worker broke off after it had received the request."""


class Silent(Broken):
    """No byte came within the read timeout."""


class Stale(Broken):
    """A kept-alive connection was already closed when the request was written: the worker has not read it."""


class Answer:
    """A worker's answer, its body still to be read. Call `close` afterwards."""

    __slots__ = ("_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers = response.raw_headers  # names and values as they came

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return self._response.headers.get(name)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, undecoded. Raises `Broken` when the worker breaks off."""
        read = self._response.content.readany
        try:
            while chunk := await read():
                yield chunk
        except FAILURES as error:
            raise _broken(error) from error

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

    def __init__(self, connect_timeout: float, api_key: str | None = None) -> None:
        """`connect_timeout` in seconds; `api_key` is the workers' key, for the gateway's own requests."""
        self._connect_timeout = connect_timeout
        self._timeouts: dict[float | None, aiohttp.ClientTimeout] = {}
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether each request opens a new connection
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
        connection could be made, `Stale` if a kept-alive one had been closed, `Broken` if it failed later.
        """
        started = time.monotonic()
        try:
            response = await self._session(fresh).request(
                method,
                _parsed(url),
                headers=_as_text(headers),
                data=BytesPayload(body) if body else None,
                allow_redirects=False,
                timeout=self._timeout(read_timeout),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(str(error)) from error
        except FAILURES as error:
            closed = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            if closed and _kept_alive.get() and time.monotonic() - started < STALE_SECONDS:
                raise Stale(str(error)) from error
            raise _broken(error) from error
        return Answer(response)

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        """The status and the whole body of one of the gateway's own requests; `timeout` in seconds for each read."""
        headers = [*self.own_headers, *([(b"content-type", b"application/json")] if body else [])]
        answer = await self.send(method, url, headers, body, read_timeout=timeout)
        try:
            return answer.status, await answer.read()
        finally:
            answer.close()

    async def aclose(self) -> None:
        """Close all connections."""
        for session in self._sessions.values():
            await session.close()

    def _session(self, fresh: bool) -> aiohttp.ClientSession:
        session = self._sessions.get(fresh)
        if session is None:
            session = self._sessions[fresh] = _new_session(fresh)
        return session

    def _timeout(self, read: float | None) -> aiohttp.ClientTimeout:
        timeout = self._timeouts.get(read)
        if timeout is None:
            # The whole has no limit: a cold prefill takes minutes, and an answer may take any time.
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout, sock_read=read)
            self._timeouts[read] = timeout
        return timeout


def _new_session(fresh: bool) -> aiohttp.ClientSession:
    kept: dict[str, Any] = {"force_close": True} if fresh else {"keepalive_timeout": KEEPALIVE_SECONDS}
    return aiohttp.ClientSession(
        connector=_Connector(limit=0, socket_factory=_no_delay, **kept),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        # The worker sees the client's headers and no others.
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


def _no_delay(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


@lru_cache(1024)
def _parsed(url: str) -> URL:
    """The URL with its escapes as the client wrote them. Most requests go to a handful of addresses."""
    return URL(url, encoded=True)


def _as_text(headers: Headers) -> CIMultiDict[str]:
    """Headers as aiohttp takes them, which writes them as UTF-8."""
    try:
        return CIMultiDict([(name.decode(), value.decode()) for name, value in headers])
    except UnicodeDecodeError:
        return CIMultiDict([(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers])


def _broken(error: Exception) -> Broken:
    return (Silent if isinstance(error, asyncio.TimeoutError) else Broken)(str(error))


# Whether the connection of the running task's last request had served another one before.
_kept_alive: ContextVar[bool] = ContextVar("kept_alive", default=False)


class _Connector(aiohttp.TCPConnector):
    """Records whether a request goes out on a connection that was kept alive."""

    async def connect(self, *args: Any, **kwargs: Any) -> Connection:
        connection = await super().connect(*args, **kwargs)
        protocol: Any = connection.protocol
        _kept_alive.set(hasattr(protocol, "seamark_used"))
        protocol.seamark_used = True
        return connection
