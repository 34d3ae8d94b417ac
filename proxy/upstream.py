"""The way to the workers: httpx on aiohttp. The only module that knows which HTTP client is underneath.

httpx's own transport costs more CPU than the rest of the gateway together; its transport interface on aiohttp does not.
"""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

Headers = Sequence[tuple[bytes, bytes]]

# uvicorn, which serves vLLM, closes idle connections after 5 seconds; leaving earlier avoids writing into a closed one.
KEEPALIVE_SECONDS = 4.0
# A closed connection shows itself as soon as it is written to; one that breaks later had a worker working on it.
STALE_SECONDS = 0.1


# The transport gives some of aiohttp's own errors another name, and not all of them.
FAILURES = (httpx.HTTPError, httpx.InvalidURL, aiohttp.ClientError)


class Unreachable(Exception):
    """No connection to the worker: nothing was sent, another one can be tried."""


class Broken(Exception):
    """The worker broke off after it had been given the request."""


class Silent(Broken):
    """No byte came for as long as one may be waited for."""


class Stale(Broken):
    """A connection kept alive turned out to be closed as the request was written: the worker has not read it."""


def base_url(url: str) -> str:
    """A worker's address as the gateway appends paths to it: users often give it with SDKs' `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


class Upstream:
    """Connections to all workers. Use inside a running event loop; `aclose` when done."""

    def __init__(self, connect_timeout: float, api_key: str | None = None) -> None:
        """`connect_timeout` in seconds; `api_key` is the workers', for requests of the gateway's own."""
        self._timeout = {"connect": connect_timeout, "read": None, "write": None, "pool": None}
        self._transport = AiohttpTransport(client=self._session)
        self._fresh = AiohttpTransport(client=lambda: self._session(force_close=True))
        self.own_headers: Headers = [(b"authorization", b"Bearer " + api_key.encode())] if api_key else []

    @staticmethod
    def _session(force_close: bool = False) -> aiohttp.ClientSession:
        def no_delay(address: tuple) -> socket.socket:
            family, kind, protocol, _, _ = address
            made = socket.socket(family, kind, protocol)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made

        kept = {"force_close": True} if force_close else {"keepalive_timeout": KEEPALIVE_SECONDS}
        return aiohttp.ClientSession(
            connector=_Connector(limit=0, socket_factory=no_delay, **kept),
            cookie_jar=aiohttp.DummyCookieJar(),
            # What the client did not send is not sent: the worker sees the client's request.
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def send(
        self,
        method: str,
        url: str,
        headers: Headers = (),
        body: bytes = b"",
        read_timeout: float | None = None,
        fresh: bool = False,
    ) -> httpx.Response:
        """Send a request, on a new connection where `fresh`; the answer's body is still to be read with `chunks`, and
        closed with `aclose`.

        `read_timeout` in seconds between two pieces of the answer, None for ever. Raises `Unreachable` when no
        connection could be made, `Stale` when one that was kept alive had been closed, `Broken` when it failed later.
        """
        started = time.monotonic()
        try:
            request = httpx.Request(
                method,
                url,
                headers=list(headers),
                content=body,
                extensions={"timeout": {**self._timeout, "read": read_timeout}},
            )
            return await (self._fresh if fresh else self._transport).handle_async_request(request)
        except FAILURES as error:
            # The cause, because the transport calls a refused connection and a broken one by the same name.
            cause = error.__cause__ or error
            if isinstance(cause, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                raise Unreachable(str(error)) from error
            closed = isinstance(cause, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
            if closed and _kept_alive.get() and time.monotonic() - started < STALE_SECONDS:
                raise Stale(str(error)) from error
            raise _broken(error) from error

    async def fetch(self, method: str, url: str, body: bytes = b"", timeout: float | None = None) -> tuple[int, bytes]:
        """Status and whole body of a request of the gateway's own; `timeout` seconds for each read."""
        headers = [*self.own_headers, *([(b"content-type", b"application/json")] if body else [])]
        response = await self.send(method, url, headers, body, read_timeout=timeout)
        try:
            return response.status_code, b"".join([chunk async for chunk in chunks(response)])
        finally:
            await response.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()
        await self._fresh.aclose()


async def chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    """The body as it comes, undecoded. Raises `Broken` when the worker breaks off."""
    try:
        async for chunk in response.stream:
            yield chunk
    except FAILURES as error:
        raise _broken(error) from error


def _broken(error: Exception) -> Broken:
    return (Silent if isinstance(error.__cause__ or error, aiohttp.SocketTimeoutError) else Broken)(str(error))


# Whether the connection of the running task's last request had served another one before.
_kept_alive: ContextVar[bool] = ContextVar("kept_alive", default=False)


class _Connector(aiohttp.TCPConnector):
    """Notes whether a request goes out on a connection that was kept alive."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._used: WeakSet[Any] = WeakSet()

    async def connect(self, *args: Any, **kwargs: Any) -> Any:
        connection = await super().connect(*args, **kwargs)
        protocol = connection.protocol
        _kept_alive.set(protocol in self._used)
        self._used.add(protocol)
        return connection
