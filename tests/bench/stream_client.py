"""Many streams at once, received in a process of its own that only notes how late each frame comes.

Run as `python -m tests.bench.stream_client URL --streams N --frames N --step-ms N`; prints `Lateness` as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import time
from array import array
from typing import NamedTuple
from urllib.parse import urlsplit

import uvloop

from tests.harness.load import request
from tests.harness.mock_worker import FRAMES_FIELD, MODEL, STEP_FIELD

WARM_UP_SECONDS = 1.0  # while the streams begin, nothing is counted

SPARE_SECONDS = 60.0  # past the time that the frames take

_SENT = re.compile(rb'"sent":(\d+)')

_END_OF_FRAME = b"\n\n"


class Lateness(NamedTuple):
    """How late the frames of a run reached the client; seconds since the step that made them."""

    p50: float
    p99: float
    most: float
    frames: int  # counted
    received: int  # of all that were sent, those before counting began included
    complete: int  # streams that came to their end


class Receiver(asyncio.Protocol):
    """One stream. Its HTTP is not taken apart: a frame's time stands in it."""

    def __init__(self, question: bytes, lateness: array, counted_from: int) -> None:
        self._question = question
        self._lateness = lateness  # nanoseconds, of all streams together
        self._counted_from = counted_from  # time.monotonic_ns()
        self._rest = b""
        self.received = 0
        self.first = b""  # of what came
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  # whether with its proper end

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.write(self._question)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        self.first = self.first or data[:300]
        data = self._rest + data
        whole = data.rfind(_END_OF_FRAME) + len(_END_OF_FRAME)
        if whole < len(_END_OF_FRAME):
            self._rest = data
            return
        self._rest = data[whole:]
        for sent in map(int, _SENT.findall(data, 0, whole)):
            self.received += 1
            if sent >= self._counted_from:
                self._lateness.append(now - sent)
        if data.find(b"data: [DONE]", 0, whole) >= 0:
            self._end(True)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(False)

    def _end(self, proper: bool) -> None:
        if not self.ended.done():
            self.ended.set_result(proper)
            self._transport.close()


async def receive(url: str, streams: int, frames: int, step_ms: int) -> Lateness:
    """Open all streams and read them to their end."""
    at, lateness = urlsplit(url), array("q")
    counted_from = time.monotonic_ns() + int(WARM_UP_SECONDS * 1e9)
    receivers = []
    for number in range(streams):
        messages = [{"role": "system", "content": "You."}, {"role": "user", "content": f"{number}?"}]
        body = {"model": MODEL, "messages": messages, "stream": True, STEP_FIELD: step_ms, FRAMES_FIELD: frames}
        receiver = Receiver(request(url, json.dumps(body).encode()), lateness, counted_from)
        receivers.append(receiver)
        await asyncio.get_running_loop().create_connection(lambda made=receiver: made, at.hostname, at.port)
    limit = SPARE_SECONDS + frames * step_ms / 1000
    ends = await asyncio.wait_for(asyncio.gather(*(receiver.ended for receiver in receivers)), limit)
    ordered = sorted(lateness)
    if not ordered:
        raise SystemExit("no frame came after the warm-up: more frames are needed")

    def share(part: float) -> float:
        return ordered[max(0, math.ceil(part * len(ordered)) - 1)] / 1e9

    received = sum(receiver.received for receiver in receivers)
    return Lateness(share(0.5), share(0.99), share(1.0), len(ordered), received, sum(ends))


def main() -> None:
    parser = argparse.ArgumentParser(description="many streams, and how late their frames come")
    parser.add_argument("url")
    for name in ("--streams", "--frames", "--step-ms"):
        parser.add_argument(name, type=int, required=True)
    args = parser.parse_args()
    print(json.dumps(uvloop.run(receive(args.url, args.streams, args.frames, args.step_ms))._asdict()))


if __name__ == "__main__":
    main()
