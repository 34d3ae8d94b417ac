"""What a broken or hostile Redis answers is refused before anything is built of it, and costs no more than hits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import RedisError

from proxy.boundaries.positions import PositionCache
from proxy.chat.responses import StoredResponses
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.routing import redis_sync
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.redis_answers import MOST_BYTES, MOST_LINES, AnswerTooLarge
from proxy.routing.redis_sync import (
    POSITIONS,
    POSITIONS_STREAM,
    READ_ENTRIES,
    RedisSync,
    pack,
)
from tests.harness.waiting import until

NOTHING = b"*-1\r\n"


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, Redis answers in time."""
    monkeypatch.setattr(redis_sync, "CONNECT_SECONDS", 30.0)
    monkeypatch.setattr(redis_sync, "ANSWER_SECONDS", 30.0)


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[RedisSync]:
    """Exchanges with a Redis that answers this to `XREAD`, piece by piece, and is well else."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while asked := await reader.read(65536):
                if b"XREAD" not in asked.upper():
                    writer.write(b"+OK\r\n" * max(1, asked.count(b"CLIENT")))
                    continue
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tables = PrefixIndex(10**6), PositionCache(10**6), StoredResponses(0)
        sync = RedisSync(url, *tables, Metrics(), IdleWork(), lambda: ["w#1"])
        try:
            yield sync
        finally:
            await sync.aclose()


def bulk(content: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(content), content)


def entries_of(stream: bytes, *entries: tuple[bytes, bytes]) -> bytes:
    told = b"".join(b"*2\r\n" + bulk(name) + b"*2\r\n" + bulk(b"n") + bulk(raw) for name, raw in entries)
    return b"*1\r\n*2\r\n" + bulk(stream) + b"*%d\r\n" % len(entries) + told


def record(number: int) -> bytes:
    return pack(POSITIONS, b"w" * 8, [(number.to_bytes(16, "big"), 9)])


@pytest.mark.parametrize(
    "pieces",
    [
        (b"*2000000000\r\n",),
        (b"*", b"3", b"0", b"0", b"0", b"0", b"0\r", b"\n"),
        (b"%4000000000\r\n",),
        (b"*1\r\n$8000000000\r\n", *[b"x" * 2**18] * (MOST_BYTES // 2**18 + 1)),
        (b"*9999\r\n", *[b"*2\r\n:1\r\n:1\r\n" * 1000] * (MOST_LINES // 1000)),
        (b"+" + b"x" * MOST_BYTES, b"x"),
    ],
    ids=["array", "drip", "map", "bulk", "lines", "word"],
)
async def test_an_answer_beyond_all_bounds_is_refused(pieces):
    async with answering(*pieces) as sync:
        with pytest.raises(AnswerTooLarge):
            await sync._exchange()


@pytest.mark.parametrize(
    "answer",
    [
        b"*1\r\n" * 100_000,
        b":" + b"9" * 5000 + b"\r\n",
        entries_of(b"another", (b"1-1", record(1))) + NOTHING,
        entries_of(POSITIONS_STREAM, (b"1\r\nFLUSHALL\r\n", record(1))) + NOTHING,
        entries_of(POSITIONS_STREAM, *[(b"1-%d" % n, record(n)) for n in range(READ_ENTRIES + 1)]) + NOTHING,
    ],
    ids=["deep", "digits", "stream", "name", "entries"],
)
async def test_what_no_redis_answers_is_an_error_and_changes_nothing(answer):
    async with answering(answer) as sync:
        with pytest.raises((RedisError, ValueError, TypeError, KeyError, AttributeError, RecursionError)):
            await sync._exchange()
        assert not sync._writers and set(sync._cursors.values()) <= {b"0"}


async def test_it_is_said_once_and_counted_and_a_redis_that_is_well_again_is_heard(caplog, monkeypatch):
    monkeypatch.setattr(redis_sync, "RETRY_SECONDS", 0.0)
    async with answering(b"*2000000000\r\n") as sync:
        running = asyncio.create_task(sync.run())
        await until(lambda: sync._failures > 5)
        running.cancel()
        assert sync.state == "down"
        assert [each.getMessage() for each in caplog.records if "redis" in each.name] == [
            "redis is down (AnswerTooLarge); what is learnt is not shared"
        ]
