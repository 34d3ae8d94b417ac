"""Requests to the workers: over which connection each one goes, and why there may be none.

Health checks and renders come through here, too: they share the workers' connections, the workers' API key and these
errors. No proxy that the environment names is asked.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
from base64 import b64encode
from collections import defaultdict
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import aiohappyeyeballs
from cachetools import TTLCache

from proxy.http.asgi import head_of
from proxy.http.worker_connection import Answer, Broken, Headers, Malformed, Silent, Stale, WorkerConnection

__all__ = ["Answer", "Broken", "Headers", "Malformed", "Silent", "Stale"]

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
