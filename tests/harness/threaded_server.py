"""An ASGI application under a real HTTP server, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def serving(app: Any, address: str = "127.0.0.1", port: int = 0, **options: Any) -> Iterator[str]:
    """Its URL, at an address of this machine; port 0: a free one. `options` are uvicorn's.

    The socket is bound before the server starts, so that nobody takes the port.
    """
    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="critical", **options))
    kind = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=kind)
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        thread.join(0.01)
    try:
        host = f"[{address}]" if ":" in address else address
        yield f"http://{host}:{listening.getsockname()[1]}"
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
