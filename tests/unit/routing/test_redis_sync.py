"""What gateways share through Redis, when it counts as down, and what a hostile one costs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from redis.exceptions import RedisError

from proxy.boundaries.boundary import Boundary
from proxy.boundaries.positions import PositionCache
from proxy.chat.responses import StoredResponses
from proxy.errors import KeyBusy
from proxy.http import token_limits
from proxy.http.auth import KeyRing
from proxy.http.token_limits import DAY, MINUTE, Charge
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.routing import redis_sync
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.redis_sync import (
    ERRORS_TO_DOWN,
    GONE,
    HELD,
    MOST_BYTES,
    MOST_LINES,
    PLACED,
    POSITIONS_STREAM,
    AnswerTooLarge,
    pack,
    unpack,
)
from tests.harness.api_keys import entry
from tests.harness.virtual_time import VirtualTimeLoop, on_virtual_time
from tests.harness.waiting import until

BOOTS = BOOT, OTHER_BOOT = "a#1", "b#1"

STREAM = redis_sync.holdings_stream(BOOT)

FOREIGN = b"-another"  # a writer that is no gateway here


class Redis:
    """Streams and hashes, as far as gateways use them."""

    def __init__(self) -> None:
        self.streams: dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]] = {}
        self.hashes: defaultdict[bytes, dict[bytes, bytes]] = defaultdict(dict)
        self.failures: list[Exception] = []  # of the next exchanges
        self.answers_get_lost = False  # what was asked for is done all the same
        self.exchanged_at: list[float] = []  # by the event loop's clock
        self._last = 0

    def from_url(self, url: str, **named: Any) -> Redis:
        return self

    def pipeline(self, transaction: bool) -> _Pipeline:
        assert not transaction
        return _Pipeline(self)

    async def aclose(self) -> None:
        """Nothing is open."""

    def add(self, stream: bytes, raw: bytes, name: bytes = b"n") -> None:
        self._last += 1
        self.streams.setdefault(stream, []).append((b"%d-0" % self._last, {name: raw}))

    def read(self, cursors: dict[bytes, bytes], count: int) -> list[tuple[bytes, list[Any]]]:
        assert count == (
            redis_sync.READ_ENTRIES if POSITIONS_STREAM in cursors else redis_sync.READ_ENTRIES // len(cursors)
        )

        def later(stream: bytes, cursor: bytes) -> list[Any]:
            after = int(cursor.split(b"-")[0])
            return [each for each in self.streams.get(stream, ()) if int(each[0].split(b"-")[0]) > after][:count]

        return [(stream, found) for stream, cursor in cursors.items() if (found := later(stream, cursor))]


class _Pipeline(contextlib.AsyncExitStack):
    def __init__(self, redis: Redis) -> None:
        super().__init__()
        self._redis = redis
        self._asked: list[tuple[Any, ...]] = []
        self._endless: set[bytes] = set()

    def xadd(self, stream: bytes, fields: dict[bytes, bytes], maxlen: int, approximate: bool) -> None:
        assert (maxlen, approximate) == (redis_sync.STREAM_ENTRIES, True)
        self._endless.add(stream)
        self._asked.append((self._redis.add, stream, fields[b"n"]))

    def expire(self, stream: bytes, seconds: int) -> None:
        assert seconds == (DAY if stream.startswith(b"seamark:used:") else redis_sync.STREAM_SECONDS)
        self._endless.discard(stream)

    def xread(self, cursors: dict[bytes, bytes], count: int) -> None:
        self._asked.append((self._redis.read, dict(cursors), count))

    def hset(self, name: bytes, field: bytes, value: bytes) -> None:
        self._endless.add(name)
        self._asked.append((lambda: self._redis.hashes[name].update({field: value, FOREIGN: b"garbage"}),))

    def hgetall(self, name: bytes) -> None:
        self._asked.append((lambda: dict(self._redis.hashes[name]),))

    async def execute(self) -> list[Any]:
        assert not self._endless, "what is written expires"
        self._redis.exchanged_at.append(asyncio.get_running_loop().time())
        if self._redis.failures and not self._redis.answers_get_lost:
            raise self._redis.failures.pop(0)
        answers = [ask(*given) for ask, *given in self._asked]
        if self._redis.failures:
            raise self._redis.failures.pop(0)
        return answers


class Gateway:
    def __init__(self, *boots: str, url: str = "redis://r", keys: KeyRing | None = None) -> None:
        self.index, self.positions, self.stored = PrefixIndex(10**6), PositionCache(10**6), StoredResponses(10**6)
        self.metrics, self.boots = Metrics(), list(boots)
        tables = self.index, self.positions, self.stored
        self.sync = redis_sync.RedisSync(url, *tables, self.metrics, IdleWork(), lambda: self.boots, keys)

    def holds(self, key: bytes, tokens: int = 320, boot: str = BOOT) -> None:
        self.index.record((Boundary("system", key, "first:1", tokens=tokens),), boot)
        self.index.set_held(key, boot, tokens)

    async def exchange(self) -> None:
        await self.sync._exchange()

    def news(self, fate: str) -> float:
        return self.metrics.redis_news.labels(fate)._value.get()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


RESPONSES = {number: StoredResponses(0).keep(f"r{number}", BOOT, None) for number in range(1, 5)}  # their names


class Known:
    """A gateway as the model has it. By stream: its worker, "" for that of positions."""

    def __init__(self) -> None:
        self.lengths: dict[bytes, int] = {}
        self.held: dict[tuple[str, bytes], int] = {}
        self.positions: dict[bytes, int] = {}
        self.kept: dict[bytes, str] = {}
        self.waiting: list[tuple[str, tuple[Any, ...]]] = []
        self.written: dict[tuple[str, bytes], float] = {}
        self.read: dict[str, int] = {}
        self.outgoing: dict[str, list[tuple[Any, ...]]] = {}  # not known to be written
        self.name = self.failures = 0  # a gateway has another name once Redis was down
        self.is_down = False
        self.news: Counter[str] = Counter()


class Sharing(RuleBasedStateMachine):
    """Three gateways before two workers; each exchange takes place a second after the one before."""

    gateway = st.integers(0, 2)
    boot = st.sampled_from(BOOTS)
    number = st.integers(1, 4)

    def __init__(self) -> None:
        super().__init__()
        self.redis, self.now, self.patch, self.loop = Redis(), 1000.0, pytest.MonkeyPatch(), VirtualTimeLoop()
        self.patch.setattr(redis_sync, "Redis", self.redis)
        self.patch.setattr(redis_sync, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.gateways = [Gateway(*BOOTS) for _ in range(3)]
        self.known = [Known() for _ in range(3)]
        # By stream ("" is that of positions): entries, with whose they are and under which name. None: garbage.
        self.log: dict[str, list[tuple[tuple[int, int], list[tuple[Any, ...]] | None]]] = {
            "": [],
            **{b: [] for b in BOOTS},
        }

    def teardown(self) -> None:
        self.patch.undo()
        self.loop.close()

    @rule(at=gateway, number=number, boot=boot)
    def holds(self, at: int, number: int, boot: str) -> None:
        tokens, model = 100 * (at + 1), self.known[at]
        self.gateways[at].holds(key(number), tokens, boot)
        model.lengths.setdefault(key(number), tokens)
        model.held[boot, key(number)] = tokens
        model.waiting.append((boot, (HELD, key(number), tokens)))

    @rule(at=gateway, boot=boot)
    def holds_what_no_prompt_has(self, at: int, boot: str) -> None:
        """It keeps nothing else from going out."""
        self.gateways[at].holds(key(99), redis_sync.MAX_TOKENS + 1, boot)
        self.gateways[at].positions.put(key(99), redis_sync.MAX_TOKENS + at + 1)

    @rule(at=gateway, numbers=st.sets(number), boot=boot)
    def loses(self, at: int, numbers: set[int], boot: str) -> None:
        model = self.known[at]
        lost = [key(number) for number in sorted(numbers) if model.held.pop((boot, key(number)), 0)]
        self.gateways[at].index.forget(map(key, sorted(numbers)), boot)
        model.waiting += [(boot, (GONE, each, 0)) for each in lost]

    @rule(at=gateway, number=number)
    def finds_a_position(self, at: int, number: int) -> None:
        tokens, model = 16 * (at + 1), self.known[at]
        self.gateways[at].positions.put(key(number), tokens)
        if model.positions.get(key(number)) != tokens:
            model.waiting.append(("", (PLACED, key(number), tokens)))
        model.positions[key(number)] = tokens

    @rule(at=gateway, number=number, boot=boot)
    def stores_a_response(self, at: int, number: int, boot: str) -> None:
        name, model = self.gateways[at].stored.keep(f"r{number}", boot, None), self.known[at]
        assert name is not None
        if model.kept.get(name) != boot:
            model.waiting.append((boot, (redis_sync.KEPT, name, 0)))
        model.kept[name] = boot

    @rule(at=gateway, boots=st.sampled_from([(), (BOOT,), (OTHER_BOOT,), BOOTS]))
    def has_workers(self, at: int, boots: tuple[str, ...]) -> None:
        self.gateways[at].boots = list(boots)

    @rule(stream=st.sampled_from(["", *BOOTS]), kind=st.integers(0, 3))
    def gets_garbage(self, stream: str, kind: int) -> None:
        other = pack(FOREIGN, [(PLACED, key(5), 9)]) if stream else pack(FOREIGN, [(HELD, key(5), 9)])
        raw, name = ((b"", b"n"), (b"garbage", b"n"), (other, b"n"), (b"x", b"else"))[kind]
        self.redis.add(redis_sync.holdings_stream(stream) if stream else POSITIONS_STREAM, raw, name)
        self.log[stream].append(((-1, 0), None))

    @rule(seconds=st.sampled_from([1.0, redis_sync.REPEAT_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(at=gateway, fails=st.sampled_from(["", "", "", "refused", "lost"]), times=st.sampled_from([1, 3]))
    def exchanges(self, at: int, fails: str, times: int) -> None:
        sync, model = self.gateways[at].sync, self.known[at]
        for _ in range(times if fails else 1):
            self.now += 1.0
            self._take(model)
            model.read = {each: model.read.get(each, 0) for each in ("", *self.gateways[at].boots)}
            if fails != "refused":
                for stream, records in model.outgoing.items():
                    parts = [
                        records[start : start + redis_sync.MAX_RECORDS]
                        for start in range(0, len(records), redis_sync.MAX_RECORDS)
                    ]
                    self.log[stream] += [((at, model.name), part) for part in parts]
            self.redis.failures, self.redis.answers_get_lost = [OSError()] * bool(fails), fails == "lost"
            if fails:
                with pytest.raises(OSError):  # noqa: PT011
                    self.loop.run_until_complete(sync._exchange())
                sync._failed(OSError())
                model.failures += 1
                if model.failures >= ERRORS_TO_DOWN and not model.is_down:
                    model.is_down, model.name, model.read, model.written = True, model.name + 1, {}, {}
                continue
            while self.loop.run_until_complete(sync._exchange()):
                pass
            sync._answered()
            model.failures, model.is_down = 0, False
            model.news["sent"] += sum(map(len, model.outgoing.values()))
            model.outgoing = {}
            for stream, seen in model.read.items():
                model.read[stream] = len(self.log[stream])
                for whose, records in self.log[stream][seen:]:
                    if whose != (at, model.name):
                        self._hears(model, stream, records)

    def _take(self, model: Known) -> None:
        for boot, record in model.waiting:
            about = boot, record[1]
            if record[0] == GONE:
                model.written.pop(about, None)
            elif record[0] == HELD:
                if self.now - model.written.get(about, 0.0) < redis_sync.REPEAT_SECONDS:
                    continue
                model.written[about] = self.now
            model.outgoing.setdefault(boot, []).append(record)
        model.waiting = []

    def _hears(self, model: Known, boot: str, records: list[tuple[Any, ...]] | None) -> None:
        model.news["refused" if records is None else "heard"] += len(records or "x")
        for kind, name, tokens in records or ():
            if not boot:
                model.positions.setdefault(name, tokens)
            elif kind == redis_sync.KEPT:
                model.kept[name] = boot
            elif kind == GONE:
                model.held.pop((boot, name), None)
            else:  # a length that is known here stands
                length = model.lengths.setdefault(name, tokens)
                model.held.setdefault((boot, name), length)

    @invariant()
    def gateways_know_what_they_learnt_and_read_and_redis_has_what_each_learnt_itself(self) -> None:
        for gateway, model in zip(self.gateways, self.known, strict=True):
            for number in range(1, 5):
                for boot in BOOTS:
                    assert gateway.index.holds(key(number), boot) == model.held.get((boot, key(number)), 0)
                assert gateway.positions.get(key(number)) == model.positions.get(key(number), 0)
                assert gateway.stored.boot(f"r{number}") == model.kept.get(RESPONSES[number])
            for fate in ("sent", "heard", "refused"):
                assert gateway.news(fate) == model.news[fate]
            assert gateway.metrics.redis_up._value.get() == (gateway.sync.state == "up")
            assert (gateway.sync.state == "down") is model.is_down
        for stream, entries in self.log.items():
            found = self.redis.streams.get(redis_sync.holdings_stream(stream) if stream else POSITIONS_STREAM, [])
            raws = [fields.get(b"n", b"") for _, fields in found[-8:]]  # those before were looked at
            batches = [unpack(raw, of_positions=not stream) for raw in raws]
            assert [each and list(each.records) for each in batches] == [records for _, records in entries[-8:]]
            assert len(found) == len(entries)


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=40, stateful_step_count=25)


WINDOWS = {"minute": (100, MINUTE), "day": (250, DAY)}  # tokens that the key may use in so many seconds


class SharedLimits(RuleBasedStateMachine):
    """What three gateways let one key use together: as much as one would, and what they had not heard of each other."""

    gateway = st.integers(0, 2)
    tokens = st.sampled_from([0, 1, 30, 90, 400])

    def __init__(self) -> None:
        super().__init__()
        self.redis, self.now, self.patch, self.loop = Redis(), 1000.0 * DAY, pytest.MonkeyPatch(), VirtualTimeLoop()
        self.number = {per: self.now // seconds for per, (_, seconds) in WINDOWS.items()}  # of the one that is running
        self.patch.setattr(token_limits, "time", SimpleNamespace(time=lambda: self.now))
        self.patch.setattr(redis_sync, "Redis", self.redis)
        with TemporaryDirectory() as folder:
            (path := Path(folder, "keys")).write_text(entry("ann", tokens_per_minute=100, tokens_per_day=250))
            self.rings = [KeyRing(path, None) for _ in range(3)]
        self.gateways = [Gateway(keys=ring) for ring in self.rings]
        self.open: list[list[tuple[Charge, int, dict[str, float]]]] = [[], [], []]  # with its estimate, and since when
        self.own, self.told, self.heard = ({per: [0, 0, 0] for per in WINDOWS} for _ in range(3))  # by gateway

    def teardown(self) -> None:
        self.patch.undo()
        self.loop.close()

    @rule(at=gateway, tokens=tokens, output=st.sampled_from([0, 10]))
    def is_asked(self, at: int, tokens: int, output: int) -> None:
        charge, estimate = Charge(self.rings[at].limited["ann"]), max(1, tokens + output)
        held = {per: min(estimate, limit) for per, (limit, _) in WINDOWS.items()}
        used = {per: self.own[per][at] + self.heard[per][at] + held[per] for per in WINDOWS}
        ends = {per: (self.number[per] + 1) * seconds for per, (_, seconds) in WINDOWS.items()}
        if short := [ends[per] for per, (limit, _) in WINDOWS.items() if used[per] > limit]:
            with pytest.raises(KeyBusy, match=r"tokens a (minute|day) left") as refused:
                charge.hold(tokens, 0, output)
            assert refused.value.retry_after == short[-1] - self.now
            return
        charge.hold(tokens, 0, output)
        self.open[at].append((charge, estimate, {**self.number}))
        for per, (limit, _) in WINDOWS.items():
            self.own[per][at] += held[per]
            assert self.own[per][at] + self.heard[per][at] <= limit  # beyond it goes what it has not heard of

    @rule(at=gateway, tokens=tokens)
    def has_answered(self, at: int, tokens: int) -> None:
        if self.open[at]:
            charge, estimate, since = self.open[at].pop(0)
            for _ in range(2):
                charge.settle(tokens, 0, 0)
            for per, (limit, _) in WINDOWS.items():
                more = tokens - min(estimate, limit)
                self.own[per][at] += more if since[per] == self.number[per] else max(0, more)

    @rule(seconds=st.sampled_from([-3 * DAY, -1, 1, 20, MINUTE, DAY]))
    def time_passes(self, seconds: int) -> None:
        """Where a clock is set back, no window begins once more, unless it was wrong by more than that."""
        self.now += seconds
        for per, (_, length) in WINDOWS.items():
            if not 0 <= self.number[per] - self.now // length <= 1:
                self.number[per] = self.now // length
                self.own[per], self.told[per], self.heard[per] = [0, 0, 0], [0, 0, 0], [0, 0, 0]

    @rule(at=gateway, fails=st.sampled_from(["", "", "refused", "lost"]))
    def exchanges(self, at: int, fails: str) -> None:
        self.redis.failures, self.redis.answers_get_lost = [OSError()] * bool(fails), fails == "lost"
        with pytest.raises(OSError) if fails else contextlib.nullcontext():  # noqa: PT011
            self.loop.run_until_complete(self.gateways[at].sync._share_use([*self.rings[at].limited.values()]))
        for per in WINDOWS if fails != "refused" else ():
            self.told[per][at] = max(0, self.own[per][at])
        for per in WINDOWS if not fails else ():
            self.heard[per][at] = sum(self.told[per]) - self.told[per][at]

    @rule()
    def redis_is_emptied(self) -> None:
        self.redis.hashes.clear()
        self.told = {per: [0, 0, 0] for per in WINDOWS}

    @invariant()
    def each_counts_its_own_and_what_it_has_heard(self) -> None:
        for at, ring in enumerate(self.rings):
            for window in ring.limited["ann"].now():
                assert (window.own, window.others) == (self.own[window.per][at], self.heard[window.per][at])


TestSharedLimits = SharedLimits.TestCase
TestSharedLimits.settings = settings(max_examples=40, stateful_step_count=30)


async def test_what_waits_while_redis_is_away_is_bounded_and_the_oldest_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(redis_sync, "WAITING_EVENTS", 2)
    monkeypatch.setattr(redis_sync, "Redis", redis := Redis())
    one = Gateway(BOOT)
    for number in range(1, 3):
        one.holds(key(number))
    assert (one.news("dropped"), one.sync.status()["waiting"]) == (0, 2)
    one.holds(key(3))
    assert (one.news("dropped"), one.sync.status()["waiting"]) == (1, 2)
    await one.exchange()
    ((_, fields),) = redis.streams[STREAM]
    assert unpack(fields[b"n"]).records == ((HELD, key(2), 320), (HELD, key(3), 320))


async def test_there_is_more_to_come_while_as_much_waits_as_one_exchange_takes(monkeypatch):
    monkeypatch.setattr(redis_sync, "WRITE_RECORDS", 2)
    monkeypatch.setattr(redis_sync, "Redis", Redis())
    one = Gateway(BOOT)
    for number in range(4):
        one.holds(key(number))
    assert [await one.sync._exchange() for _ in range(2)] == [True, False]


@on_virtual_time
async def test_exchanges_follow_each_other_as_much_is_new_and_rarely_where_redis_is_down() -> None:
    redis = Redis()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(redis_sync, "Redis", redis)
        one = Gateway(BOOT)
        for number in range(redis_sync.READ_ENTRIES):
            redis.add(STREAM, pack(FOREIGN, [(HELD, key(number), 160)]))
        running = asyncio.create_task(one.sync.run())
        await asyncio.sleep(1.5 * redis_sync.INTERVAL_SECONDS)
        redis.failures += [OSError()] * (ERRORS_TO_DOWN + 1)
        await asyncio.sleep(2.5 * redis_sync.RETRY_SECONDS)
        running.cancel()
    at = redis.exchanged_at
    rests = [round(later - sooner, 6) for sooner, later in itertools.pairwise(at)][: ERRORS_TO_DOWN + 4]
    assert rests == [0.005, 0.05, *[0.05] * ERRORS_TO_DOWN, 2.0, 2.0]
    assert one.sync.state == "up" and one.metrics.redis_errors._value.get() == ERRORS_TO_DOWN + 1


RECORDS = {  # by whether they are of positions
    False: ((HELD, key(1), 160), (GONE, key(1), 0), (redis_sync.KEPT, key(1), 0)),
    True: ((PLACED, key(1), redis_sync.MAX_TOKENS),),
}


@pytest.mark.parametrize("of_positions", [False, True])
def test_batches_of_an_earlier_version_are_refused(of_positions):
    """Their keys name other things: the tokens of a prompt."""
    raw = pack(FOREIGN, RECORDS[of_positions])
    assert unpack(raw, of_positions=of_positions) is not None
    assert unpack(b"smh2" + raw[4:], of_positions=of_positions) is None  # for its magic alone


@pytest.mark.parametrize(
    ("of_positions", "record"),
    [
        (False, (HELD, key(1), 0)),
        (False, (GONE, key(1), 160)),
        (False, (redis_sync.KEPT, key(1), 160)),
        (False, (HELD, key(1), redis_sync.MAX_TOKENS + 1)),
        (False, (PLACED, key(1), 160)),
        (True, (PLACED, key(1), redis_sync.MAX_TOKENS + 1)),
        (True, (PLACED, key(1), 0)),
        (True, (HELD, key(1), 160)),
    ],
)
def test_one_record_that_cannot_be_makes_its_batch_none(of_positions, record):
    records = RECORDS[of_positions]
    sound = pack(FOREIGN, records)
    assert unpack(sound, of_positions=of_positions) == (FOREIGN, records)
    for raw in (pack(FOREIGN, (*records, record)), sound[:-1], sound + b"x", sound[:12]):
        assert unpack(raw, of_positions=of_positions) is None


NOTHING = b"*-1\r\n"


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, Redis answers in time."""
    monkeypatch.setattr(redis_sync, "CONNECT_SECONDS", 30.0)
    monkeypatch.setattr(redis_sync, "ANSWER_SECONDS", 30.0)


@asynccontextmanager
async def answering(*pieces: bytes) -> AsyncIterator[redis_sync.RedisSync]:
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
        sync = Gateway(BOOT, url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}").sync
        try:
            yield sync
        finally:
            await sync.aclose()


def entries_of(stream: bytes, *names: bytes) -> bytes:
    def bulk(content: bytes) -> bytes:
        return b"$%d\r\n%b\r\n" % (len(content), content)

    record = bulk(pack(b"w" * 8, [(PLACED, key(1), 9)]))
    told = b"".join(b"*2\r\n" + bulk(name) + b"*2\r\n" + bulk(b"n") + record for name in names)
    return b"*1\r\n*2\r\n" + bulk(stream) + b"*%d\r\n" % len(names) + told


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
        entries_of(b"another", b"1-1") + NOTHING,
        entries_of(POSITIONS_STREAM, b"1\r\nFLUSHALL\r\n") + NOTHING,
        entries_of(POSITIONS_STREAM, *(b"1-%d" % n for n in range(redis_sync.READ_ENTRIES + 1))) + NOTHING,
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
