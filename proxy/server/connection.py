"""A client's connection by HTTP/1.1, with bounds on a request's head, on slow clients, and on what is no HTTP.

uvicorn's server runs it in place of a protocol of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from proxy.errors import GatewayError, HeadTooLarge, InvalidHttp, TooSlow
from proxy.http import asgi
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


class Request:
    """A request and its answer: ASGI's `receive` and `send`, and an `asgi.Served`.

    Nothing here leads to its scope, which leads here: a large body would else stay in memory until the garbage
    collector comes, which counts objects.
    """

    is_crowded = wants_websocket = is_broken = is_left = False
    on_left: Callable[[], None] | None = None
    is_complete = _has_told_end = False  # all of its body has come, and been read
    _unread: bytes | bytearray = b""  # of its body
    is_answered = _is_chunked = False
    _status = 0  # of the answer, once that has begun
    _left: int | None = None  # bytes of the answer's body, if it says how many there are

    def __init__(self, connection: Connection, version: str, is_head: bool, expects: bool, keeps: bool) -> None:
        """`expects`: the client waits for 100 Continue; `keeps`: it keeps the connection behind the answer."""
        self._connection, self._version, self._is_head, self._expects = connection, version, is_head, expects
        self.keeps = keeps

    def take(self, part: bytes) -> int:
        """A part of its body; how many bytes wait to be read."""
        if self._unread:
            self._unread = bytearray(self._unread) if isinstance(self._unread, bytes) else self._unread
            self._unread += part
        else:
            self._unread = part
        return len(self._unread)

    def leave(self) -> None:
        """The client is gone."""
        self.is_left = True
        if self.on_left is not None:
            self.on_left()

    def whole_body(self) -> bytes | None:
        return self._read() if self.is_complete and not self.is_left else None

    def _read(self) -> bytes:
        self._has_told_end = self.is_complete
        body, self._unread = bytes(self._unread), b""  # one that came in one piece is not copied
        return body

    async def receive(self) -> dict[str, Any]:
        connection = self._connection
        if self._expects and not connection.transport.is_closing():
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects = False
        while not (self.is_left or self.is_answered or self.is_broken):
            if self._unread or (self.is_complete and not self._has_told_end):
                return {"type": "http.request", "body": self._read(), "more_body": not self.is_complete}
            connection.go_on_reading()
            await connection.changes()
        return {"type": "http.disconnect"}

    async def send(self, message: asgi.Scope) -> None:
        """Raises `RuntimeError` for what does not follow what was sent, and for a body that has not its length."""
        while self._connection.is_full and not self.is_left:
            await self._connection.changes()
        if self.is_left:
            return
        if (message["type"] == "http.response.start") is (self._status > 0) or self.is_answered:
            raise RuntimeError(f"{message['type']} does not follow what was sent")
        write = self._connection.transport.write
        if not self._status:
            write(self._begun(message["status"], message["headers"]))
            return
        body, is_last = message.get("body", b""), not message.get("more_body")
        if self._is_chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
        elif self._is_head:
            body = b""
        elif self._left is not None:
            self._left -= len(body)
            if self._left < 0 or (is_last and self._left):
                raise RuntimeError("the answer has not the length that it announces")
        if body:
            write(body)
        if is_last:
            self._end()

    def answer(self, status: int, headers: asgi.HeaderList, body: bytes) -> bool:
        if self._status or self.is_left or self._connection.is_full:
            return False
        head = self._begun(status, headers)
        self._connection.transport.writelines((head, body) if self._left else (head,))
        self._end()
        return True

    def is_writable(self) -> bool:
        return self._is_chunked and not (self.is_left or self._connection.is_full)

    def write_chunk(self, piece: bytes) -> None:
        self._connection.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def _begun(self, status: int, headers: asgi.HeaderList) -> bytes:
        """The answer's head. Raises `ValueError`, see `asgi.head_of`."""
        length, last = dict(headers).get(b"content-length"), b"" if self.keeps else b"connection: close\r\n"
        is_bodiless = self._is_head or status in asgi.BODILESS
        is_chunked = not is_bodiless and length is None and self._version != "1.0"
        if is_chunked:
            last += b"transfer-encoding: chunked\r\n"
        head = asgi.head_of(STATUS_LINE[status], headers, last, 2 - self.keeps + is_chunked)
        self._left = 0 if is_bodiless else None if length is None else int(length)
        self._is_chunked, self._status, self._expects = is_chunked, status, False
        return head

    def _end(self) -> None:
        """The answer is complete."""
        self.is_answered = True
        if not self.keeps:
            self._connection.transport.close()
        self._connection.on_answered()

    async def run(self, app: Any, scope: asgi.Scope) -> None:
        """Have the application answer. What it leaves open, or fails at, the client sees break off."""
        try:
            await app(scope, self.receive, self.send)
            if not (self.is_answered or self.is_left):
                raise RuntimeError("the answer is not complete")
        except BaseException as error:
            logger.error("Exception in ASGI application\n", exc_info=error)
            self._connection.transport.close()
        finally:
            self._connection.tasks.discard(asyncio.current_task())


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
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # what follows is ignored
        self._url, self._expects = b"", False
        self._headers: asgi.HeaderList = []
        self._fed = 0  # bytes received that may be of a head
        self._unfinished = 0  # bytes received while a head was incomplete
        self._in_head = True
        self._head = 0  # bytes of trailers, or of a head that is too long
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
        peer, own = map(transport.get_extra_info, ("peername", "sockname"))
        self._client, self._server = (peer and tuple(peer[:2])), (own and tuple(own[:2]))
        self._is_crowded = len(self._connections) > self.connection_limit
        if len(self._connections) > self.connection_limit + SPARE:
            self._close(_CROWDED)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._is_idle:  # from now on no byte puts off what a head may take
            self._is_idle, self._free_since = False, self.loop.time()
        self._fed = self._unfinished + len(data)
        while True:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                # httptools takes such a request's head for all of it. Its body would then be read as the next request,
                # which a client behind a proxy could make the answer to somebody else's.
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
            except httptools.HttpParserError:
                logger.warning("Invalid HTTP request received.")
                self._break_off()
                break
            else:
                break
        # The parser keeps a header until it is complete.
        self._unfinished = self._fed if self._in_head else 0
        if self._unfinished > self.settings.max_header_bytes and not self.transport.is_closing():
            self._head = self._unfinished
            self._break_off()

    def on_message_begin(self) -> None:  # here begin the parser's calls; an error stops it
        self._url, self._headers, self._expects = b"", [], False
        self._in_head, self._head = True, 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self._expects = True
            self._headers.append((name, value))
            return
        self._head += len(name) + len(value) + 4
        if self._head > self.settings.max_header_bytes:  # trailers, which the gateway drops
            raise ValueError("trailers too large")

    def on_headers_complete(self) -> None:
        parser, headers = self._parser, self._headers
        self._in_head = False
        if self._fed > self.settings.max_header_bytes:
            self._head = len(self._url) + sum(len(name) + len(value) + 4 for name, value in headers)
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
        keeps = version != "1.0" and parser.should_keep_alive()
        request = Request(self, version, method == "HEAD", self._expects, keeps)
        if self._wants_websocket:
            request.wants_websocket, self._wants_websocket = True, False
        if self._is_crowded or self._state.is_stopping:
            request.is_crowded, request.keeps = self._is_crowded, False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "server": self._server,
            "client": self._client,
            "scheme": "http",
            "method": method,
            "root_path": "",
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
        request = self._reading
        if request is None or request.is_answered:
            return
        if request.take(part) > MAX_UNREAD and not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()
        self._changed.set()

    def on_message_complete(self) -> None:
        if self._reading is not None:  # a head that is read again has ended none
            self._reading.is_complete, self._reading = True, None
            self._changed.set()
            self.go_on_reading()

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
        """The answer under way is complete."""
        self._free_since = self.loop.time()
        self._is_idle = not (self._reading or self._unfinished)
        self._requests.popleft()
        self._changed.set()
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
        self._connections.discard(self)  # type: ignore[arg-type]
        self._changed.set()
        for request, _ in self._requests:
            request.leave()
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
                self._close(_answer(TooSlow(f"{text} (setting client_timeout).")))
            elif free > allowed:
                self.transport.close()

    def _break_off(self) -> None:
        """What has come is no HTTP, or too much of it."""
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
            self._close(_answer(HeadTooLarge(text)))
        else:
            self._close(_answer(InvalidHttp("This is not a valid HTTP request.")))

    def _close(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()


def bounded(settings: Settings, connections: int) -> type[Connection]:
    return type("BoundedConnection", (Connection,), {"settings": settings, "connection_limit": connections})


def _answer(error: GatewayError) -> bytes:
    """The error as the last answer on a connection."""
    body = error.body()
    fields = {**error_headers(error), "connection": "close", "content-length": str(len(body))}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *map(": ".join, fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


_CROWDED = _answer(asgi.crowded())
