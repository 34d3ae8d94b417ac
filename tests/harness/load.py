"""Clients that keep their connection and cost little, timed to the byte; a server's CPU time and open files.

CPU time is read by the process's own clock: `/proc/PID/stat` has ticks of 10 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

CHAT = "/v1/chat/completions"

ANSWER_SECONDS = 120.0


class Sample(NamedTuple):
    """One answered request; seconds since it was sent."""

    first: float  # to the first byte of the body
    last: float  # to the end


class Client(asyncio.Protocol):
    """One connection. `await ask(...)`, one at a time."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting: asyncio.Future[Sample] | None = None

    def ask(self, request: bytes) -> asyncio.Future[Sample]:
        """Send a whole HTTP request. Fails with `RuntimeError` where the answer is not a 200 or breaks off."""
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = asyncio.get_running_loop().create_future()
        self._first = 0.0
        self._text: list[bytes] = []
        self._sent = time.perf_counter()
        self._transport.write(request)
        return self._waiting

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, part: bytes) -> None:
        if not self._first:
            self._first = time.perf_counter()
        if self._parser.get_status_code() != 200:
            self._text.append(part)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._waiting is None or self._waiting.done():
            return
        if status != 200:
            self._waiting.set_exception(RuntimeError(f"{status} {b''.join(self._text)[:500].decode(errors='replace')}"))
            return
        last = time.perf_counter()
        self._waiting.set_result(Sample((self._first or last) - self._sent, last - self._sent))

    def connection_lost(self, error: Exception | None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(RuntimeError(f"the connection broke off: {error}"))

    def close(self) -> None:
        """End the connection."""
        self._transport.close()


async def connect(url: str) -> Client:
    """A connection to the server at `url`; asyncio and uvloop both send at once, without Nagle's delay."""
    at = urlsplit(url)
    _, client = await asyncio.get_running_loop().create_connection(Client, at.hostname, at.port)
    return client


def request(url: str, body: bytes, path: str = CHAT, headers: Mapping[str, str] = {}) -> bytes:
    """A request, by default a chat, as it goes over the wire; `headers` are added to those that every one has."""
    added = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\naccept: application/json\r\n"
        f"content-type: application/json\r\n{added}content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def send_all(clients: Sequence[Client], requests: Sequence[bytes]) -> list[Sample]:
    """Every request once, each client taking the next when it has its answer."""
    left: Iterator[bytes] = iter(requests)

    async def work(client: Client) -> list[Sample]:
        return [await asyncio.wait_for(client.ask(request), ANSWER_SECONDS) for request in left]

    done = await asyncio.gather(*map(work, clients))
    return [sample for samples in done for sample in samples]


POLL_SECONDS = 0.004

QUIET_SECONDS = 0.0003  # of CPU time in one poll; an idle server uses less

SETTLE_SECONDS = 10.0


class CpuTime:
    """The CPU time of the process `pid` and of its descendants at this moment, a server that is ready."""

    def __init__(self, pid: int) -> None:
        self._pids = family(pid)
        self._clocks = [_clock(process) for process in self._pids]

    def seconds(self) -> float:
        """CPU seconds so far, user and system. Raises `OSError` when one of the processes has ended."""
        return sum(map(time.clock_gettime_ns, self._clocks)) / 1e9

    async def settled(self) -> float:
        """The same once the server has finished what it does after an answer. Raises `TimeoutError` if it never has."""
        deadline = time.monotonic() + SETTLE_SECONDS
        before = self.seconds()
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            now = self.seconds()
            # On a crowded machine a server that waits for a processor looks quiet too.
            if now - before < QUIET_SECONDS and not any(map(_is_runnable, self._pids)):
                return now
            before = now
        raise TimeoutError("the server never came to rest")


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                children[_stat(folder)[1]].append(int(folder.name))
    found = [pid]
    for process in found:
        found += children[process]
    return found


def open_files(pid: int) -> int:
    """File descriptors, sockets included, of a process and its descendants."""
    count = 0
    for process in family(pid):
        with contextlib.suppress(OSError):  # it has just ended
            count += len(os.listdir(f"/proc/{process}/fd"))
    return count


def _stat(folder: Path) -> tuple[str, int]:
    """The state ("R": running, or ready to), and the parent's id."""
    # The name in brackets may hold anything; state and parent come after its end.
    state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def _is_runnable(pid: int) -> bool:
    """Whether a thread of the process runs or waits for a processor."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            if _stat(thread)[0] == "R":
                return True
    return False


def _clock(pid: int) -> int:
    """The clock id of another process's CPU time, as clock_getcpuclockid(3) makes it."""
    return (~pid << 3) | 2
