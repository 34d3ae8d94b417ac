"""uvicorn as the gateway needs it: a bound on the size of a request's head, and a second address for its own pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proxy.http import asgi
from proxy.server.app import App, build, build_pages
from proxy.settings import Settings

# Requests on one connection that wait for the answer to the one before.
MAX_PIPELINED = 8


def bounded(limit: int, timeout: float) -> type[HttpToolsProtocol]:
    """uvicorn's protocol with bounds on a request's head (bytes, and seconds of silence in it).

    What it refuses is refused in the envelope that clients expect.
    """

    class Bounded(HttpToolsProtocol):
        _unfinished = 0  # bytes received while a head was incomplete
        _in_head = True
        _head = 0
        _refused = False  # whatever else comes on this connection

        def connection_made(self, transport: asyncio.Transport) -> None:
            self._asked: deque[Any] = deque(maxlen=MAX_PIPELINED + 1)  # the requests that may be under way
            super().connection_made(transport)
            self._close_later()

        def _close_later(self) -> None:
            self.timeout_keep_alive_task = self.loop.call_later(timeout, self.timeout_keep_alive_handler)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._in_head, self._head = True, 0

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._head += len(url)

        def on_header(self, name: bytes, value: bytes) -> None:
            self._head += len(name) + len(value) + 4
            if self._in_head:
                super().on_header(name, value)
            elif self._head > limit:  # trailers, which go nowhere
                raise ValueError("trailers too large")

        def on_headers_complete(self) -> None:
            self._in_head = False
            if self._head > limit:
                raise ValueError("head too large")  # the parser stops, and uvicorn refuses
            if len(self.pipeline) >= MAX_PIPELINED:
                raise ValueError("too many requests behind each other")
            super().on_headers_complete()
            cycle = self.cycle
            cycle.left = []
            self.scope["extensions"] = {
                asgi.ON_DISCONNECT: lambda call_back: (
                    call_back() if cycle.disconnected else cycle.left.append(call_back)
                ),
                asgi.BODY_IS_HERE: lambda: not cycle.more_body,
            }
            self._asked.append(self.cycle)
            self.flow.resume_reading()  # uvicorn would stop behind a request, and not see the client leave

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self.flow.resume_reading()  # the same behind a large body

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            for cycle in self._asked:  # uvicorn tells the last one only
                if not cycle.response_complete:
                    cycle.disconnected = True
                    cycle.message_event.set()
                    for call_back in cycle.left:
                        call_back()

        def _unsupported_upgrade_warning(self) -> None:
            """Answered as if nothing had been asked; a line in the log for each would be for anyone to write."""

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
                # A refusal now would be taken for the answer to a request before. Those are answered, then it is over.
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


_ENVELOPE = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":"%b"}}'

_REFUSAL = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


class _SideServer(uvicorn.Server):
    """A server beside another one, which gets the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_for(settings: Settings, logging: dict[str, Any]) -> uvicorn.Server:
    """The gateway, ready to run. Raises `SettingsError`."""
    app = build(settings)
    if settings.admin_port is not None:
        _serve_pages_too(app, settings, logging)
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            timeout_graceful_shutdown=settings.drain_timeout,
            **_options(settings, logging),
        )
    )


def _options(settings: Settings, logging: dict[str, Any]) -> dict[str, Any]:
    # Requests are counted in /metrics; a line for each would cost more than forwarding it.
    # The worker's Date and Server travel on; a second pair of them would be the gateway's.
    return {
        "http": bounded(settings.max_header_bytes, settings.client_timeout),
        "ws": "none",
        "proxy_headers": False,  # nobody asks where a client comes from
        "log_config": logging,
        "access_log": False,
        "server_header": False,
        "date_header": False,
    }


def _serve_pages_too(app: App, settings: Settings, logging: dict[str, Any]) -> None:
    started = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[None]:
        config = uvicorn.Config(
            build_pages(app.gateway),
            host=settings.admin_host,
            port=settings.admin_port,
            lifespan="off",
            timeout_graceful_shutdown=1,
            **_options(settings, logging),
        )
        side = _SideServer(config)
        async with started(app):
            serving = asyncio.create_task(side.serve())
            try:
                yield
            finally:
                side.should_exit = True
                await serving

    app.router.lifespan_context = lifespan
