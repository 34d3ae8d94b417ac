"""The response cache: whole answers for requests that come again, and executions that several requests share.

An answer stands for as long as the worker that computed it is the same: a restart, another model under the name, or
another template voids it. Answers of adapters, which change under their names, are neither stored nor shared. Stored
answers and those under way stay within one bound of bytes together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable
from sys import getsizeof
from typing import Any, NamedTuple

from cachetools import LRUCache

from proxy.errors import GatewayError, Stopping
from proxy.fleet.part import Change, Part
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.metrics import Metrics
from proxy.pipeline.cacheable import HEADER, is_final, may_keep
from proxy.pipeline.request import ProxiedRequest
from proxy.pipeline.sse import HEARTBEATS

LARGEST_SHARE = 4  # an answer may take that part of the bound

# Bytes beside an answer and its headers: the entry, its key, and their places in the cache's tables.
ENTRY_BYTES = 1024

POINTER_BYTES = 8

PIECE_BYTES = 2**16  # sent at once of a stored answer

SECRET_BYTES = 32

# Of a model's entry in /v1/models: what tells models of one name apart. vLLM makes up the rest each time.
_CARD = ("id", "root", "parent", "max_model_len")


class Source(NamedTuple):
    """What computed an answer, as far as the gateway knows."""

    worker: Worker
    boot: str
    card: tuple[Any, ...] | None
    renderer_id: bytes | None  # None: not known yet

    @classmethod
    def of(cls, worker: Worker, model: Any) -> Source:
        """`worker` as it is now, for `model`."""
        name = worker.listed(model)
        card = next((entry for entry in worker.probed.models if entry.get("id") == name), None)
        return cls(
            worker,
            worker.boot,
            None if card is None else tuple(str(card.get(name)) for name in _CARD),
            worker.renderer_id(model),
        )

    def is_still(self, model: Any) -> bool:
        """Whether the worker is up and would compute the same."""
        now = Source.of(self.worker, model)
        return (
            self.worker.up
            and (now.boot, now.card) == (self.boot, self.card)
            and (None in (now.renderer_id, self.renderer_id) or now.renderer_id == self.renderer_id)
        )


def has_fixed_weights(model: Any, workers: Iterable[Worker]) -> bool:
    """Whether `model` means a base model at all of `workers`, whose weights stay as long as a worker runs.

    An adapter's may be replaced at the worker in any moment. A name that nobody lists yet may be an adapter's.
    """
    if not model:  # a worker's base model
        return True
    cards = [entry for worker in workers for entry in worker.probed.models if entry.get("id") == model]
    return bool(cards) and not any(card.get("parent") for card in cards)


class Entry(NamedTuple):
    """A stored answer."""

    headers: asgi.HeaderList
    body: bytes
    source: Source
    stored: float  # time.monotonic()

    @property
    def weight(self) -> int:
        """Bytes of memory."""
        headers = sum(getsizeof(header) + sum(map(getsizeof, header)) + POINTER_BYTES for header in self.headers)
        return getsizeof(self.body) + headers + getsizeof(self.headers) + ENTRY_BYTES

    async def deliver(self, request: ProxiedRequest, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """Send it, with the time since it was computed (RFC 9111, 5.1)."""
        age = (b"age", str(int(time.monotonic() - self.stored)).encode())
        headers = [*self.headers, age, request.client.id_header, (HEADER, b"hit")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for at in range(0, len(self.body) - PIECE_BYTES, PIECE_BYTES):
            await send({"type": "http.response.body", "body": self.body[at : at + PIECE_BYTES], "more_body": True})
        watch.over = True
        rest = max(0, -(-len(self.body) // PIECE_BYTES) - 1) * PIECE_BYTES
        await send({"type": "http.response.body", "body": self.body[rest:]})


class ResponseCache(Part):
    """Stored answers, and those under way that may be stored."""

    name = "response_cache"

    def __init__(self, most: int, metrics: Metrics) -> None:
        """`most` bytes, answers under way included."""
        self.secret = os.urandom(SECRET_BYTES)
        self.count = metrics.response_cache_requests.labels
        self._most = most
        self._evictions = metrics.response_cache_evictions
        self._entries: LRUCache[bytes, Entry] = LRUCache(most, getsizeof=lambda entry: entry.weight)
        self._executions: dict[bytes, Execution] = {}  # that others may join
        self._under_way = 0  # bytes of all executions
        self.voided = 0  # how many times answers were found to be void whatever they are
        metrics.response_cache_bytes.set_function(lambda: self.size)
        metrics.response_cache_entries.set_function(lambda: len(self._entries))

    @property
    def size(self) -> int:
        """Bytes held, answers under way included."""
        return int(self._entries.currsize) + self._under_way

    @property
    def largest(self) -> int:
        """Bytes that one answer may take."""
        return self._most // LARGEST_SHARE

    def get(self, key: bytes, model: Any, max_age: float | None) -> Entry | None:
        """The stored answer, if it still stands and is not older than `max_age` seconds."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if not entry.source.is_still(model):
            del self._entries[key]
            return None
        return entry if max_age is None or time.monotonic() - entry.stored <= max_age else None

    def store(self, key: bytes, entry: Entry) -> None:
        """Keep it in place of what may be there, if there is room at all."""
        self._entries.pop(key, None)
        if entry.weight <= self.largest and self._makes_room(entry.weight):
            self._entries[key] = entry

    def void(self, boot: str | None = None) -> None:
        """Forget the answers of a worker's boot, or all; what is under way now is not stored either."""
        self.voided += 1
        self._executions.clear()
        for key in [key for key, entry in self._entries.items() if boot in (None, entry.source.boot)]:
            del self._entries[key]

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """What a worker answered before its cache was emptied may be of other weights."""
        if change in (Change.CLEARED, Change.DISTRUSTED):
            self.void(worker.boot)

    def execution(self, key: bytes, model: Any) -> Execution | None:
        """One that can be joined: of a worker that is still what it was when it got the request."""
        execution = self._executions.get(key)
        if execution is None or (execution.source is not None and not execution.source.is_still(model)):
            return None
        return execution

    def open(self, execution: Execution) -> None:
        """Others may join it from now on."""
        self._executions[execution.key] = execution

    def close(self, execution: Execution) -> None:
        """Nobody may join it any more."""
        if self._executions.get(execution.key) is execution:
            del self._executions[execution.key]

    def take(self, size: int) -> bool:
        """Bytes for an answer under way; False if there is no room."""
        if not self._makes_room(size):
            return False
        self._under_way += size
        return True

    def give_back(self, size: int) -> None:
        """Bytes that `take` gave."""
        self._under_way -= size

    def _makes_room(self, size: int) -> bool:
        """Whether so many bytes fit, once what has not been asked for the longest is gone."""
        if self._under_way + size > self._most:
            return False
        while self.size + size > self._most:
            self._entries.popitem()
            self._evictions.inc()
        return True


class _Listener:
    """How far one client's answer has come."""

    __slots__ = ("at", "begun")

    def __init__(self) -> None:
        self.at = 0  # pieces
        self.begun = False


class Execution:
    """One request at a worker, and its answer so far, which each client that asked for it reads at its own pace.

    An answer that outgrows its share of the cache is kept no longer: nobody else can join, and the worker waits for the
    slowest of those that read. It ends when nobody is left who reads it.
    """

    def __init__(self, cache: ResponseCache, key: bytes, request: ProxiedRequest) -> None:
        self.key = key
        self.watch = asgi.ClientWatch({}, _nothing)  # stands for all clients; never entered
        self.source: Source | None = None  # as it was when it got the request
        self._cache = cache
        self._request = request
        self._voided = cache.voided
        self._task: asyncio.Task[None] | None = None
        self._head: asgi.Scope | None = None
        self._pieces: list[bytes] = []
        self._gone = 0  # pieces that all have read, and that are not kept
        self._size = 0  # bytes taken from the cache's bound
        self._is_kept = True
        self._is_whole = False
        self._failure = 0  # status of what went wrong behind the head; 0: nothing
        self._is_stopping = False
        self._error: BaseException | None = None
        self._readers: set[_Listener] = set()
        self._news = asyncio.Event()

    def begin(self, task: asyncio.Task[None]) -> None:
        """`task` has the worker answer to `send`."""
        self._task = task
        task.add_done_callback(self._over)
        self._cache.open(self)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._task is None or self._task.done()

    async def ended(self) -> None:
        """Wait for its end. If that is cancelled, so is the execution."""
        if self._task is not None:
            try:
                await asyncio.wait((self._task,))
            except asyncio.CancelledError:
                self._task.cancel()
                raise

    async def send(self, message: asgi.Scope) -> None:
        """The next part of the answer, as ASGI has it."""
        if message["type"] == "http.response.start":
            self._head = message
        else:
            if body := message.get("body", b""):
                self._pieces.append(body)
                self._keep(body)
            self._is_whole = not message.get("more_body", False)
            if self._is_whole:
                self._failure = self._request.reply.failure  # from now on it may be that of its client, who leaves
        self._tell()
        while not (self._is_kept or self._is_whole) and any(reader.at < self._end for reader in self._readers):
            await self._news.wait()
        if not (self._is_kept or self._is_whole):
            self._gone = self._end
            self._pieces.clear()
            self._give_back()

    async def deliver(self, request: ProxiedRequest, result: bytes, send: asgi.Send, watch: asgi.ClientWatch) -> bool:
        """The answer from its beginning to its end, as it comes, to one of its clients.

        Raises what the execution failed with. False if it failed before its first byte because of a bound of the first
        client's key, which does not concern the others.
        """
        reader = _Listener()
        self._readers.add(reader)
        try:
            await self._pass_on(reader, request, result, send, watch)
        except asyncio.CancelledError:
            if not watch.gone and self._task is not None:  # the server stops, and the stream has to say so
                self._is_kept = True  # waits for nobody
                if not self._is_stopping:  # a second time would cut off what it says at its end
                    self._is_stopping = True
                    self._task.cancel()
                await asyncio.wait((self._task,))
                with contextlib.suppress(Exception):
                    await self._pass_on(reader, request, result, send, watch)
            raise
        except GatewayError as error:
            if error.status == 429 and request is not self._request and not reader.begun:
                return False
            raise
        finally:
            self._readers.discard(reader)
            self._tell()
            if not self._readers:
                self._leave()
        return True

    async def _pass_on(
        self, reader: _Listener, request: ProxiedRequest, result: bytes, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        with request.timings.waiting() if request is not self._request else contextlib.nullcontext():
            while self._head is None:
                await self._next()
        head = self._head
        if not reader.begun:
            reader.begun = True
            headers = head["headers"]
            if request is not self._request:
                headers = [*_kept(headers), request.client.id_header]
            await send({**head, "headers": [*headers, (HEADER, result)]})
        while True:
            body, end = b"".join(self._pieces[reader.at - self._gone :]), self._end
            if not body and not self._is_whole:
                await self._next()
                continue
            is_last = self._is_whole
            if is_last:
                watch.over = True
                if self._failure and request is not self._request:
                    request.reply.failed(self._failure)
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            reader.at = end
            if is_last:
                return
            if not self._is_kept:
                self._tell()

    async def _next(self) -> None:
        """Wait for more. Raises what the execution failed with."""
        if self._error is not None:
            raise self._error
        await self._news.wait()

    @property
    def _end(self) -> int:
        return self._gone + len(self._pieces)

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _keep(self, piece: bytes) -> None:
        """Count a piece; too large an answer is not kept from here on."""
        size = getsizeof(piece) + POINTER_BYTES
        if not self._is_kept:
            return
        if self._size + size <= self._cache.largest and self._cache.take(size):
            self._size += size
        else:
            self._is_kept = False
            self._cache.close(self)

    def _leave(self) -> None:
        """Nobody reads any more."""
        self._cache.close(self)
        if self.is_over:
            self._give_back()
        elif not self._is_whole and self._task is not None:
            self.watch.gone = True
            self._task.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._cache.close(self)
        if task.cancelled():
            self._error = Stopping("The gateway is stopping.")
        elif (error := task.exception()) is not None:
            self._error = error
        elif not self._is_whole:
            self._error = GatewayError("The gateway failed to handle this request.")
        elif (entry := self._entry()) is not None:
            self._cache.store(self.key, entry)
        if not self._readers:
            self._give_back()
        self._tell()

    def _entry(self) -> Entry | None:
        """The answer to store; None if it may not be given to anyone else."""
        request, source, head = self._request, self.source, self._head
        if not self._is_kept or self._voided != self._cache.voided or self._failure:
            return None
        if source is None or request.worker is not source.worker or not source.is_still(request.model):
            return None
        if head is None or head["status"] != 200 or not may_keep(head["headers"]):
            return None
        headers = _kept(head["headers"])
        kind = next((value for name, value in headers if name == b"content-type"), b"")
        body = b"".join([piece for piece in self._pieces if piece not in HEARTBEATS])
        if not is_final(request.client.path, request.body.parsed, kind.startswith(b"text/event-stream"), body):
            return None
        return Entry(headers, body, Source.of(source.worker, request.model), time.monotonic())

    def _give_back(self) -> None:
        self._cache.give_back(self._size)
        self._size = 0


def _kept(headers: asgi.HeaderList) -> asgi.HeaderList:
    """Headers of an answer without those that are about one request alone."""
    return [header for header in headers if header[0] not in asgi.OWN_RESPONSE or header[0] == b"content-length"]


async def _nothing() -> asgi.Scope:
    return {"type": "http.disconnect"}


def marked(send: asgi.Send, result: bytes) -> asgi.Send:
    """`send`, with the response cache's header in the answer's head."""

    async def send_marked(message: asgi.Scope) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (HEADER, result)]}
        await send(message)

    return send_marked
