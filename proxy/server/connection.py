"""A client's connection: uvicorn's protocol with bounds on a request's head, on slow clients, and on what is no HTTP.

This overrides internals of uvicorn, so pyproject.toml caps its version; tests/unit/server lists what is relied on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, MutableMapping
from http import HTTPStatus
from math import inf
from typing import Any
from weakref import ref

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from proxy.errors import GatewayError, HeadTooLarge, InvalidHttp, TooSlow
from proxy.http import asgi
from proxy.pipeline.error_responses import error_headers
from proxy.server.process_limits import SPARE
from proxy.settings import Settings

# Requests on one connection that wait for the answer to the one before.
MAX_PIPELINED = 8

# For the rest of a body whose request has been answered: closing at once would make the client's system throw away an
# answer that it has not read yet. And for an idle connection while many are taken: it must not keep others out.
LINGER_SECONDS = 5.0

# Fields of a head by which a client offers another protocol. No other is spoken here, as RFC 9110, 7.8 permits.
UPGRADES = frozenset((b"upgrade", b"http2-settings"))


class ConnectionState(ServerState):
    is_stopping = False  # answers end their connections, so that clients go elsewhere


class _HeadParser(httptools.HttpRequestParser):
    """Reads a request that offers an upgrade as one without.

    httptools takes such a request's head for all of it. Its body would then be read as the next request, which a
    client behind a proxy could make the answer to somebody else's.
    """

    def __init__(self, protocol: Any) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # all that uvicorn feeds it
        """Raises `httptools.HttpParserError`."""
        while True:
            try:
                super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._protocol.head_without_upgrade() + data[upgrade.args[0] :]
            else:
                return


class _Request:
    """What the scope of a request leads to. It holds nothing that leads back.

    A request would otherwise stay in memory, with its head and its body, until the garbage collector comes: that counts
    objects, of which a large body has one.
    """

    __slots__ = ("_cycle", "callbacks", "is_broken")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = ref(cycle)
        self.callbacks: list[Callable[[], None]] = []  # for when the client leaves
        self.is_broken = False  # no HTTP came for its body

    def body_state(self) -> asgi.BodyState:
        if self.is_broken:
            return asgi.BodyState.BROKEN
        cycle = self._cycle()
        return asgi.BodyState.COMING if cycle is not None and cycle.more_body else asgi.BodyState.HERE

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        cycle = self._cycle()
        if cycle is None or cycle.disconnected:
            callback()
        else:
            self.callbacks.append(callback)

    def write_chunk(self, body: bytes) -> bool:
        cycle = self._cycle()
        if cycle is None or cycle.disconnected or cycle.flow.write_paused or not cycle.chunked_encoding:
            return False
        if body:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def client_left(self) -> None:
        cycle = self._cycle()
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            for callback in self.callbacks:
                callback()


class _Transport:
    """What uvicorn uses of a transport for one answer. The head of a whole answer waits for its body.

    uvicorn writes each on its own: two system calls, two packets, and a client that is woken twice.
    """

    __slots__ = ("_head", "_is_held", "_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._is_held = False
        self.close, self.is_closing = transport.close, transport.is_closing

    def hold_head(self) -> None:
        """What is written next is a head, and its body follows at once."""
        self._is_held = True

    def write(self, data: bytes) -> None:
        if self._head:
            self._transport.writelines((self._head, data))
            self._head = b""
        elif self._is_held:
            self._head, self._is_held = data, False
        else:
            self._transport.write(data)


class Connection(HttpToolsProtocol):
    """One client. Its refusals come in the envelope that clients expect."""

    # Of the server's class, see `bounded`.
    settings: Settings
    connection_limit: int  # of all clients; the newest of more may ask for pages only
    server_state: ConnectionState

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _HeadParser(self)
        self._unfinished = 0  # bytes received while a head was incomplete
        self._in_head = True
        self._in_body = False
        self._head = 0
        self._refused = False  # whatever else comes on this connection
        self._is_upgrade = False  # the request's head is to be read again
        self._wants_websocket = False  # the request whose head is read again
        self._requests: deque[_Request] = deque(maxlen=MAX_PIPELINED + 1)  # those that may be under way
        self._free_since = self.loop.time()  # the last answer was complete, or the next head began
        self._is_idle = False  # nothing has come since that answer
        self._taken_at = self._free_since  # the client took some of what is to be sent, or there was nothing
        self._unsent = 0  # bytes, when it was last looked at
        self._is_crowded = False  # there are more connections than fit

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._is_crowded = len(self.connections) > self.connection_limit
        if len(self.connections) > self.connection_limit + SPARE:
            transport.write(_CROWDED)
            transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head, self._is_upgrade = True, 0, False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._head += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value) + 4
        if self._in_head:
            super().on_header(name, value)
        elif self._head > self.settings.max_header_bytes:  # trailers, which the gateway drops
            raise ValueError("trailers too large")

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._head > self.settings.max_header_bytes:
            raise ValueError("head too large")  # the parser stops, and uvicorn refuses the request
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests behind each other")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ValueError("not a proxy of connections")
            self._is_upgrade = True
            offered = b",".join(value for name, value in self.headers if name == b"upgrade").lower().split(b",")
            self._wants_websocket = any(each.strip().split(b"/")[0] == b"websocket" for each in offered)
            return
        super().on_headers_complete()
        self._in_body = True
        request = _Request(self.cycle)
        extensions: dict[str, Any] = {asgi.ON_DISCONNECT: request.on_disconnect, asgi.BODY_STATE: request.body_state}
        self.scope["extensions"] = extensions
        if self._wants_websocket:
            extensions[asgi.WANTS_WEBSOCKET] = {}
            self._wants_websocket = False
        if self._is_crowded:
            extensions[asgi.IS_CROWDED] = {}
        if self._is_crowded or self.server_state.is_stopping:
            self.cycle.keep_alive = False
        self._requests.append(request)
        if self.scope["method"] != "HEAD":
            transport = _Transport(self.transport)
            self.cycle.transport = transport  # type: ignore[assignment]  # all that it uses
            extensions[asgi.HOLD_HEAD], extensions[asgi.WRITE_CHUNK] = transport.hold_head, request.write_chunk
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _unchunked(self.cycle)  # type: ignore[method-assign, assignment]
        self.flow.resume_reading()  # uvicorn pauses behind a request, and would not see the client leave

    def head_without_upgrade(self) -> bytes:
        """The head just read, as a client that offers no upgrade would have written it."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() not in UPGRADES)
            if name not in UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._in_body = False
        super().on_message_complete()
        self.flow.resume_reading()  # uvicorn pauses behind a large body, too

    def on_response_complete(self) -> None:
        self._free_since = self.loop.time()
        self._is_idle = not (self._in_body or self._unfinished)
        super().on_response_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taken_at = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for request in self._requests:  # uvicorn notifies the last one only
            request.client_left()
        self._requests.clear()
        self.pipeline.clear()
        self.cycle = None  # type: ignore[assignment]  # as before the first request; it leads back here

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._is_idle:  # from now on no byte puts off what a head may take
            self._is_idle, self._free_since = False, self.loop.time()
        super().data_received(data)
        # The parser keeps a header until it is complete.
        self._unfinished = self._unfinished + len(data) if self._in_head else 0
        if self.transport.is_closing():
            return
        if self._unfinished > self.settings.max_header_bytes:
            self._head = self._unfinished
            self.send_400_response("")

    @property
    def _is_busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def check(self, now: float) -> None:
        """Close the connection if its client is too slow. `now` by the loop's clock; to be called about every second.

        Looking at all connections now and then costs less than a timer for each, and no byte can put it off.
        """
        unsent = self.transport.get_write_buffer_size()
        is_over = self.transport.is_closing() or not self._is_busy  # then nothing more is written
        if unsent == 0 or unsent < self._unsent or not (self.flow.write_paused or is_over):
            self._taken_at = now
        elif now - self._taken_at > self.settings.send_timeout:
            self.transport.abort()
        self._unsent = unsent
        if is_over and not self.transport.is_closing():
            free, allowed = now - self._free_since, self.settings.client_timeout
            if self._is_idle:
                is_crowded = len(self.connections) * 4 > self.connection_limit * 3
                allowed = min(self.settings.keepalive_timeout, LINGER_SECONDS if is_crowded else inf)
            elif self._in_body:
                allowed = min(allowed, LINGER_SECONDS)
            if free > allowed and self._in_head and self._unfinished:
                text = f"The request's head was not complete within {self.settings.client_timeout:g} seconds"
                self._refuse(TooSlow(f"{text} (setting client_timeout)."))
            elif free > allowed:
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._is_busy:
            # A refusal now would look like the answer to an earlier request. Those are answered, then it ends.
            self._refused = True
            self.cycle.keep_alive = False
            if self._in_body:  # its own request is told, and can say so in its answer
                self._requests[-1].is_broken = True
                self.cycle.message_event.set()
        elif self._in_body:  # its request has been answered
            self.transport.close()
        elif self._head > self.settings.max_header_bytes:
            limit = self.settings.max_header_bytes
            text = f"The request's target and headers are larger than {limit} bytes (setting max_header_bytes)."
            self._refuse(HeadTooLarge(text))
        else:
            self._refuse(InvalidHttp("This is not a valid HTTP request."))

    def _refuse(self, error: GatewayError) -> None:
        self.transport.write(_answer(error))
        self.transport.close()


def bounded(settings: Settings, connections: int) -> type[Connection]:
    return type("BoundedConnection", (Connection,), {"settings": settings, "connection_limit": connections})


def _unchunked(cycle: RequestResponseCycle) -> asgi.Send:
    """`send` for a client of HTTP/1.0, which knows no chunks: a body of unknown length ends with the connection."""
    send: asgi.Send = cycle.send  # type: ignore[assignment]  # its messages are dictionaries, too
    is_open = False  # the length is unknown

    async def unchunked(message: MutableMapping[str, Any]) -> None:
        nonlocal is_open
        if message["type"] == "http.response.start":
            is_open = all(name.lower() != b"content-length" for name, _ in message["headers"])
            if is_open:
                cycle.chunked_encoding = False
        elif is_open:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return unchunked


def _answer(error: GatewayError) -> bytes:
    """The error as the last answer on a connection."""
    body = error.body()
    fields = {**error_headers(error), "connection": "close", "content-length": str(len(body))}
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *map(": ".join, fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


_CROWDED = _answer(asgi.crowded())
