"""Clients of a response cache, and the answers they get, each of which has bytes of its own."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.pipeline.exchange import Exchange, exchange_of
from proxy.pipeline.response_cache import PIECE_BYTES

END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

STREAM = [(b"content-type", b"text/event-stream"), (b"x-seamark-reason", b"cold"), (b"x-theirs", b"1")]

HEADS = {"plain": (200, STREAM), "no store": (200, [*STREAM, (b"cache-control", b"no-store")]), "201": (201, STREAM)}


def a_worker(boot: str = "1") -> Worker:
    return Worker("http://a", None, up=True, probed=Probed(boot=boot, models=[{"id": "m"}]))  # type: ignore[arg-type]


def head(kind: str = "plain") -> Any:
    status, headers = HEADS[kind]
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, more: bool = True) -> Any:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def turns(count: int = 40) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Client:
    """What one client gets."""

    def __init__(self, key: str) -> None:
        raw = json.dumps({"model": "m", "messages": [], "temperature": 0, "stream": True, "user": key}).encode()
        scope: Any = {"method": "POST", "path": "/v1/chat/completions", "query_string": b"", "headers": []}
        scope[asgi.SERVED] = self.served = SimpleNamespace(is_left=False, on_left=None)
        self.key, self.result = key, ""
        self.run: Run | None = None  # whose answer it is to get
        self.request: Exchange = exchange_of(scope, raw, f"id-{id(self)}", send=self._got)
        self.watch = self.request.reply
        self.request.take(json.loads(raw), asks_usage=False)
        self.head: dict[bytes, bytes] = {}
        self.body, self.ended = b"", False
        self.reads = asyncio.Event()
        self.reads.set()
        self.task: asyncio.Task[None] = None  # type: ignore[assignment]

    def leaves(self) -> None:
        if self.served.on_left is not None:
            self.served.on_left()

    def stops_reading(self) -> None:
        self.reads.clear()

    async def _got(self, message: Any) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            assert not self.head, "one head"
            self.head = dict(message["headers"])
        else:
            assert self.head and not self.ended and len(message["body"]) <= PIECE_BYTES
            self.body, self.ended = self.body + message["body"], not message.get("more_body")
            assert self.watch.over or not self.ended

    @property
    def is_reading(self) -> bool:
        """It waits for an answer, or for the rest of one."""
        return not (self.ended or self.watch.gone or self.watch.over or self.task.done())


class Run:
    """One answer of the worker, as the model has it."""

    def __init__(self, number: int, owner: Client) -> None:
        self.number, self.owner = number, owner
        self.orders: asyncio.Queue[Any] = asyncio.Queue()
        self.answer, self.to_keep = b"", b""  # all that it was told to say; without comments
        self.weight, self.ends = 0, ""
        self.head, self.is_open, self.is_kept = False, True, True  # so far; others wait for it; it may be stored
