"""A gateway in this process, under its own server: a test can look into it, and bring it into any state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvicorn

from proxy.gateway import Gateway
from proxy.ports import free_port
from proxy.server import server_for
from proxy.settings import Settings
from tests.recording_worker import RecordingWorker


class OwnGateway(NamedTuple):
    """A started one."""

    url: str
    gateway: Gateway
    stop: Any  # call it to end the server before the test does


@contextlib.contextmanager
def own_gateway(*workers: RecordingWorker, **settings: Any) -> Iterator[OwnGateway]:
    """Before `workers`, which it looks at five times a second; without self-checks, unless `settings` want them."""
    settings = {"self_check_interval": 0, **settings}
    port = free_port()
    urls = tuple(worker.url for worker in workers)
    server: uvicorn.Server = server_for(
        Settings(worker=urls, port=port, health_interval=0.2, drain_timeout=1, **settings),
        {"version": 1, "disable_existing_loggers": False},
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the gateway did not start"
        thread.join(0.01)

    def stop() -> None:
        server.should_exit = True
        thread.join()

    try:
        yield OwnGateway(f"http://127.0.0.1:{port}", server.config.app.gateway, stop)
    finally:
        stop()
