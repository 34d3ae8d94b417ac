"""What gateways write to Redis, how often, and what they take from each other; and when Redis counts as down.

Redis is a stand-in here that can fail when a test wants it to; `tests/gateway/test_redis_sync.py` has a real one.
"""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary
from proxy.boundaries.positions import PositionCache
from proxy.chat.responses import StoredResponses
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.routing import redis_sync
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.redis_sync import (
    ERRORS_TO_DOWN,
    HELD,
    HOLDINGS,
    INTERVAL_SECONDS,
    POSITIONS,
    POSITIONS_STREAM,
    READ_ENTRIES,
    REPEAT_SECONDS,
    RETRY_SECONDS,
    WRITER_SECONDS,
    RedisSync,
    holdings_stream,
    pack,
    unpack,
)
from tests.harness.virtual_time import on_virtual_time

BOOT, OTHER_BOOT = "a#1", "b#1"

STREAM, OTHER_STREAM = holdings_stream(BOOT), holdings_stream(OTHER_BOOT)

FOREIGN = b"another!"  # a writer


class Redis:
    """Streams, as far as gateways use them."""

    def __init__(self) -> None:
        self.streams: dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]] = {}
        self.asked: list[tuple[Any, ...]] = []  # all commands that were executed
        self.connected: dict[str, Any] = {}
        self.failures: list[Exception] = []  # for the next exchanges
        self.exchanged_at: list[float] = []  # by the event loop's clock
        self.is_closed = False
        self._last = 0

    def from_url(self, url: str, **named: Any) -> Redis:
        self.connected = {"url": url, **named}
        return self

    def pipeline(self, transaction: bool) -> _Pipeline:
        assert not transaction
        return _Pipeline(self)

    async def aclose(self) -> None:
        self.is_closed = True

    def add(self, stream: bytes, raw: bytes) -> bytes:
        self._last += 1
        number = b"%d-0" % self._last
        self.streams.setdefault(stream, []).append((number, {b"n": raw}))
        return number

    def read(self, cursors: dict[bytes, bytes], count: int) -> list[tuple[bytes, list[Any]]]:
        def later(stream: bytes, cursor: bytes) -> list[Any]:
            after = int(cursor.split(b"-")[0])
            return [each for each in self.streams.get(stream, ()) if int(each[0].split(b"-")[0]) > after][:count]

        return [(stream, found) for stream, cursor in cursors.items() if (found := later(stream, cursor))]

    def commands(self, name: str) -> list[tuple[Any, ...]]:
        """What was executed of this name since the last call."""
        found = [each[1:] for each in self.asked if each[0] == name]
        self.asked = [each for each in self.asked if each[0] != name]
        return found

    def written(self) -> dict[bytes, list[list[tuple[Any, ...]]]]:
        """The records of each new entry, by stream."""
        found: dict[bytes, list[list[tuple[Any, ...]]]] = {}
        for stream, fields, *_ in self.commands("xadd"):
            batch = unpack(POSITIONS if stream == POSITIONS_STREAM else HOLDINGS, fields[b"n"])
            assert batch is not None
            found.setdefault(stream, []).append(list(batch.records))
        return found


class _Pipeline:
    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._queued: list[tuple[Any, ...]] = []

    async def __aenter__(self) -> _Pipeline:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._queued.clear()

    def xadd(self, stream: bytes, fields: dict[bytes, bytes], maxlen: int, approximate: bool) -> None:
        self._queued.append(("xadd", stream, fields, maxlen, approximate))

    def expire(self, stream: bytes, seconds: int) -> None:
        self._queued.append(("expire", stream, seconds))

    def xread(self, cursors: dict[bytes, bytes], count: int) -> None:
        self._queued.append(("xread", dict(cursors), count))

    async def execute(self) -> list[Any]:
        self._redis.exchanged_at.append(asyncio.get_running_loop().time())
        if self._redis.failures:
            raise self._redis.failures.pop(0)
        self._redis.asked += self._queued
        answers: list[Any] = []
        for name, *given in self._queued:
            if name == "xadd":
                answers.append(self._redis.add(given[0], given[1][b"n"]))
            elif name == "expire":
                answers.append(1)
            else:
                answers.append(self._redis.read(*given))
        return answers


class Gateway:
    """The tables of one, and what it exchanges."""

    def __init__(self, *boots: str) -> None:
        self.index, self.positions, self.stored = PrefixIndex(10**6), PositionCache(10**6), StoredResponses(10**6)
        self.metrics = Metrics()
        self.boots = list(boots)
        self.sync = RedisSync(
            "redis://r", self.index, self.positions, self.stored, self.metrics, IdleWork(), lambda: self.boots
        )

    async def exchange(self) -> bool:
        return await self.sync._exchange()

    def holds(self, key: bytes, tokens: int = 320, boot: str = BOOT) -> None:
        """Its worker is found to hold a prefix."""
        self.index.record((Boundary("system", key, "first:1", tokens=tokens),), boot)
        self.index.set_held(key, boot, tokens)

    def news(self, fate: str) -> float | None:
        return self.metrics.registry.get_sample_value("seamark_redis_news_total", {"fate": fate})

    @property
    def up(self) -> float | None:
        return self.metrics.registry.get_sample_value("seamark_redis_up")

    @property
    def errors(self) -> float | None:
        return self.metrics.registry.get_sample_value("seamark_redis_errors_total")


@pytest.fixture
def redis(monkeypatch) -> Redis:
    redis = Redis()
    monkeypatch.setattr(redis_sync, "Redis", redis)
    return redis


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """The time that gateways see; it stands still until a test moves it on."""
    found = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(redis_sync, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def holding(number: int) -> bytes:
    """What another gateway writes of a prefix."""
    return pack(HOLDINGS, FOREIGN, [(HELD, key(number), 160)])


async def test_of_an_own_entry_nothing_is_taken_and_of_garbage_nothing_but_its_number(redis, clock):
    one = Gateway(BOOT)
    one.holds(key(1))
    await one.exchange()
    one.index.forget([key(1)], BOOT, remote=True)
    for raw in (b"", b"garbage", pack(POSITIONS, FOREIGN, [(key(5), 9)])):
        redis.add(STREAM, raw)
    redis.streams[STREAM].append((b"90-0", {b"other": b"field"}))
    redis.streams[STREAM].append((b"91-0", {b"n": holding(2)}))
    await one.exchange()
    await one.exchange()
    assert one.index.holds(key(1), BOOT) == 0 and one.index.holds(key(2), BOOT) == 160
    assert (one.news("heard"), one.news("refused")) == (1, 4)


async def test_of_more_gateways_than_are_counted_those_that_are_stay_so_while_they_write(redis, clock, monkeypatch):
    monkeypatch.setattr(redis_sync, "MOST_WRITERS", 2)
    monkeypatch.setattr(redis_sync, "GATEWAYS_AT_ONCE", 1)
    one = Gateway(BOOT)

    async def heard(*writers: bytes) -> None:
        for name in writers:
            redis.add(STREAM, pack(HOLDINGS, name * 8, [(HELD, key(1), 160)]))
        await one.exchange()

    await heard(b"a", b"b", b"c", b"d")
    clock.now += WRITER_SECONDS - 1
    await heard(b"a")
    clock.now += 2  # only that one was heard within a minute
    written = []
    for tokens, passed in enumerate((0.0, 2 * INTERVAL_SECONDS - 0.001, 0.002), 1):
        clock.now += passed
        one.positions.put(key(1), tokens)
        await one.exchange()
        written.append(bool(redis.written()))
    assert written == [True, False, True]


async def test_what_was_written_lately_is_remembered_within_bounds_the_oldest_forgotten_first(
    redis, clock, monkeypatch
):
    monkeypatch.setattr(redis_sync, "WRITTEN_LATELY", 2)
    one = Gateway(BOOT)

    async def is_written(number: int, seconds: float = 1.0) -> bool:
        clock.now += seconds
        one.holds(key(number))
        await one.exchange()
        return bool(redis.written())

    assert await is_written(1) and await is_written(2) and not await is_written(1)
    assert await is_written(3)  # 1 is forgotten
    assert not await is_written(2) and await is_written(1)  # and now 2
    assert not await is_written(3)
    assert await is_written(3, REPEAT_SECONDS) and await is_written(2)  # 1 was written before 3 was once more
    assert not await is_written(3)


async def test_what_waits_while_redis_is_away_is_bounded_and_the_oldest_is_dropped_and_counted(
    redis, clock, monkeypatch
):
    monkeypatch.setattr(redis_sync, "WAITING_EVENTS", 2)
    one = Gateway(BOOT)
    for number in range(1, 3):
        one.holds(key(number))
    assert (one.news("dropped"), one.sync.status()["waiting"]) == (0, 2)
    one.holds(key(3))
    assert (one.news("dropped"), one.sync.status()["waiting"]) == (1, 2)
    await one.exchange()
    assert redis.written() == {STREAM: [[(HELD, key(2), 320), (HELD, key(3), 320)]]}


@on_virtual_time
async def test_exchanges_follow_each_other_as_much_is_new_and_rarely_where_redis_is_down() -> None:
    redis = Redis()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(redis_sync, "Redis", redis)
        one = Gateway(BOOT)
        for number in range(READ_ENTRIES):
            redis.add(STREAM, holding(number))
        running = asyncio.create_task(one.sync.run())
        await asyncio.sleep(1.5 * INTERVAL_SECONDS)
        redis.failures += [OSError()] * (ERRORS_TO_DOWN + 1)
        await asyncio.sleep(2.5 * RETRY_SECONDS)
        running.cancel()
    at = redis.exchanged_at
    rests = [round(later - sooner, 6) for sooner, later in itertools.pairwise(at)][: ERRORS_TO_DOWN + 4]
    assert rests == [0.005, 0.05, *[0.05] * ERRORS_TO_DOWN, 2.0, 2.0]
    assert one.sync.state == "up" and one.errors == ERRORS_TO_DOWN + 1
