"""For benchmarks a worker that costs next to nothing: it answers like a patched vLLM 0.32.

A request is parsed as JSON only for a render; otherwise the few fields that matter are searched in its bytes. Tokens
before the deepest entry of a hint are reported as cached, as by an engine that was sent the prefix before; where an
entry lies is told from the bytes, too, and so roughly.

It keeps nothing, for its speed: under uvicorn an answer takes 3.5 times the CPU time, on the cores that the measured
gateway uses as well.

Run as `python -m tests.harness.mock_worker PORT`.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import uvloop

from proxy.bench.harness.servers import Server, Servers, free_port
from tests.harness.raw_worker import Connection, Head, chunk, page, whole

MODEL = "m"

FRAMES = 64  # of a stream that does not say

# Fields of a request's body that only this worker knows.
STEP_FIELD, FRAMES_FIELD, MISS_FIELD = "mock_step_ms", "mock_frames", "mock_miss"

_STREAMED = re.compile(rb'"stream": ?true')

_HINT = re.compile(rb'"seamark_boundaries": ?\[([^\]]*)\]')

_REQUEST_ID = re.compile(rb"\r\nx-request-id: *([!-~]+)", re.I)

_FEED = re.compile(rb"boot=([^&]*)&after=(\d+)&wait=([\d.]+)")

MAX_KEPT = 4096  # outcomes of the feed

_ENTRY = re.compile(rb'-?\d+(?=\s*(?:,|$))|"[^"]*"')

_STEP, _FRAMES = (re.compile(rb'"%s": ?(\d+)' % field.encode()) for field in (STEP_FIELD, FRAMES_FIELD))

_MISS = re.compile(b'"%s": ?true' % MISS_FIELD.encode())

_ANSWER = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"The harbour pilot checks the tide tables before noon."},'
    b'"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":%b}'
)

_CHUNK = b'{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[%b]'

_DELTA = b'{"index":0,"delta":{"content":" harbour"},"logprobs":null,"finish_reason":null}'

_FRAME = b"data: " + _CHUNK % _DELTA + b"}\n\n"

_TIMED_FRAME = b"data: " + _CHUNK % _DELTA + b',"sent":%d}\n\n'

_END = b"data: " + _CHUNK % b"" + b',"usage":%b}\n\n', b"data: [DONE]\n\n"

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)

_READY_FRAME = chunk(_FRAME)

_MARK = b"server: uvicorn\r\n"

_whole = partial(whole, mark=_MARK)


class Counted(NamedTuple):
    """A request in tokens."""

    prompt: int
    positions: list[int]  # of its hint
    cached: int

    @property
    def usage(self) -> bytes:
        """As the answer says it."""
        return (
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
            % (self.prompt, self.prompt + FRAMES, FRAMES, self.cached)
        )


def counted(body: bytes) -> Counted:
    """Everything up to the deepest entry of the hint was cached, unless the request says that nothing was."""
    at = body.rfind(b'"seamark_boundaries"')
    found = _HINT.search(body, at) if at >= 0 else None
    prompt = len(body)
    if found is None or not found[1]:
        return Counted(prompt, [], 0)
    # A pattern stands before a text, mostly the last one.
    before_text = max(1, body.rfind(b'"content"', 0, at))
    numbers = [int(entry) if entry.lstrip(b"-").isdigit() else before_text for entry in _ENTRY.findall(found[1])]
    prompt = max(prompt, *numbers, 0) + 1
    positions = [number if number > 0 else max(0, prompt + number) for number in numbers]
    return Counted(prompt, positions, 0 if _MISS.search(body) else max(positions) // 16 * 16)


class Feed:
    """The latest outcomes."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str, Counted]] = deque(maxlen=MAX_KEPT)
        self._cursor = 0
        self._news = asyncio.Event()

    def add(self, request_id: str, counts: Counted) -> None:
        """A request was admitted."""
        self._cursor += 1
        self._kept.append((self._cursor, request_id, counts))
        self._news.set()

    async def read(self, target: bytes) -> bytes:
        """The answer to a request of the feed, once there is news or, as an engine, when its time is over."""
        query = _FEED.search(target)
        after = int(query[2]) if query and query[1] == b"mock" else 0
        if after == self._cursor and query:
            self._news.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), float(query[3]))
        new = [(name, counts) for number, name, counts in self._kept if number > after]
        reasons = ["hit" if counts.cached else "cold" for _, counts in new]
        events = [
            ["admitted", name, reason, counts.cached, counts.cached, counts.positions]
            for reason, (name, counts) in zip(reasons, new, strict=True)
        ]
        return json.dumps({"boot": "mock", "cursor": self._cursor, "events": events, "reset": False}).encode()


class Worker(Connection):
    """One connection."""

    def __init__(self, feed: Feed) -> None:
        super().__init__()
        self._feed = feed

    def received(self, head: Head, body: bytes) -> None:
        path = head.target.partition(b"?")[0]
        if path == b"/v1/chat/completions":
            counts = counted(body)
            name = _REQUEST_ID.search(head.fields)
            if name is not None:
                self._feed.add(name[1].decode(), counts)
            if _STREAMED.search(body) is None:
                told = b"hit" if counts.cached else b"cold", counts.cached, counts.cached
                mark = _MARK + b"x-seamark-outcome: %b,%d,%d,%b\r\n" % (
                    *told,
                    ":".join(map(str, counts.positions)).encode(),
                )
                self.transport.write(_whole(_ANSWER % counts.usage, mark=mark))
            else:
                self._stream(body, counts)
        elif path == b"/seamark/outcomes":
            self._reading = asyncio.ensure_future(self._tell(head.target))
        else:
            found = page(head.method, path, body)
            self.transport.write(_whole(*found) if found else _whole(b'{"detail":"Not Found"}', "404 Not Found"))

    async def _tell(self, target: bytes) -> None:
        self.transport.write(_whole(await self._feed.read(target)))

    def _stream(self, body: bytes, counts: Counted) -> None:
        self.transport.write(_STREAM_HEAD)
        step, wanted = _STEP.search(body), _FRAMES.search(body)
        frames = int(wanted[1]) if wanted else FRAMES
        end = b"".join(map(chunk, (_END[0] % counts.usage, _END[1]))) + b"0\r\n\r\n"
        if step is not None:
            self._stepping = asyncio.ensure_future(self._step(int(step[1]) / 1000, frames, end))
        else:
            self._next_frame(frames, end)

    async def _step(self, seconds: float, frames: int, end: bytes) -> None:
        """A frame at every step of an engine; it says when it was sent."""
        due = asyncio.get_running_loop().time()
        for left in range(frames, 0, -1):
            due += seconds
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            if self.transport.is_closing():
                return
            self.transport.write(chunk(_TIMED_FRAME % time.monotonic_ns()) + (end if left == 1 else b""))

    def _next_frame(self, left: int, end: bytes) -> None:
        # One in each turn of the loop: a system call each, as from an engine.
        if left and not self.transport.is_closing():
            self.transport.write(_READY_FRAME)
            asyncio.get_running_loop().call_soon(self._next_frame, left - 1, end)
        elif not self.transport.is_closing():
            self.transport.write(end)


def mock_worker(servers: Servers) -> Server:
    """Start one in a process of its own that ends with `servers`. Streams that do not say get all at once."""
    port = free_port()
    return servers.start("mock-worker", port, [sys.executable, "-m", "tests.harness.mock_worker", str(port)], {})


async def serve(port: int) -> None:
    """Answer on the loopback port, for ever."""
    feed = Feed()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Worker(feed), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
