"""Who serves what engines report: the process that started them, whatever serves their HTTP API.

Every engine of a machine is started by one process: the API server if there is one, else one that does nothing beside
(of several API servers, of vLLM's frontend in Rust, `--headless`). There reports are taken, and read at an address of
its own (`SEAMARK_REPORTS_AT`), which vLLM's routes tell: `/metrics` of a Python frontend in a label, and of every one
`/kv_event_sources`. The middleware gives the same at the API server's own address.

Engines in Ray actors (`--data-parallel-backend ray`) report if they run on this machine.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hmac
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import zmq
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_patches import settings
from engine_patches.footprint import READ_INSIDE, SENT_TO
from engine_patches.reporting.events_api import EventsEndpoint, feeds, not_found
from engine_patches.reporting.metrics import CollectedMetrics
from engine_patches.reporting.report import MAX_WAITING, EngineReport
from engine_patches.settings import logger

AT_ONCE = 32  # reports that are taken before others in the event loop have their turn

# Descriptors are vLLM's, too. One that waits for a head makes room for the next: who reads has one under way.
MOST_CONNECTIONS = 128

MAX_HEAD_BYTES, HEAD_SECONDS, ANSWER_SECONDS = 65536, 10.0, 60.0  # since the answer before; a read waits `MAX_WAIT`
MOST_PATH = 60  # characters of a folder for temporary files: names of sockets have at most 107

# Anybody can send what is no HTTP: of uvicorn's lines errors alone.
_at_the_port = logging.getLogger("vllm.seamark.port")
_at_the_port.setLevel(logging.ERROR)

_decode = msgspec.msgpack.Decoder(EngineReport).decode


class Collector:
    """One per process. It is made before the engines are, and works until the process ends."""

    def __init__(self, address: tuple[str, int], keys: Collection[str]) -> None:
        """`address`: host and port (0: any) that the reports are read at; `keys`: one of which a reader has to send.

        If that is taken, an error is logged. Raises `OSError` or `zmq.ZMQError` if no reports can come.
        """
        self._keys, self._unread = keys, 0  # reports
        place = None if len(tempfile.gettempdir()) <= MOST_PATH else "/tmp"  # noqa: S108  # a folder in it is ours alone
        self.folder = Path(tempfile.mkdtemp(prefix="seamark-", dir=place))
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        # The process's context: another would wait for its sockets when it is collected as garbage.
        context: Any = zmq.Context.instance()
        self._reports = context.socket(zmq.PULL)
        self._reports.rcvhwm, self._reports.linger = MAX_WAITING, 0
        self._reports.bind(f"ipc://{self.folder / SENT_TO}")
        self._inside = socket.socket(socket.AF_UNIX)
        self._inside.bind(str(self.folder / READ_INSIDE))
        self._inside.listen()
        self._listener = _listener(*address)
        self.read_at = ""
        if self._listener is not None:
            host, port = self._listener.getsockname()[:2]
            self.read_at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self, metrics: CollectedMetrics) -> None:
        """Take reports from now on: in the event loop that runs here, or in a thread of its own."""
        feeds.collected_by = os.getpid()
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            thread = threading.Thread(
                target=lambda: asyncio.run(self._work(metrics)), name="seamark-reports", daemon=True
            )
            thread.start()
        else:
            self._task = loop.create_task(self._work(metrics))  # kept: the loop alone would let it go

    async def _work(self, metrics: CollectedMetrics) -> None:
        try:
            app = EventsEndpoint(not_found)
            servers = [await _serve(app, self._inside)]
            if self._listener is not None:
                servers.append(await _serve(_with_key(app, self._keys), self._listener))
            try:
                await self._take(metrics)
            finally:
                for server in servers:
                    server.close()
        except Exception:
            logger.exception("seamark: reports end here: gateways learn nothing of this worker any more")

    async def _take(self, metrics: CollectedMetrics) -> None:
        """Take what comes, for ever. ZeroMQ's own way for event loops would make a future of each report."""
        loop = asyncio.get_running_loop()

        def take_some() -> None:
            with contextlib.suppress(zmq.Again):  # nothing is left; its descriptor then tells of the next one
                for _ in range(AT_ONCE):
                    self._take_one(metrics, self._reports.recv(zmq.DONTWAIT))
                loop.call_soon(take_some)

        loop.add_reader(self._reports.fileno(), take_some)
        take_some()
        try:
            await loop.create_future()
        finally:
            loop.remove_reader(self._reports.fileno())

    def _take_one(self, metrics: CollectedMetrics, told: bytes) -> None:
        try:
            metrics.take(_decode(told))
        except Exception as error:  # its events are missing then, which the next report's numbers show
            self._unread += 1
            if self._unread & (self._unread - 1) == 0:  # the 1st, 2nd, 4th, ...
                logger.error("seamark: a report could not be read: %s (no. %d)", type(error).__name__, self._unread)


def _with_key(app: ASGIApp, keys: Collection[str]) -> ASGIApp:
    """The app, for those who send one of the keys; nobody else learns that there is one."""
    wanted = [f"Bearer {key}".encode() for key in keys]

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        knows = [hmac.compare_digest(given, each) for each in wanted]  # all are compared, each in constant time
        await (app if any(knows) or not knows else not_found)(scope, receive, send)

    return guarded


def _listener(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        logger.error(
            "seamark: reports cannot be read at %s:%d (%s=HOST:PORT): %s; a gateway reads them at the API server's "
            "address if that has the middleware, and else learns nothing of this worker",
            host,
            port,
            settings.REPORTS_AT,
            error.strerror or error,
        )
        return None


def _bounded(protocol: Any) -> Any:
    """uvicorn's protocol with bounds on connections and on what comes outside of a request, and what `_watch` asks."""

    class Bounded(protocol):  # type: ignore[misc]  # either of uvicorn's two
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self.since, self._unread, self.logger = self.loop.time(), 0, _at_the_port
            if len(self.connections) > MOST_CONNECTIONS:
                # Whoever holds the most gives one up, its oldest: never this one, though all others are busy.
                of = Counter(each.client and each.client[0] for each in self.connections)
                oldest = min(self.connections, key=lambda each: (-of[each.client and each.client[0]], each.since))
                self.connections.discard(oldest)
                oldest.transport.abort()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._unread += len(data)
            if self._unread > MAX_HEAD_BYTES:
                self.transport.abort()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self.since, self._unread = self.loop.time(), 0

        @property
        def is_busy(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

    return Bounded


async def _watch(connections: set[Any]) -> None:
    while True:
        await asyncio.sleep(min(1.0, HEAD_SECONDS))
        now = asyncio.get_running_loop().time()
        for each in [*connections]:
            if now - each.since > (ANSWER_SECONDS if each.is_busy else HEAD_SECONDS):
                each.transport.abort()


async def _serve(app: ASGIApp, listener: socket.socket) -> asyncio.Server:
    """uvicorn's protocol on a socket, without its server: that one handles the signals of the whole process."""
    import uvicorn
    from uvicorn.server import ServerState

    config = uvicorn.Config(app, lifespan="off", ws="none", access_log=False, log_config=None)
    config.load()
    protocol: Any = _bounded(config.http_protocol_class)
    state = ServerState()
    loop = asyncio.get_running_loop()
    protocol.watching = loop.create_task(_watch(state.connections))  # kept: the loop alone would let it go
    return await loop.create_server(lambda: protocol(config=config, server_state=state, app_state={}), sock=listener)
