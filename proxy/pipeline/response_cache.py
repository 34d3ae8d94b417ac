"""The response cache: whole answers for requests that come again, also while the first of them is computed.

An answer stands for as long as the worker that computed it is the same: a restart, another model under the name, or
another template voids it. Answers of adapters, which change under their names, are neither stored nor shared. Single
flight: who asks for what is being computed waits for the finished answer, which is stored, and gets it from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import getsizeof
from typing import Any, NamedTuple

from proxy.fleet.part import Change, Part
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.asgi import TIMES_WHAT_IS_FREE
from proxy.metrics import Metrics
from proxy.pipeline import cacheable
from proxy.pipeline.cacheable import HEADER, KEPT, Directives, Ending, may_keep
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.exchange import Exchange, id_header
from proxy.pipeline.forward import ResponseRelay
from proxy.pipeline.sse import HEARTBEAT
from proxy.settings import Settings

SECRET_BYTES = 32

# A client that has not taken a part of its answer for so long is too slow for others to wait for.
PATIENCE_SECONDS = 0.1

LARGEST_SHARE = 4  # an answer may take that part of the bound

# Bytes beside an answer and its headers: the entry, its key, and their places in the tables.
ENTRY_BYTES = 1400

POINTER_BYTES = 8
PIECE_BYTES = 2**16  # sent at once of an answer

STALE_SECONDS = 3600.0  # what nobody has asked for in so long goes for any key's answers

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
        name = worker.listed(model)
        card = next((entry for entry in worker.probed.models if entry.get("id") == name), None)
        told = tuple(str(card.get(name)) for name in _CARD) if card is not None else None
        return cls(worker, worker.boot, told, worker.renderer_id(model))

    def is_still(self, model: Any) -> bool:
        """Whether the worker is up and would compute the same."""
        now = Source.of(self.worker, model)
        renders_alike = None in (now.renderer_id, self.renderer_id) or now.renderer_id == self.renderer_id
        return self.worker.up and (now.boot, now.card) == (self.boot, self.card) and renders_alike


def weight_of(piece: bytes) -> int:
    """Bytes of memory that a piece of an answer takes."""
    return getsizeof(piece) + POINTER_BYTES


def grouped(pieces: Sequence[bytes]) -> tuple[bytes, ...]:
    """The same answer in as few pieces as may be: of at most `PIECE_BYTES`, or as long as they were."""
    groups: list[list[bytes]] = []
    size = 0
    for piece in pieces:
        if not groups or size + len(piece) > PIECE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece)
    return tuple(map(b"".join, groups))


@dataclass(slots=True, eq=False)
class Entry:
    headers: asgi.HeaderList
    pieces: Sequence[bytes]
    source: Source
    owner: str | None = None  # that of the key that had it computed
    stored: float = field(default_factory=lambda: time.monotonic())
    readers: int = 0
    is_gone: bool = False  # nobody else finds it
    asked: float = field(init=False)
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        self.asked = self.stored
        named = sum(getsizeof(header) + sum(map(getsizeof, header)) + POINTER_BYTES for header in self.headers)
        held = getsizeof(self.headers) + named + getsizeof(()) + sum(map(weight_of, self.pieces))
        self.weight = ENTRY_BYTES + held


@dataclass(slots=True, eq=False)
class _Share:
    """What an owner has of the bound."""

    held: int = 0  # bytes
    fixed: int = 0  # of them, those of what cannot go
    idle: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)  # what may go, the first of them first


@dataclass(eq=False)
class StoredAnswers:
    """Answers by their requests' digests, in one bound of bytes with those that are under way or being sent.

    API keys share it: an answer goes for another key's only if its own key holds more than that one, or if nobody has
    asked for it in a long time. What somebody still reads is counted until it has been read.
    """

    _most: int  # bytes
    _evicted: Callable[[], None]  # called for each answer that goes because others need its room
    _entries: dict[bytes, Entry] = field(default_factory=dict)
    _idle: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)  # of all owners
    _shares: defaultdict[str | None, _Share] = field(default_factory=lambda: defaultdict(_Share))  # by owner
    _fixed: int = 0
    size: int = 0  # bytes

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def largest(self) -> int:
        return self._most // LARGEST_SHARE

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def add(self, key: bytes, entry: Entry) -> bool:
        """Keep it in place of what may be there; False if there is no room."""
        self.remove(key)
        if entry.weight > self.largest or not self._makes_room(entry.owner, entry.weight):
            return False
        self._entries[key] = entry
        self._count(entry.owner, held=entry.weight)
        self._may_go(key, entry)
        return True

    def remove(self, key: bytes) -> None:
        """Nobody finds it any more. Its bytes are free once nobody reads it."""
        if (entry := self._entries.pop(key, None)) is None:
            return
        entry.is_gone = True
        if not entry.readers:
            self._stays(key, entry)
            self._count(entry.owner, held=-entry.weight)

    def remove_all(self, boot: str | None) -> None:
        """Those that a worker's boot computed; None: all."""
        for key in [key for key, entry in self._entries.items() if boot in (None, entry.source.boot)]:
            self.remove(key)

    def lend(self, key: bytes, entry: Entry) -> bool:
        """Somebody is to read it: it stays until that is over. False if its owner has too much that cannot go."""
        if not entry.readers:
            if not self._may_fix(entry.owner, entry.weight):
                return False
            self._stays(key, entry)
            self._count(entry.owner, fixed=entry.weight)
        entry.readers += 1
        entry.asked = time.monotonic()
        return True

    def returned(self, key: bytes, entry: Entry) -> None:
        entry.readers -= 1
        if entry.readers:
            return
        self._count(entry.owner, held=-entry.weight if entry.is_gone else 0, fixed=-entry.weight)
        if not entry.is_gone:
            self._may_go(key, entry)

    def take(self, owner: str | None, size: int) -> bool:
        """Bytes for an answer under way; False if there is no room."""
        if not self._may_fix(owner, size) or not self._makes_room(owner, size):
            return False
        self.hold(owner, size)
        return True

    def hold(self, owner: str | None, size: int) -> None:
        """Count bytes of an answer under way, room or not; they are given back by a negative size."""
        self._count(owner, held=size, fixed=size)

    def _may_fix(self, owner: str | None, size: int) -> bool:
        """Whether so many bytes more may be what cannot go: a key leaves room for others, as it does for bodies."""
        free = self._most - self._fixed - size
        return free >= 0 and (owner is None or self._of(owner).fixed + size <= TIMES_WHAT_IS_FREE * free)

    def _makes_room(self, owner: str | None, size: int) -> bool:
        """Whether so many bytes of an owner fit, once others have gone that have to."""
        while self.size + size > self._most:
            if (key := self._next_to_go(owner, self._of(owner).held + size)) is None:
                return False
            self.remove(key)
            self._evicted()
        return True

    def _next_to_go(self, owner: str | None, wanted: int) -> bytes | None:
        """The answer that goes for one of an owner who is to hold `wanted` bytes; None if none has to."""
        if not self._idle:
            return None
        oldest, entry = next(iter(self._idle.items()))
        if time.monotonic() - entry.asked > STALE_SECONDS:
            return oldest
        most = max((share for share in self._shares.values() if share.idle), key=lambda share: share.held)
        return next(iter(most.idle if most.held >= wanted else self._of(owner).idle), None)

    def _of(self, owner: str | None) -> _Share:
        return self._shares.get(owner) or _Share()

    def _may_go(self, key: bytes, entry: Entry) -> None:
        self._idle[key] = self._shares[entry.owner].idle[key] = entry

    def _stays(self, key: bytes, entry: Entry) -> None:
        del self._idle[key], self._shares[entry.owner].idle[key]

    def _count(self, owner: str | None, held: int = 0, fixed: int = 0) -> None:
        """So many bytes more. An owner who holds nothing is not in the table: keys come and go."""
        share = self._shares[owner]
        share.held, share.fixed = share.held + held, share.fixed + fixed
        self.size, self._fixed = self.size + held, self._fixed + fixed
        if not share.held:
            del self._shares[owner]


def has_fixed_weights(model: Any, workers: Iterable[Worker]) -> bool:
    """Whether `model` means a base model at all of `workers`, whose weights stay as long as a worker runs.

    An adapter's may be replaced at the worker in any moment. A name that nobody lists yet may be an adapter's.
    """
    if not model:  # a worker's base model
        return True
    cards = [entry for worker in workers for entry in worker.probed.models if entry.get("id") == model]
    return bool(cards) and not any(card.get("parent") for card in cards)


class ResponseCache(Part):
    """Answers exact repeats, and has identical requests wait for the first of them; a relay has the rest answered."""

    name = "response_cache"

    def __init__(
        self, settings: Settings, metrics: Metrics, pool: WorkerPool, dispatcher: Dispatcher, relay: ResponseRelay
    ) -> None:
        self._models = settings.response_cache_models  # which need no header of the client's
        # Seconds that a stream waits for another one; None: to its end.
        self._patience = settings.heartbeat or None
        self._pool = pool
        self._dispatcher = dispatcher
        self._relay = relay
        self._secret = os.urandom(SECRET_BYTES)
        self._count = metrics.response_cache_requests.labels
        self.answers = StoredAnswers(settings.response_cache, metrics.response_cache_evictions.inc)
        self.flights: dict[bytes, Flight] = {}  # that others may wait for
        self.voided = 0  # how many times answers were found to be void whatever they are
        metrics.response_cache_bytes.set_function(lambda: self.answers.size)
        metrics.response_cache_entries.set_function(lambda: len(self.answers))

    async def __call__(self, exchange: Exchange) -> None:
        """Have a request answered, as `ResponseRelay` does."""
        head = exchange.head
        if head.method != "POST" or head.path not in cacheable.CACHEABLE:
            await self._relay(exchange)
            return
        if not self._pool.up:
            with exchange.timings.waiting():
                await self._pool.ready()  # else nothing is known of the model's weights
        told = cacheable.directives_in(head.headers)
        allowed = cacheable.is_allowed(head.headers, exchange.model, self._models)
        allowed = allowed and has_fixed_weights(exchange.model, self._pool.workers)
        if told.no_store or exchange.keep or not allowed or not cacheable.is_repeatable(exchange):
            self._count("bypass").inc()
            exchange.send = partial(_send_marked, exchange.send, b"bypass")
            await self._relay(exchange)
            return
        await self._answer(exchange, told)

    async def _answer(self, exchange: Exchange, told: Directives) -> None:
        """From what is stored, after waiting for an equal request that is being computed, or from a worker."""
        api_key, result = exchange.head.key, b"hit"
        key, may_wait = cacheable.digest(exchange, self._secret), not told.no_cache and told.max_age != 0
        dispatcher = self._dispatcher
        try:
            while not told.no_cache:
                if (entry := self.find(key, exchange.model, told.max_age)) is not None:
                    dispatcher.unused(exchange)
                    self._count(result.decode()).inc()
                    await self._deliver(key, entry, exchange, result)
                    return
                flight = self.flight(key) if may_wait else None
                if flight is not None and (exchange.slot is not None or api_key is None or api_key.has_room):
                    result, may_wait = b"joined", False
                    with exchange.timings.waiting(), dispatcher.counted(api_key):
                        dispatcher.unused(exchange)
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(self._patience if exchange.body.parsed.get("stream") else None):
                                await flight.landed.wait()
                elif exchange.slot is not None:
                    break
                else:  # an equal request may begin or end meanwhile
                    await dispatcher.acquire(exchange)
            if exchange.slot is None:
                await dispatcher.acquire(exchange)
            self._count("miss").inc()
            with Flight(self, key, exchange) as flight:
                exchange.send = flight.send
                await self._relay(exchange)
        finally:
            dispatcher.release(exchange)

    def find(self, key: bytes, model: Any, max_age: float | None = None) -> Entry | None:
        """The stored answer, if it still stands and is not older than `max_age` seconds. It has to be returned."""
        answers = self.answers
        if (entry := answers.get(key)) is None:
            return None
        if not entry.source.is_still(model):
            answers.remove(key)
            return None
        if (worker := entry.source.worker).engine is not None and not worker.is_followed:
            return None  # its weights may be others by now; asked again, it tells
        if max_age is not None and time.monotonic() - entry.stored > max_age:
            return None
        return entry if answers.lend(key, entry) else None

    def flight(self, key: bytes) -> Flight | None:
        """The equal request that is being computed, if its answer may be waited for."""
        flight = self.flights.get(key)
        return flight if flight is not None and not flight.landed.is_set() else None

    async def _deliver(self, key: bytes, entry: Entry, exchange: Exchange, result: bytes) -> None:
        """Send an answer that was found, with the time since it was computed (RFC 9111, 5.1), and return it."""
        try:
            age = (b"age", str(int(time.monotonic() - entry.stored)).encode())
            headers = [*entry.headers, age, id_header(exchange.head.request_id), (HEADER, result)]
            await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
            for number, piece in enumerate(entry.pieces, 1):
                more = number < len(entry.pieces)
                await exchange.send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            self.answers.returned(key, entry)

    def void(self, boot: str | None = None) -> None:
        """Forget the answers of a worker's boot, or all; what is under way now is not stored either."""
        self.voided += 1
        for flight in self.flights.values():
            flight.landed.set()
        self.answers.remove_all(boot)

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """What a worker answered before its cache was emptied may be of other weights."""
        if change in (Change.CLEARED, Change.DISTRUSTED):
            self.void(worker.boot)


class Flight:
    """A request at a worker, whose answer goes to its client and, if anyone else may have it, into the cache.

    It is collected within the cache's bound. An answer that outgrows its share, or whose client reads too slowly, is
    none that others wait for.
    """

    def __init__(self, cache: ResponseCache, key: bytes, exchange: Exchange) -> None:
        self._cache, self._key, self._exchange, self._send = cache, key, exchange, exchange.send
        self._answers = cache.answers
        self._source = Source.of(exchange.at, exchange.model)  # as it was when it got the request
        self._voided = cache.voided
        self._start: asgi.Scope | None = None
        self._ending: Ending | None = None
        self._pieces: list[bytes] = []
        self._size = 0  # bytes of them, as they are counted
        self._is_kept = True
        self.landed = exchange.landed = asyncio.Event()  # nobody waits for it any more

    def __enter__(self) -> Flight:
        if self._cache.flight(self._key) is None:
            self._cache.flights[self._key] = self
        return self

    def __exit__(self, *_: object) -> None:
        self._refuse()
        if self._cache.flights.get(self._key) is self:
            del self._cache.flights[self._key]

    async def send(self, message: asgi.Scope) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
        elif self._is_kept:
            self._add(message.get("body", b""))
            if not message.get("more_body", False):
                self._end()
        if self.landed.is_set():
            await _send_marked(self._send, b"miss", message)
            return
        too_slow = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self.landed.set)
        try:
            await _send_marked(self._send, b"miss", message)
        finally:
            too_slow.cancel()

    def _begin(self, start: asgi.Scope) -> None:
        self._start = start
        kind = next((value for name, value in start["headers"] if name == b"content-type"), b"")
        path, asked = self._exchange.head.path, self._exchange.body.parsed
        self._ending = Ending(path, asked, kind.startswith(b"text/event-stream"))
        if start["status"] != 200 or not may_keep(start["headers"]):
            self._refuse()

    def _add(self, piece: bytes) -> None:
        if not piece or piece == HEARTBEAT or self._ending is None:
            return
        size = weight_of(piece)
        if self._size + size > self._answers.largest or not self._answers.take(self._exchange.head.owner, size):
            self._refuse()
            return
        self._size += size
        self._pieces.append(piece)
        self._ending.see(piece)

    def _end(self) -> None:
        exchange, start, source, pieces = self._exchange, self._start, self._source, grouped(self._pieces)
        self._drop()
        is_void = self._voided != self._cache.voided or exchange.reply.failure or exchange.worker is not source.worker
        is_final = (
            not is_void and source.is_still(exchange.model) and self._ending is not None and self._ending.is_final
        )
        if start is not None and is_final:
            source = Source.of(source.worker, exchange.model)
            headers = [header for header in start["headers"] if header[0] in KEPT]  # the same for all who get it
            self._answers.add(self._key, Entry(headers, pieces, source, exchange.head.owner))
        self.landed.set()

    def _refuse(self) -> None:
        self._drop()
        self.landed.set()

    def _drop(self) -> None:
        self._is_kept = False
        self._answers.hold(self._exchange.head.owner, -self._size)
        self._size = 0
        self._pieces.clear()


async def _send_marked(send: asgi.Send, result: bytes, message: asgi.Scope) -> None:
    """`send`, with the response cache's header in the answer's head."""
    if message["type"] == "http.response.start":
        message = {**message, "headers": [*message["headers"], (HEADER, result)]}
    await send(message)
