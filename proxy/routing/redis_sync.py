"""Replication between gateways through Redis: a background task writes what this one learns, and reads the others.

No request ever waits for Redis: what others learnt is in this gateway's own tables before a request needs it. While
Redis is away, the gateway goes on with what it knows itself.

Each worker has a stream of records about the prefixes it holds and the responses it stores; one more stream has the
positions of boundaries.
Entries of a stream are batches of fixed-size records.

What a key with limits in tokens has used in a day is a hash, of which each gateway writes one field, its own total.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from cachetools import FIFOCache, TTLCache
from redis.asyncio import Redis
from redis.asyncio.connection import DefaultParser
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ClosedByRedis
from redis.exceptions import InvalidResponse
from xxhash import xxh3_128_hexdigest

from proxy.boundaries.positions import PositionCache
from proxy.chat.responses import StoredResponses
from proxy.fleet.part import Part
from proxy.http.auth import KeyRing
from proxy.http.token_limits import DAY, TokenLimits
from proxy.idle_work import SHORT_PATIENCE_SECONDS, IdleWork, Steps
from proxy.metrics import Metrics
from proxy.routing.prefix_index import PrefixIndex

logger = logging.getLogger("seamark.redis")

CONNECT_SECONDS, ANSWER_SECONDS = 0.1, 0.05

# Between two exchanges: if everything is read, and if there is more to read or write than one exchange takes.
INTERVAL_SECONDS, CATCH_UP_SECONDS = 0.05, 0.005

# After so many errors in a row Redis counts as down, and is tried again every `RETRY_SECONDS`.
ERRORS_TO_DOWN, RETRY_SECONDS = 3, 2.0

STREAM_ENTRIES = 2048  # of one stream, at most 1.4 kB each; Redis keeps about a hundred more
STREAM_BYTES = 3.5 * 2**20  # of Redis, that one stream takes at most; measured, rounded up
STREAM_SECONDS = 6 * 3600  # without entries until it expires

# Every gateway reads what every other writes. Beyond so many that write, each writes less often, and more in one entry.
GATEWAYS_AT_ONCE = 4
WRITER_SECONDS = 60.0  # since its last entry, for which a gateway counts as one that writes
MOST_WRITERS = 1024  # that are counted

# In one exchange, over all workers' streams, and as many of positions, to which all gateways write. The event loop
# waits while one reply is parsed.
READ_ENTRIES, WRITE_RECORDS = 32, 256

WAITING_EVENTS = 10_000  # to be written; the oldest are dropped while Redis is away

# A record is not written again for this long. It is repeated after that if it is in use, because streams are trimmed.
REPEAT_SECONDS, WRITTEN_LATELY = 60.0, 20_000

LIMITS_AT_ONCE = 16  # keys with limits in tokens, in one exchange; more take turns

KEY_BYTES, WRITER_BYTES = 16, 8
MAX_RECORDS = 64  # in one batch: applying it stays far below a millisecond
MAX_TOKENS = 2**24  # a longer prompt than any engine takes is garbage

# Kinds of records: two of prefixes, one of responses, one of the positions of boundaries.
HELD, GONE, KEPT, PLACED = 1, 2, 3, 4

# Those in a worker's stream and in that of positions, and whether such a record has tokens.
_OF_WORKER = frozenset({(HELD, True), (GONE, False), (KEPT, False)})
_OF_POSITIONS = frozenset({(PLACED, True)})

MAGIC = b"smh4"  # with the version: batches of another one are refused

_HEADER = struct.Struct(f"<4s{WRITER_BYTES}s")
_RECORD = struct.Struct(f"<B{KEY_BYTES}sI")  # kind, key of a prefix or name of a response, tokens or 0

POSITIONS_STREAM = b"seamark:positions:3"

_ENTRY = re.compile(rb"\d{1,20}-\d{1,20}")  # how Redis names one


def holdings_stream(boot: str) -> bytes:
    """The stream about the worker that booted as `boot`; a restarted worker has another."""
    return b"seamark:held:4:" + xxh3_128_hexdigest(boot.encode()).encode()


StreamRecord = tuple[int, bytes, int]


class Batch(NamedTuple):
    writer: bytes  # names the gateway, at random
    records: tuple[StreamRecord, ...]


def pack(writer: bytes, records: Iterable[StreamRecord]) -> bytes:
    """The batch as bytes, of at most `MAX_RECORDS`."""
    return b"".join((_HEADER.pack(MAGIC, writer), *(_RECORD.pack(*record) for record in records)))


def unpack(raw: bytes, *, of_positions: bool = False) -> Batch | None:
    """The batch in these bytes of a worker's stream, or of that of positions; None if they are none."""
    length = len(raw) - _HEADER.size
    if not 0 < length <= MAX_RECORDS * _RECORD.size or length % _RECORD.size:
        return None
    magic, writer = _HEADER.unpack_from(raw)
    records = tuple(_RECORD.iter_unpack(memoryview(raw)[_HEADER.size :]))
    kinds = _OF_POSITIONS if of_positions else _OF_WORKER
    if magic != MAGIC or any(tokens > MAX_TOKENS or (kind, tokens > 0) not in kinds for kind, _, tokens in records):
        return None
    return Batch(writer, records)


# Of one command. What gateways write gives less even with a thousand workers, each of which has a stream.
MOST_BYTES, MOST_LINES = 2**21, 2**14

# How a list of ten thousand elements begins, or of more. Records hold this by chance less than once in 10**18 bytes.
_LONG_LIST = re.compile(rb"\r\n[*%~>|]\d{5,}\r\n")

LONGEST_HEADER = 32  # bytes of a header that hiredis takes, which two pieces may share


class AnswerTooLarge(InvalidResponse):
    """It is no answer to what was asked."""


class BoundedParser(DefaultParser):  # type: ignore[valid-type, misc]  # redis gives it as a variable
    """What Redis answers, within bounds. As a connection's `parser_class`.

    hiredis believes every length that an answer announces, and what it then does is done in one go. An answer beyond
    them counts as garbage before it is parsed.
    """

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)
        self._bytes = self._lines = 0
        self._before = b"\r\n"

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        """The next answer. Raises `AnswerTooLarge`."""
        self._bytes = self._lines = 0
        return await super().read_response(*args, **kwargs)

    async def read_from_socket(self) -> bool:
        """Give the next piece to hiredis. Raises `AnswerTooLarge`."""
        piece: bytes = await self._stream.read(self._read_size)
        if not piece:
            raise ClosedByRedis("Redis has closed the connection")
        self._bytes += len(piece)
        self._lines += piece.count(b"\r\n")
        joined = self._before + piece
        if self._bytes > MOST_BYTES or self._lines > MOST_LINES or _LONG_LIST.search(joined) is not None:
            raise AnswerTooLarge
        self._before = joined[-LONGEST_HEADER:]
        self._reader.feed(piece)
        return True


class RedisSync(Part):
    """Listens to its tables from the start, exchanges records while `run` runs."""

    name = "redis"

    def __init__(
        self,
        url: str,
        prefix_index: PrefixIndex,
        positions: PositionCache,
        stored: StoredResponses,
        metrics: Metrics,
        idle: IdleWork,
        boots: Callable[[], Iterable[str]],
        keys: KeyRing | None = None,
    ) -> None:
        """`boots` names the workers that this gateway has now: only their streams are read."""
        # RESP2: no greeting that a connection would have to wait for.
        self._redis = Redis.from_url(
            url,
            protocol=2,
            decode_responses=False,
            max_connections=1,
            parser_class=BoundedParser,
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=ANSWER_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        self._idle = idle
        self._prefix_index, self._positions, self._stored, self._boots = prefix_index, positions, stored, boots
        self._up, self._errors = metrics.redis_up, metrics.redis_errors
        self._sent, self._heard, self._dropped, self._refused = (
            metrics.redis_news.labels(fate) for fate in ("sent", "heard", "dropped", "refused")
        )
        self._up.set(0)
        self.state, self._failures = "connecting", 0  # or "up", "down"; since Redis last answered
        self._waiting: deque[tuple[str | None, Sequence[StreamRecord]]] = deque(maxlen=WAITING_EVENTS)
        self._outgoing: dict[bytes, list[StreamRecord]] = {}  # by stream; not known to be written
        self._cursors: dict[bytes, bytes] = {}  # by stream, the last entry that was read
        self._writers: TTLCache[bytes, None] = TTLCache(MOST_WRITERS, WRITER_SECONDS, time.monotonic)  # other gateways
        self._next_write = 0.0  # time.monotonic()
        self._keys, self._field, self._turn = keys, secrets.token_bytes(WRITER_BYTES), 0
        self._start_over()
        # On the path of requests: no more than an append.
        prefix_index.on_held = lambda key, tokens, boot: self._append(boot, ((HELD, key, tokens),))
        prefix_index.on_forget = self._forgot
        positions.on_put = lambda key, tokens: self._append(None, ((PLACED, key, tokens),))
        stored.on_kept = lambda name, boot: self._append(boot, ((KEPT, name, 0),))

    async def run(self) -> None:
        """Exchange records, for ever. No failure ends it."""
        while True:
            await self._idle.lull(SHORT_PATIENCE_SECONDS)
            try:
                more = await self._exchange()
                if self._keys is not None and (limited := [*self._keys.limited.values()]):
                    await self._share_use(limited)
            except Exception as error:
                pause = self._failed(error)
            else:
                self._answered()
                pause = CATCH_UP_SECONDS if more else INTERVAL_SECONDS
            await asyncio.sleep(pause)

    async def aclose(self) -> None:
        self._prefix_index.on_held = self._prefix_index.on_forget = self._positions.on_put = None
        self._stored.on_kept = None
        await self._redis.aclose()

    def status(self) -> dict[str, Any]:
        return {"state": self.state, "waiting": len(self._waiting), "streams_read": len(self._cursors)}

    def _forgot(self, keys: Sequence[bytes], boot: str) -> None:
        for start in range(0, len(keys), MAX_RECORDS):
            self._append(boot, [(GONE, key, 0) for key in keys[start : start + MAX_RECORDS]])

    def _append(self, boot: str | None, event: Sequence[StreamRecord]) -> None:
        if len(self._waiting) == WAITING_EVENTS:
            self._dropped.inc()
        self._waiting.append((boot, event))

    async def _exchange(self) -> bool:
        """Write what waits and read what is new, in one round trip. Returns whether there is more of either."""
        now = time.monotonic()
        if now >= self._next_write or len(self._waiting) >= WRITE_RECORDS:
            self._take()
            # All gateways together write no more entries than a few would.
            self._next_write = now + INTERVAL_SECONDS * max(1.0, (1 + len(self._writers)) / GATEWAYS_AT_ONCE)
        streams = {POSITIONS_STREAM: None, **{holdings_stream(boot): boot for boot in self._boots()}}
        self._cursors = {stream: self._cursors.get(stream, b"0") for stream in streams}
        cursors: dict[Any, Any] = dict(self._cursors)
        count = max(1, READ_ENTRIES // max(1, len(streams) - 1))
        position_cursor = cursors.pop(POSITIONS_STREAM)
        async with self._redis.pipeline(transaction=False) as pipeline:
            for stream, records in self._outgoing.items():
                for start in range(0, len(records), MAX_RECORDS):
                    packed = pack(self._writer, records[start : start + MAX_RECORDS])
                    pipeline.xadd(stream, {b"n": packed}, maxlen=STREAM_ENTRIES, approximate=True)
                pipeline.expire(stream, STREAM_SECONDS)
            pipeline.xread({POSITIONS_STREAM: position_cursor}, READ_ENTRIES)
            if cursors:
                pipeline.xread(cursors, count)
            replies = await pipeline.execute()
        self._sent.inc(sum(map(len, self._outgoing.values())))
        self._outgoing.clear()
        more = len(self._waiting) >= WRITE_RECORDS
        for stream, entries in [news for reply in replies[-1 - bool(cursors) :] for news in reply]:
            asked = READ_ENTRIES if stream == POSITIONS_STREAM else count
            if len(entries) > asked:
                raise AnswerTooLarge
            more |= len(entries) == asked
            await self._idle.finish(self._apply_all(stream, streams[stream], entries))
        return more

    def _apply_all(self, stream: bytes, boot: str | None, entries: Iterable[tuple[bytes, Any]]) -> Steps[None]:
        """One batch in each step."""
        for number, fields in entries:
            if _ENTRY.fullmatch(number) is None:
                raise ValueError("no entry of a stream")
            self._apply(boot, fields.get(b"n", b""))
            self._cursors[stream] = number
            yield

    async def _share_use(self, limited: list[TokenLimits]) -> None:
        """Tell what keys have used here, and hear what they have used at other gateways."""
        first = self._turn % len(limited)
        turn = [(limits, *limits.totals()) for limits in (limited[first:] + limited[:first])[:LIMITS_AT_ONCE]]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for limits, day, totals in turn:
                name = b"seamark:used:1:%d:%b" % (day, xxh3_128_hexdigest(limits.name.encode()).encode())
                if limits.is_used:
                    pipeline.hset(name, self._field, totals)
                    pipeline.expire(name, DAY)
                pipeline.hgetall(name)
            replies = [each for each in await pipeline.execute() if isinstance(each, dict)]
        await self._idle.finish(self._hear_all(zip(turn, replies, strict=True)))
        self._turn = first + len(turn)

    def _hear_all(self, answers: Iterable[tuple[tuple[TokenLimits, int, bytes], dict[bytes, bytes]]]) -> Steps[None]:
        """What one key has used in each step."""
        for (limits, day, _), told in answers:
            limits.hear(day, [totals for field, totals in told.items() if field != self._field])
            yield

    def _take(self) -> None:
        """Sort waiting events by stream, as many as one exchange takes."""
        taken = sum(map(len, self._outgoing.values()))
        while self._waiting and taken < WRITE_RECORDS:
            boot, event = self._waiting.popleft()
            stream = POSITIONS_STREAM if boot is None else holdings_stream(boot)
            records = event if boot is None else self._not_repeated(stream, event)
            # Others would refuse the whole batch, and what no record can hold would keep all later ones from going out.
            if records := [record for record in records if record[-1] <= MAX_TOKENS]:
                self._outgoing.setdefault(stream, []).extend(records)
                taken += len(records)

    def _not_repeated(self, stream: bytes, event: Sequence[StreamRecord]) -> Iterable[StreamRecord]:
        """Records about a worker, without those of prefixes it holds that were written lately."""
        now = time.monotonic()
        for record in event:
            kind, key, _ = record
            if kind == GONE:
                self._written.pop((stream, key), None)
            elif kind == HELD:
                if now - self._written.get((stream, key), -REPEAT_SECONDS) < REPEAT_SECONDS:
                    continue
                self._written[stream, key] = now
            yield record

    def _apply(self, boot: str | None, raw: bytes) -> None:
        """Put another gateway's batch into the tables."""
        batch = unpack(raw, of_positions=boot is None)
        if batch is None:
            self._refused.inc()
            return
        if batch.writer == self._writer:
            return
        self._writers[batch.writer] = None
        for kind, key, tokens in batch.records:
            if boot is None:
                self._positions.put_remote(key, tokens)
            elif kind == HELD:
                self._prefix_index.record_remote(key, tokens, boot)
            elif kind == KEPT:
                self._stored.keep_remote(key, boot)
            else:
                self._prefix_index.forget((key,), boot, remote=True)
        self._heard.inc(len(batch.records))

    def _start_over(self) -> None:
        """Redis may be another one now, or empty: read all of it, and write again what was written.

        The writer gets a new name, so that this gateway's own earlier records are applied in order with the others'.
        """
        self._writer = secrets.token_bytes(WRITER_BYTES)
        self._cursors.clear()
        self._written: FIFOCache[tuple[bytes, bytes], float] = FIFOCache(WRITTEN_LATELY)  # when, by stream and key

    def _answered(self) -> None:
        self._failures = 0
        if self.state != "up":
            self.state = "up"
            self._up.set(1)
            logger.info("redis is up")

    def _failed(self, error: Exception) -> float:
        """Count an error. Returns the seconds until the next try."""
        self._errors.inc()
        self._failures += 1
        if self._failures < ERRORS_TO_DOWN and self.state != "down":
            return INTERVAL_SECONDS
        if self.state != "down":
            self.state = "down"
            self._up.set(0)
            # The kind alone: the text might hold the address, and with it a password.
            logger.warning("redis is down (%s); what is learnt is not shared", type(error).__name__)
            self._start_over()
        return RETRY_SECONDS
