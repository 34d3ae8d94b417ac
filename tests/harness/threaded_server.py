"""An ASGI application under a real HTTP server, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Its URL. `options` are uvicorn's; the socket is bound before the server starts, so that nobody takes the port."""
    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="critical", **options))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


async def whole_body(receive: Any) -> bytes:
    """A request's body, as the application receives it."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body
