"""uvicorn as the gateway needs it: bounds on a request's head, news of a client that leaves, an address for pages.

This overrides internals of uvicorn, so pyproject.toml caps its version; tests/unit/server lists what is relied on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.http import asgi
from proxy.server.app import App, build, build_pages
from proxy.settings import Settings

# Requests on one connection that wait for the answer to the one before.
MAX_PIPELINED = 8


# Fields of a head by which a client offers another protocol. No other is spoken here, as RFC 9110, 7.8 permits.
UPGRADES = frozenset((b"upgrade", b"http2-settings"))


class _Parser(httptools.HttpRequestParser):
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


class _Request(NamedTuple):
    cycle: RequestResponseCycle
    callbacks: list[Callable[[], None]]  # for when the client leaves


def bounded(limit: int, timeout: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with bounds on a request's head: `limit` in bytes, `timeout` in seconds of silence.

    Its refusals come in the envelope that clients expect.
    """

    class Bounded(HttpToolsProtocol):
        _unfinished = 0  # bytes received while a head was incomplete
        _in_head = True
        _head = 0
        _refused = False  # whatever else comes on this connection
        _is_upgrade = False  # the request's head is to be read again

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.parser = _Parser(self)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
            self._requests: deque[_Request] = deque(maxlen=MAX_PIPELINED + 1)  # those that may be under way
            super().connection_made(transport)
            self._close_later()

        def _close_later(self) -> None:
            self.timeout_keep_alive_task = self.loop.call_later(timeout, self.timeout_keep_alive_handler)

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
            elif self._head > limit:  # trailers, which the gateway drops
                raise ValueError("trailers too large")

        def on_headers_complete(self) -> None:
            self._in_head = False
            if self._head > limit:
                raise ValueError("head too large")  # the parser stops, and uvicorn refuses the request
            if len(self.pipeline) >= MAX_PIPELINED:
                raise ValueError("too many requests behind each other")
            if self.parser.should_upgrade():
                if self.parser.get_method() == b"CONNECT":
                    raise ValueError("not a proxy of connections")
                self._is_upgrade = True
                return
            super().on_headers_complete()
            request = _Request(self.cycle, [])
            extensions: dict[str, Any] = {
                asgi.ON_DISCONNECT: partial(_on_disconnect, request),
                asgi.BODY_IS_HERE: lambda: not request.cycle.more_body,
            }
            self.scope["extensions"] = extensions
            self._requests.append(request)
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
            super().on_message_complete()
            self.flow.resume_reading()  # uvicorn pauses behind a large body, too

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for cycle, callbacks in self._requests:  # uvicorn notifies the last one only
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
                    for callback in callbacks:
                        callback()

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
            super().data_received(data)
            # The parser keeps a header until it is complete.
            self._unfinished = self._unfinished + len(data) if self._in_head else 0
            if self._in_head and not self.transport.is_closing():
                if self._unfinished > limit:
                    self._head = self._unfinished
                    self.send_400_response("")
                elif not self._is_busy:
                    self._close_later()

        @property
        def _is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def send_400_response(self, msg: str) -> None:
            if self._is_busy:
                # A refusal now would look like the answer to an earlier request. Those are answered, then it ends.
                self._refused = True
                self.cycle.keep_alive = False
                return
            if self._head > limit:
                status, code = b"431 Request Header Fields Too Large", b"headers_too_large"
                text = f"The request's target and headers are larger than {limit} bytes (setting max_header_bytes)."
            else:
                status, code, text = b"400 Bad Request", b"invalid_http", "This is not a valid HTTP request."
            body = _ENVELOPE % (text.encode(), code)
            self.transport.write(_REFUSAL % (status, len(body), body))
            self.transport.close()

    return Bounded


def _on_disconnect(request: _Request, callback: Callable[[], None]) -> None:
    if request.cycle.disconnected:
        callback()
    else:
        request.callbacks.append(callback)


_ENVELOPE = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":"%b"}}'

_REFUSAL = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


class _SideServer(uvicorn.Server):
    """A server beside another one, which handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_for(settings: Settings, logging: dict[str, Any]) -> uvicorn.Server:
    """The gateway, ready to run. Raises `SettingsError`."""
    app = build(settings)
    if settings.admin_port is not None:
        _serve_pages(app, settings, logging, settings.admin_port)
    return uvicorn.Server(_config(app, settings, logging, settings.host, settings.port, settings.drain_timeout))


def _config(
    app: App, settings: Settings, logging: dict[str, Any], host: str, port: int, drain_seconds: float, **options: Any
) -> uvicorn.Config:
    options["timeout_graceful_shutdown"] = drain_seconds  # uvicorn declares an int and takes a float
    # /metrics counts requests; a line in the log for each would cost more than forwarding it.
    # The worker's Date and Server travel on, so the gateway must not add its own.
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=bounded(settings.max_header_bytes, settings.client_timeout),
        ws="none",
        proxy_headers=False,  # nothing needs to know where a client comes from
        log_config=logging,
        access_log=False,
        server_header=False,
        date_header=False,
        **options,
    )


def _serve_pages(app: App, settings: Settings, logging: dict[str, Any], port: int) -> None:
    started = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[None]:
        pages = build_pages(app.gateway)
        side = _SideServer(_config(pages, settings, logging, settings.admin_host, port, 1.0, lifespan="off"))
        async with started(app):
            serving = asyncio.create_task(side.serve())
            try:
                yield
            finally:
                side.should_exit = True
                await serving

    app.router.lifespan_context = lifespan
