"""A client's connection by HTTP/1.1, with bounds on a request's head, on slow clients, and on what is no HTTP.

uvicorn's server runs it in place of a protocol of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from math import inf
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.server import ServerState

from proxy.errors import GatewayError, HeadTooLarge, InvalidHttp, TooSlow
from proxy.http import asgi
from proxy.http.asgi import Request
from proxy.pipeline.error_responses import error_headers
from proxy.server.process_limits import SPARE
from proxy.settings import Settings

logger = logging.getLogger("uvicorn.error")

# Requests on one connection that wait for the answer to the one before.
MAX_PIPELINED = 8

MAX_UNREAD = 2**16  # bytes of a body that nobody has asked for; with more, the client waits

# For the rest of a body whose request has been answered: closing at once would make the client's system throw away an
# answer that it has not read yet. And for an idle connection while many are taken: it must not keep others out.
LINGER_SECONDS = 5.0

# Fields of a head by which a client offers another protocol. No other is spoken here, as RFC 9110, 7.8 permits.
UPGRADES = frozenset((b"upgrade", b"http2-settings"))


class ConnectionState(ServerState):
    is_stopping = False  # answers end their connections, so that clients go elsewhere


class Connection(asyncio.Protocol):
    """One client, whose requests are answered one after the other. By RFC 9110 and 9112:

    - What is no HTTP is refused, and so is CONNECT (9110, 9.3.6). An offer of an upgrade is passed over (9110, 7.8), as
      are extensions of chunks and trailers (9112, 7.1). A body that is awaited is asked for by 100 (9110, 10.1.1).
    - Answers have a length or come in chunks; those of unknown length to HTTP/1.0 end with their connection, and those
      to HEAD, 204 and 304 have no body (9112, 6.3). One that breaks off closes it (9112, 8).
    """

    # Of the server's class, see `bounded`.
    settings: Settings
    connection_limit: int  # of all clients; the newest of more may ask for pages only

    def __init__(self, config: uvicorn.Config, server_state: ConnectionState, app_state: object, _loop: Any = None):
        """As uvicorn calls it."""
        self.loop = asyncio.get_running_loop()
        self._app, self._state = config.loaded_app, server_state
        self._connections, self.tasks = server_state.connections, server_state.tasks
        self._parser = self._new_parser()
        self._url, self._expects = b"", False
        self._headers: asgi.HeaderList = []
        self._unfinished = 0  # bytes received that the parser keeps: of a head, of trailers, of a chunk's extensions
        self._in_head = True
        self._head = 0  # bytes of it, or of trailers
        self._reading: Request | None = None  # whose body comes
        self._refused = False  # whatever else comes on this connection
        self._wants_websocket = False  # the request whose head is read again
        self._requests: deque[tuple[Request, asgi.Scope]] = deque()  # not answered yet; the first is under way
        self._is_paused = False  # nothing more is read
        self.is_full = False  # nothing more is written
        self._changed = asyncio.Event()  # for those who wait for something of the client
        self._free_since = self.loop.time()  # the last answer was complete, or the next head began
        self._is_idle = False  # nothing has come since that answer
        self._taken_at = self._free_since  # the client took some of what is to be sent, or there was nothing
        self._unsent = 0  # bytes, when it was last looked at
        self._is_crowded = False  # there are more connections than fit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport  # uvloop's is none by inheritance
        self._connections.add(self)  # type: ignore[arg-type]  # uvicorn calls `shutdown` of it
        self._is_crowded = len(self._connections) > self.connection_limit
        if len(self._connections) > self.connection_limit + SPARE:
            self._refuse(asgi.crowded())

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._is_idle:  # from now on no byte puts off what a head may take
            self._is_idle, self._free_since = False, self.loop.time()
        self._unfinished += len(data)
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # httptools takes such a request's head for all of it. Its body would then be read as the next request,
                # which a client behind a proxy could make the answer to somebody else's.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = self._new_parser()
            except httptools.HttpParserError:
                logger.warning("Invalid HTTP request received.")
                self._break_off()
                break
            else:
                break
        if self._unfinished > self.settings.max_header_bytes and not self.transport.is_closing():
            self._head = self._unfinished
            self._break_off()

    def on_message_begin(self) -> None:  # here begin the parser's calls; an error stops it
        self._url, self._headers, self._expects = b"", [], False
        self._in_head, self._head = True, 0
        self._unfinished = self._unfinished or 1  # behind a body: how many bytes of it have come is not known

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value) + 4
        if self._in_head:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects = True
            self._headers.append((name, value))
        elif self._head > self.settings.max_header_bytes:  # trailers, which the gateway drops
            raise ValueError("trailers too large")

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        self._in_head, self._unfinished = False, 0
        if self._head > self.settings.max_header_bytes:
            raise ValueError("head too large")
        if len(self._requests) > MAX_PIPELINED:
            raise ValueError("too many requests behind each other")
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        if parser.should_upgrade():
            if method == "CONNECT":
                raise ValueError("not a proxy of connections")
            offered = b",".join(value for name, value in headers if name == b"upgrade").lower().split(b",")
            self._wants_websocket = any(each.strip().split(b"/")[0] == b"websocket" for each in offered)
            return
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        ends = version == "1.0" or self._is_crowded or self._state.is_stopping
        request = Request(self, version, method == "HEAD", self._expects, not ends and parser.should_keep_alive())
        request.is_crowded, request.wants_websocket = self._is_crowded, self._wants_websocket
        self._wants_websocket = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": method,
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": headers,
            asgi.SERVED: request,
        }
        self._reading = request
        self._requests.append((request, scope))
        if len(self._requests) == 1:
            self._start()

    def on_body(self, part: bytes) -> None:
        self._unfinished, request = 0, self._reading
        if request is None or request.is_answered:
            return
        request.unread += part
        if len(request.unread) > MAX_UNREAD and not self._is_paused:
            if request is not self._requests[0][0]:  # nobody reads it now, and a client that leaves would not be seen
                raise ValueError("too large a body behind another request")
            self._is_paused = True
            self.transport.pause_reading()
        self._changed.set()

    def on_message_complete(self) -> None:
        self._unfinished = 0
        if self._reading is not None:  # a head that is read again has ended none
            self._reading.is_complete, self._reading = True, None
            self._changed.set()
            self.go_on_reading()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what follows is ignored
        return parser

    def _head_without_upgrade(self) -> bytes:
        """The head just read, as a client that offers no upgrade would have written it."""
        version = self._parser.get_http_version().encode()
        lines = [self._parser.get_method() + b" " + self._url + b" HTTP/" + version]
        for name, value in self._headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in UPGRADES)
            if name not in UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _start(self) -> None:
        request, scope = self._requests[0]
        self.tasks.add(self.loop.create_task(request.run(self._app, scope)))

    async def changes(self) -> None:
        """Return once the client has sent or taken something, or is gone."""
        self._changed.clear()
        await self._changed.wait()

    def go_on_reading(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def on_answered(self) -> None:
        self._free_since = self.loop.time()
        self._is_idle = not (self._reading or self._unfinished)
        request, _ = self._requests.popleft()
        request.is_answered = True
        self._changed.set()
        if not request.keeps:
            self.transport.close()
        if not self.transport.is_closing():
            self.go_on_reading()
            if self._requests:
                self._start()

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        self._changed.set()
        self._taken_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._changed.set()
        for request, _ in self._requests:
            request.is_left = True
            if request.on_left is not None:
                request.on_left()
        self._requests.clear()
        self._reading = self._parser = None  # type: ignore[assignment]  # which leads back here

    def shutdown(self) -> None:
        """The server ends: so does this, once it is answered."""
        if self._requests:
            self._requests[-1][0].keeps = False
        else:
            self.transport.close()

    def check(self, now: float) -> None:
        """Close the connection if its client is too slow. `now` by the loop's clock; to be called about every second.

        Looking at all connections now and then costs less than a timer for each, and no byte can put it off.
        """
        unsent = self.transport.get_write_buffer_size()
        is_over = self.transport.is_closing() or not self._requests  # then nothing more is written
        if unsent == 0 or unsent < self._unsent or not (self.is_full or is_over):
            self._taken_at = now
        elif now - self._taken_at > self.settings.send_timeout:
            self.transport.abort()
        self._unsent = unsent
        if is_over and not self.transport.is_closing():
            free, allowed = now - self._free_since, self.settings.client_timeout
            if self._is_idle:
                is_crowded = len(self._connections) * 4 > self.connection_limit * 3
                allowed = min(self.settings.keepalive_timeout, LINGER_SECONDS if is_crowded else inf)
            elif self._reading is not None:
                allowed = min(allowed, LINGER_SECONDS)
            if free > allowed and self._in_head and self._unfinished:
                text = f"The request's head was not complete within {self.settings.client_timeout:g} seconds"
                self._refuse(TooSlow(f"{text} (setting client_timeout)."))
            elif free > allowed:
                self.transport.close()

    def _break_off(self) -> None:
        if self._requests:
            # A refusal now would look like the answer to an earlier request. Those are answered, then it ends.
            self._refused = True
            self._requests[-1][0].keeps = False
            if self._reading is not None:  # its own request is told, and can say so in its answer
                self._reading.is_broken = True
                self._changed.set()
        elif self._reading is not None:  # its request has been answered
            self.transport.close()
        elif self._head > self.settings.max_header_bytes:
            limit = self.settings.max_header_bytes
            text = f"The request's target and headers are larger than {limit} bytes (setting max_header_bytes)."
            self._refuse(HeadTooLarge(text))
        else:
            self._refuse(InvalidHttp("This is not a valid HTTP request."))

    def _refuse(self, error: GatewayError) -> None:
        """The error is the last answer on the connection."""
        body = error.body()
        fields = {**error_headers(error), "connection": "close", "content-length": str(len(body))}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *map(": ".join, fields.items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()


def bounded(settings: Settings, connections: int) -> type[Connection]:
    return type("BoundedConnection", (Connection,), {"settings": settings, "connection_limit": connections})
