"""uvicorn as the gateway needs it: its signals, an address for pages, a look at slow clients every second."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import uvicorn

from proxy.errors import SettingsError
from proxy.fleet.probe import gateway_id, version_in
from proxy.http import auth
from proxy.pipeline.gateway import Gateway
from proxy.server.app import App, build
from proxy.server.connection import ConnectionState, bounded
from proxy.server.process_limits import most_connections
from proxy.settings import Settings
from proxy.version import version

logger = logging.getLogger("seamark.gateway")

ANSWER_SECONDS = 1.0  # that what holds a port has to say what it is
_LISTENING = "0A"  # in /proc/net/tcp and /proc/net/tcp6
CHECK_SECONDS = 1.0  # between two looks at all connections; bounds below four times that are looked after more often


class _StoppableServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self.server_state: ConnectionState = ConnectionState()
        self._interval = min(CHECK_SECONDS, settings.client_timeout / 4, settings.send_timeout / 4)
        self._checks: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._checks = asyncio.create_task(self._check_clients())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self._checks is not None:
            self._checks.cancel()
        if self.force_exit:  # uvicorn then leaves requests and the application to the loop's end, which logs them
            for task in self.server_state.tasks:
                task.cancel()
            await self.lifespan.shutdown()
            del self._captured_signals[1:]  # one tells the parent; another would end the loop's last work midway

    async def _check_clients(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                connection.check(now)  # type: ignore[union-attr]  # all are `Connection`


class _SideServer(_StoppableServer):
    """A server beside another one, which handles the signals."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        logger.info("live page %s%s", _address(self), auth.PAGE)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer(_StoppableServer):
    """SIGTERM: `stop_delay`, then `drain_timeout`. SIGINT, or a second signal, skips the former. SIGHUP reads files."""

    def __init__(self, config: uvicorn.Config, settings: Settings, gateway: Gateway) -> None:
        super().__init__(config, settings)
        self._stop_delay = settings.stop_delay
        self._gateway = gateway
        self._stops_at: float | None = None  # time.monotonic()
        self._rereads = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        address, settings = _address(self), self._gateway.settings
        page = "" if settings.admin_port is not None else f", live page {address}{auth.PAGE}"
        keys = "; an API key is required" if settings.api_keys is not None else ""
        shadow = "; shadow mode: requests and answers stay as they are" if settings.shadow else ""
        logger.info(f"Seamark {version()}: base_url {address}/v1 (Anthropic clients: {address}){page}{keys}{shadow}")
        if not self._gateway.pool.workers and not settings.workers_dns:
            logger.warning("there is no worker: %s names none", settings.workers_file)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come; what takes long is left to `on_tick`."""
        if sig == signal.SIGTERM and self._stops_at is None and self._stop_delay and not self.should_exit:
            self._captured_signals.append(sig)
            self._stops_at = time.monotonic() + self._stop_delay
            self._gateway.is_stopping = self.server_state.is_stopping = True
        else:
            super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        if self._rereads:
            self._rereads = False
            try:
                self._gateway.read_files()
            except Exception as error:  # a signal ends nothing, whatever a file holds
                logger.error("reading files again: %s", type(error).__name__)
        if self._stops_at is not None and time.monotonic() >= self._stops_at:
            self.should_exit = True
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = signal.signal(signal.SIGHUP, self._read_files_soon)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def _read_files_soon(self, sig: int, frame: FrameType | None) -> None:
        self._rereads = True


# Addresses to listen on that are none to connect to.
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104


def bound(setting: str, host: str, port: int) -> list[socket.socket]:
    """A socket for each address of `host`, not listening yet. Raises `SettingsError` if one cannot be had.

    uvicorn would find out once the gateway has started, and end the process from inside a task: with lines about
    workers that it leaves in the middle of a question, and no word of the setting.
    """
    sockets: list[socket.socket] = []
    try:
        found = set(socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))
        for family, kind, protocol, _, address in found:
            if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue  # a name may have such an address where this system has none
            sockets.append(made := socket.socket(family, kind, protocol))
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # `::` alone takes both families, as vLLM's does; elsewhere the other has an address of its own.
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, len(found) > 1)
            made.bind(address)
        if not sockets:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    except OSError as error:
        for each in sockets:
            each.close()
        text = f"{setting}: nothing can listen on {host}:{port} ({error.strerror or error})"
        if error.errno == errno.EADDRINUSE and (holder := holder_of(_ANY.get(host, host), port)):
            text += f"; it is held by {holder}"
        raise SettingsError(text) from None
    return sockets


def holder_of(host: str, port: int) -> str:
    """What holds a port, as "process 4242 (seamark), a Seamark gateway"; empty if nothing can be told."""
    return ", ".join(filter(None, (_process_at(port), _server_at(host, port))))


def _process_at(port: int) -> str:
    """The process that listens there; empty if that is another user's, or this system does not tell."""
    names: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for _, local, _, state, *rest in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
                if state == _LISTENING and int(local.rpartition(":")[2], 16) == port:
                    names.add(f"socket:[{rest[5]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*") if names else ():
        with contextlib.suppress(OSError):  # it has ended or is another user's
            if str(link.readlink()) in names:
                process = link.parent.parent
                return f"process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def _server_at(host: str, port: int) -> str:
    """What its answers show it to be; empty if it is none that Seamark knows."""
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with (
        contextlib.suppress(httpx.HTTPError, httpx.InvalidURL),
        httpx.Client(timeout=ANSWER_SECONDS, trust_env=False) as client,
    ):
        if gateway_id(client.get(url + "/health").content) is not None:
            return "a Seamark gateway"
        if version := version_in(client.get(url + "/version").content):
            return f"vLLM {version}"
    return ""


def _address(server: uvicorn.Server) -> str:
    """Where a started server is reached from this machine."""
    host = _ANY.get(server.config.host, server.config.host)
    (port, *_) = (bound.getsockname()[1] for each in server.servers for bound in each.sockets)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def server_for(settings: Settings, log_config: dict[str, Any]) -> uvicorn.Server:
    """The gateway, ready to run. Raises `SettingsError`."""
    app = build(Gateway(settings))
    if settings.admin_port is not None:
        _serve_pages(app, settings, log_config, settings.admin_port)
    place = dict[str, Any](host=settings.host, port=settings.port, timeout_graceful_shutdown=settings.drain_timeout)
    config = _config(app, log_config, most_connections(settings.max_connections), **place)
    return GatewayServer(config, settings, app.gateway)


def _config(app: App, log_config: dict[str, Any], connections: int = sys.maxsize, **options: Any) -> uvicorn.Config:
    settings = app.gateway.settings
    # /metrics counts requests; a line in the log for each would cost more than forwarding it.
    # The worker's Date and Server travel on, so the gateway must not add its own.
    return uvicorn.Config(
        app,
        http=bounded(settings, connections),
        ws="none",
        proxy_headers=False,  # nothing needs to know where a client comes from
        log_config=log_config,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=settings.keepalive_timeout,  # type: ignore[arg-type]  # declared as int, and taken as float
        **options,
    )


def _serve_pages(app: App, settings: Settings, log_config: dict[str, Any], port: int) -> None:
    started = app.router.lifespan_context
    sockets = bound("admin_port", settings.admin_host, port)

    @contextlib.asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[None]:
        pages = build(app.gateway, pages_only=True)
        place = dict[str, Any](host=settings.admin_host, port=port, timeout_graceful_shutdown=1.0, lifespan="off")
        side = _SideServer(_config(pages, log_config, **place), settings)
        async with started(app):
            serving = asyncio.create_task(side.serve(sockets))
            try:
                yield
            finally:
                side.should_exit = True
                await serving

    app.router.lifespan_context = lifespan
