"""Clients that keep their connection and cost little: one request after the other on each, timed to the byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
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
