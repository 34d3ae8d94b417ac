"""A worker whose connections do what they are told: close, stay silent. HTTP servers do not offer that."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.harness.recording_worker import COMPLETION, ENGINE_INFO

Reply = bytes | None  # None: the connection is closed without a word


class RawWorker:
    """State of it. `reply(request, n)` answers the `n`-th request (from 0) of a connection."""

    def __init__(self, reply: Callable[[bytes, int], Reply]) -> None:
        self.reply = reply
        self.url = ""
        self.requests: list[bytes] = []
        self.connections: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.connections.append(writer)
        served = 0
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                body = await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
                answer = _page(head.split(b" ", 2)[1])
                if answer is None:
                    self.requests.append(head + body)
                    answer = self.reply(head + body, served)
                    served += 1
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()


def whole(body: Any = COMPLETION, status: str = "200 OK") -> bytes:
    """A JSON answer."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def _page(target: bytes) -> bytes | None:
    """What every worker answers about itself."""
    if target == b"/health":
        return whole(b"")
    if target == b"/metrics":
        return whole(b"process_start_time_seconds 1.7e+09\n" + ENGINE_INFO.encode())
    if target == b"/v1/models":
        return whole({"object": "list", "data": [{"id": "m", "object": "model"}]})
    if target.startswith(b"/seamark/"):
        return whole(b"", "404 Not Found")
    if target.endswith(b"/render"):
        return whole({"token_ids": list(range(20))})
    return None


@contextmanager
def raw_worker(reply: Callable[[bytes, int], Reply]) -> Iterator[RawWorker]:
    """The worker on a free port, in a thread."""
    worker = RawWorker(reply)
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(worker.serve, "127.0.0.1", 0, limit=2**26))
    worker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield worker
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for writer in worker.connections:
            writer.transport.abort()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
