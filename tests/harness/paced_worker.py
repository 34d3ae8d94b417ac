"""For long runs a worker whose answers follow from the request alone, come at its pace, and may be broken ones.

A chat's field `paced` says how it is answered: `frames` of `bytes` each, one every `step_ms`; `ending` is "stop" or a
way to break off. Each frame tells the name of the request, the cache salt that came with it, its number, and when it
was due. `GET /seen` tells how many requests of each salt were answered at once, at most, and how many there were.

Run as `python -m tests.harness.paced_worker --port N`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import uvloop

from proxy.bench.harness.servers import Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.fake_engine import engine_info, template, token_ids
from tests.harness.raw_worker import RENDER, Connection, Head, chunk, whole

MODEL = "paced"

FIELD = "paced"

STOP = "stop"

_DONE = b"data: [DONE]\n\n"

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

# How an answer may break off: what comes behind half of its frames, of a stream and of a whole answer; None: nothing,
# and the connection is closed.
BROKEN: Mapping[str, tuple[bytes | None, bytes | None]] = {
    "cut": (None, None),
    "no end": (b"", b"{}"),
    "no choices": (b'data: {"finish_reason":"stop"}\n\n' + _DONE, b'{"choices":null}'),
    "no index": (b'data: {"choices":[{"finish_reason":"stop"}]}\n\n' + _DONE, b'{"choices":[null]}'),
    "no json": (b'data: {"choices":[{"finish_reason":"stop"\n\n' + _DONE, b"[" * 50_000),
    "error": (b'data: {"error":{"message":"no","code":500}}\n\n' + _DONE, b'{"error":{"message":"no"}}'),
    "aborted": (
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n' + _DONE,
        b'{"choices":[{"index":0,"finish_reason":"abort"}]}',
    ),
    "long line": (b'data: {"choices":[],"pad":"' + b"x" * 3 * 2**20 + b'"}\n\n' + _DONE, b'{"pad":"' + b"x" * 2**21),
}


def name_of(body: Mapping[str, Any]) -> str:
    """The name of a request, by all that a client has put into it."""
    own = {name: value for name, value in body.items() if name not in ("cache_salt", "stream_options", "vllm_xargs")}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:32]


def frame(name: str, salt: str, number: int, size: int, due: float, ends: bool = False) -> bytes:
    """One event of an answer; `size` is roughly its bytes, `due` by time.monotonic()."""
    choice = {"index": 0, "delta": {"content": "x" * size}, "finish_reason": STOP if ends else None}
    told = {"id": name, "salt": salt, "number": number, "due": int(due * 1e9), "choices": [choice]}
    return b"data: " + json.dumps(told).replace('"finish_reason": ', '"finish_reason":').encode() + b"\n\n"


class Seen:
    """What the worker was asked."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()  # requests that are being answered, by salt
        self.most: Counter[str] = Counter()
        self.total: Counter[str] = Counter()

    @contextlib.contextmanager
    def answering(self, salt: str) -> Any:
        """Count a request while this is entered."""
        self.now[salt] += 1
        self.total[salt] += 1
        self.most[salt] = max(self.most[salt], self.now[salt])
        try:
            yield
        finally:
            self.now[salt] -= 1


class Worker(Connection):
    """One connection."""

    def __init__(self, seen: Seen, started: float) -> None:
        super().__init__()
        self._seen = seen
        self._started = started
        self._answer: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None:
            self._answer.cancel()

    def received(self, head: Head, body: bytes) -> None:
        path = head.target.partition(b"?")[0].decode()
        if path == "/v1/chat/completions":
            self._answer = asyncio.ensure_future(self._chat(json.loads(body)))
        elif path == RENDER.decode():
            self.transport.write(whole({"token_ids": token_ids(template(json.loads(body)))}))
        elif path == "/v1/models":
            self.transport.write(whole({"object": "list", "data": [{"id": MODEL, "object": "model", "root": MODEL}]}))
        elif path in ("/metrics", "/seamark/metrics"):
            text = f"process_start_time_seconds {self._started}\n{engine_info()}"
            self.transport.write(whole(text.encode(), kind=b"text/plain"))
        elif path == "/seamark/outcomes":
            self.transport.write(whole({"boot": "b", "cursor": 0, "outcomes": []}))
        elif path == "/seen":
            self.transport.write(whole({"most": self._seen.most, "total": self._seen.total}))
        else:
            self.transport.write(whole(b"") if path == "/health" else whole(b"{}", "404 Not Found"))

    async def _chat(self, body: Mapping[str, Any]) -> None:
        wanted = {"frames": 4, "bytes": 100, "step_ms": 0, "ending": STOP, **body.get(FIELD, {})}
        name, salt = name_of(body), body.get("cache_salt", "")
        with self._seen.answering(salt):
            await (self._stream if body.get("stream") else self._whole)(name, salt, wanted)

    async def _whole(self, name: str, salt: str, wanted: Mapping[str, Any]) -> None:
        await asyncio.sleep(wanted["step_ms"] * wanted["frames"] / 1000)
        message = {"role": "assistant", "content": "x" * wanted["bytes"]}
        answer = {"id": name, "salt": salt, "choices": [{"index": 0, "message": message, "finish_reason": STOP}]}
        if wanted["ending"] == STOP:
            self.transport.write(whole(answer))
        elif (odd := BROKEN[wanted["ending"]][1]) is None:
            self.transport.close()
        else:
            self.transport.write(whole(odd))

    async def _stream(self, name: str, salt: str, wanted: Mapping[str, Any]) -> None:
        is_well, frames = wanted["ending"] == STOP, wanted["frames"]
        self.transport.write(_HEAD)
        due = time.monotonic()
        for number in range(frames if is_well else frames // 2):
            await self._may_write.wait()
            self.transport.write(
                chunk(frame(name, salt, number, wanted["bytes"], due, is_well and number == frames - 1))
            )
            due += wanted["step_ms"] / 1000
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        end = _DONE if is_well else BROKEN[wanted["ending"]][0]
        if end is None:
            self.transport.close()
        else:
            self.transport.write((chunk(end) if end else b"") + b"0\r\n\r\n")


def paced_worker(servers: Servers) -> Server:
    """Start one in a process of its own that ends with `servers`."""
    port = free_port()
    command = [sys.executable, "-m", "tests.harness.paced_worker", "--port", str(port)]
    return servers.start("paced-worker", port, command, {})


async def serve(port: int) -> None:
    """Answer on the loopback port, for ever."""
    seen, started = Seen(), time.time()
    loop = asyncio.get_running_loop()
    made = await loop.create_server(
        lambda: cast(asyncio.Protocol, Worker(seen, started)), "127.0.0.1", port, backlog=1024
    )
    await made.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description="a worker without an engine, whose answers follow from requests")
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
