"""Gateways that share what they learn through a real Redis, and what they do when it is dead, frozen, slow or full of
garbage."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest
import redis as redis_client

from proxy.bench.harness.servers import Server, Servers
from proxy.boundaries.boundary import Boundary
from proxy.boundaries.positions import PositionCache
from proxy.chat.responses import StoredResponses
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.routing import redis_sync
from proxy.routing.prefix_index import ENTRY_BYTES, PrefixIndex
from proxy.routing.redis_sync import RedisSync
from tests.harness.forked_gateways import GatewayForks
from tests.harness.gateways import chat, metric, post, start_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.redis_server import LateWay, RedisServer, late_way, redis_server
from tests.harness.waiting import until, wait_for

SECRET = "the lighthouse keeper's diary"

BOOT = "http://worker#1.7e+09"


# Seconds, in place of the defaults, which a busy machine alone may exceed. Three later answers in a row: Redis is down.
TIMES = {"CONNECT_SECONDS": 1.0, "ANSWER_SECONDS": 1.0, "RETRY_SECONDS": 0.2}

LATE_SECONDS = 3 * TIMES["ANSWER_SECONDS"]


@pytest.fixture(autouse=True)
def times(fleet: GatewayForks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gateways, and those of tables in this process, for which Redis is never too slow."""
    fleet.constants |= {f"{redis_sync.__name__}.{name}": seconds for name, seconds in TIMES.items()}
    for name, seconds in (TIMES | {"CONNECT_SECONDS": 30.0, "ANSWER_SECONDS": 30.0}).items():
        monkeypatch.setattr(redis_sync, name, seconds)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis_client.Redis]:
    with redis_client.Redis.from_url(server.url) as connected:
        yield connected


@pytest.fixture
def workers() -> Iterator[list[RecordingWorker]]:
    with recording_worker() as first, recording_worker() as second:
        yield [first, second]


def status(gateway: Server) -> dict:
    return httpx.get(gateway.url + "/seamark/status").json()


def sharing_gateway(fleet: Servers, workers: list[RecordingWorker], url: str) -> Server:
    gateway = start_gateway(fleet, *workers, flags=("--redis", url))
    wait_for(lambda: status(gateway)["redis"]["state"] == "up")
    return gateway


def news_count(gateway: Server, fate: str) -> float:
    return metric(gateway, f'seamark_redis_news_total{{fate="{fate}"}}')


def told_of_redis(gateway: Server) -> list[str]:
    """The gateway's log lines about Redis."""
    return [line for line in gateway.log.read_text().splitlines() if "redis" in line.lower()]


def test_a_prefix_learnt_by_one_gateway_is_known_to_the_other(fleet, workers, server):
    first, second = (sharing_gateway(fleet, workers, server.url) for _ in range(2))
    learnt = 0
    for number in range(4):  # four prefixes, spread over both workers
        body = chat(f"Tide {number}?")
        body["messages"][0] = {"role": "system", "content": f"You pilot ship {number}. " * 20}
        here = post(first, body)
        # Of each boundary its position, and that it is held. What the second learns of its own requests does not count.
        learnt += 2 * len(here.headers["x-seamark-boundary"].split(";"))
        wait_for(lambda n=learnt: news_count(second, "heard") == n)
        renders = sum(worker.renders for worker in workers)
        body["messages"][-1] = {"role": "user", "content": "And the wind?"}
        there = post(second, body)
        assert there.headers["x-seamark-worker"] == here.headers["x-seamark-worker"]
        assert int(there.headers["x-seamark-predicted"]) > 0
        assert sum(worker.renders for worker in workers) == renders
    assert all(worker.requests for worker in workers)
    assert told_of_redis(first)[0].endswith("redis is up") and len(told_of_redis(first)) == 1


def test_a_gateway_that_starts_later_reads_what_was_written_before(fleet, workers, server):
    first = sharing_gateway(fleet, workers, server.url)
    here = post(first, chat("Tide?"))
    wait_for(lambda: news_count(first, "sent") > 0 and status(first)["redis"]["waiting"] == 0)
    second = sharing_gateway(fleet, workers, server.url)
    wait_for(lambda: status(second)["directory_entries"] == status(first)["directory_entries"])
    wait_for(lambda: status(second)["known_positions"] == status(first)["known_positions"])
    there = post(second, chat("Wind?"))
    assert there.headers["x-seamark-worker"] == here.headers["x-seamark-worker"]
    assert int(there.headers["x-seamark-predicted"]) > 0


def test_news_of_a_worker_before_its_restart_is_not_read_after_it(fleet, workers, server):
    first = sharing_gateway(fleet, workers[:1], server.url)
    post(first, chat("Tide?"))
    wait_for(lambda: news_count(first, "sent") > 0 and status(first)["redis"]["waiting"] == 0)
    workers[0].boot = "1.8e+09"
    second = sharing_gateway(fleet, workers[:1], server.url)
    wait_for(lambda: status(second)["known_positions"] > 0)
    assert post(second, chat("Wind?")).headers["x-seamark-predicted"] == "0"


def test_redis_holds_no_text_and_nothing_without_an_end(fleet, workers, server, client):
    gateway = sharing_gateway(fleet, workers, server.url)
    body = chat(SECRET, tools=[{"type": "function", "function": {"name": "diary", "parameters": {}}}])
    body["messages"][0]["content"] = SECRET * 20
    assert post(gateway, body, headers={"authorization": "Bearer my-own-key"}).status_code == 200
    wait_for(lambda: news_count(gateway, "sent") > 0)
    wait_for(lambda: len(client.keys()) == 2)
    for key in client.scan_iter():
        assert 0 < client.ttl(key) <= redis_sync.STREAM_SECONDS
        held = key + b"".join(b"".join(fields.values()) for _, fields in client.xrange(key))
        for text in (SECRET, "diary", "my-own-key", "harbour", "127.0.0.1", *SECRET.split()):
            assert len(text) < 5 or text.encode() not in held


@contextmanager
def steady_traffic(gateway: Server) -> Iterator[list[str]]:
    """Requests one after the other until the end, each with a new prefix; yields what went wrong."""
    wrong, done = [], threading.Event()

    def drive() -> None:
        number = 0
        while not done.is_set():
            number += 1
            body = chat(f"Tide {number}?")
            body["messages"][0] = {"role": "system", "content": f"You pilot ship {number}. " * 20}
            try:
                answer = post(gateway, body)
            except httpx.HTTPError as error:
                wrong.append(type(error).__name__)
                continue
            if answer.status_code != 200 or "x-seamark-boundary" not in answer.headers:
                wrong.append(f"{answer.status_code} {answer.headers.get('x-seamark-boundary')}")

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield wrong
    finally:
        done.set()
        thread.join()


def killed(server: RedisServer, way: LateWay) -> None:
    server.kill()


def frozen(server: RedisServer, way: LateWay) -> None:
    server.freeze()


def full(server: RedisServer, way: LateWay) -> None:
    server.fill()


def slow(server: RedisServer, way: LateWay) -> None:
    way.seconds = LATE_SECONDS


BACK: dict[Callable, Callable] = {
    killed: lambda server, way: server.start(),
    frozen: lambda server, way: server.thaw(),
    full: lambda server, way: server.make_room(),
    slow: lambda server, way: setattr(way, "seconds", 0.0),
}


THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize("harm", [killed, *(pytest.param(each, marks=THOROUGH) for each in (frozen, slow, full))])
def test_redis_that_is_lost_costs_no_request_and_comes_back(fleet, workers, server, harm):
    with late_way(server.port) as way:
        first, second = (sharing_gateway(fleet, workers, (way if harm is slow else server).url) for _ in range(2))
        with steady_traffic(first) as wrong:
            wait_for(lambda: news_count(second, "heard") > 20)
            assert metric(first, "seamark_redis_up") == 1
            harm(server, way)
            wait_for(lambda: metric(first, "seamark_redis_up") == 0)
            assert status(first)["redis"]["state"] == "down"
            served = metric(first, "seamark_requests_total")
            wait_for(lambda: metric(first, "seamark_requests_total") > served + 20)
            BACK[harm](server, way)
            wait_for(lambda: all(metric(gateway, "seamark_redis_up") == 1 for gateway in (first, second)))
            heard = news_count(second, "heard")
            wait_for(lambda: news_count(second, "heard") > heard)
        assert wrong == []
        words = [line.split("seamark.redis ", 1)[1].split(" (")[0] for line in told_of_redis(first)]
        assert words == ["redis is up", "redis is down", "redis is up"]
        assert "Traceback" not in first.log.read_text()


@pytest.mark.parametrize("harm", [killed, pytest.param(frozen, marks=THOROUGH)])
def test_a_gateway_starts_and_serves_where_redis_never_answered(fleet, workers, server, harm):
    harm(server, None)
    gateway = start_gateway(fleet, *workers, flags=("--redis", server.url))
    with steady_traffic(gateway) as wrong:
        wait_for(lambda: status(gateway)["redis"]["state"] == "down")
        wait_for(lambda: metric(gateway, "seamark_requests_total") > 10)
    assert wrong == [] and metric(gateway, "seamark_redis_up") == 0
    assert len(told_of_redis(gateway)) == 1
    gateway.stop()
    assert gateway.process.returncode == -signal.SIGTERM  # not killed for taking too long


def test_without_redis_nothing_of_it_is_imported(fleet, workers):
    gateway = start_gateway(fleet, *workers)
    assert status(gateway)["redis"] == {"state": "off"}
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, proxy.server.app; print([name for name in sys.modules if 'redis' in name])",
        ],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert told.stdout.strip() == "[]"


def test_a_password_is_never_told(fleet, workers, server):
    url = server.url.replace("://", "://user:hunter2@")
    gateway = start_gateway(fleet, *workers, flags=("--redis", url))
    wait_for(lambda: status(gateway)["redis"]["state"] == "down")
    assert "hunter2" not in gateway.log.read_text() + json.dumps(status(gateway))
    assert "AuthenticationError" in told_of_redis(gateway)[0]


class Tables:
    """The tables of a gateway and its share in Redis, here in the test's own process."""

    def __init__(self, server: RedisServer, boot: str = BOOT, size: int = 2**26) -> None:
        self.prefix_index, self.positions, self.metrics = PrefixIndex(size), PositionCache(size), Metrics()
        self.redis_sync = RedisSync(
            server.url, self.prefix_index, self.positions, StoredResponses(0), self.metrics, IdleWork(), lambda: [boot]
        )

    async def exchange(self) -> None:
        """Until nothing is left to write or read, without the pauses between two writes."""
        more = True
        while more or self.redis_sync._waiting:
            self.redis_sync._next_write = 0.0
            more = await self.redis_sync._exchange()

    def count(self, fate: str) -> float:
        return self.metrics.registry.get_sample_value("seamark_redis_news_total", {"fate": fate})

    def hold(self, *numbers: int, tokens: int = 100) -> None:
        """The worker's engine has told that it holds these prefixes."""
        self.prefix_index.record([boundary(number, tokens) for number in numbers], BOOT)
        for number in numbers:
            self.prefix_index.set_held(key_of(number), BOOT, tokens)

    def holds(self, number: int) -> bool:
        return BOOT in self.prefix_index.longest([key_of(number)], [BOOT])


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def boundary(number: int, tokens: int = 100) -> Boundary:
    return Boundary("system", key_of(number), tokens, tokens)


async def test_what_a_worker_lost_is_news_too(server):
    one, other = Tables(server), Tables(server)
    one.hold(1, 2)
    one.prefix_index.forget([key_of(1)], BOOT)
    one.prefix_index.forget([key_of(number) for number in range(1000, 3000)], BOOT)
    await one.exchange()
    await other.exchange()
    assert not other.holds(1) and other.holds(2)
    one.hold(1)  # said lately, but forgotten since
    await one.exchange()
    await other.exchange()
    assert other.holds(1)


async def test_what_was_heard_is_not_told_on_and_ones_own_is_not_heard(server):
    one, other = Tables(server), Tables(server)
    one.hold(1)
    one.prefix_index.forget([key_of(1)], BOOT)
    one.positions.put(key_of(5), 64)
    await one.exchange()
    await one.exchange()
    await other.exchange()
    await other.exchange()
    assert (one.count("sent"), one.count("heard")) == (3, 0)
    assert (other.count("sent"), other.count("heard")) == (0, 3)
    assert other.positions.get(key_of(5)) == 64


async def test_what_is_known_here_stands_against_what_is_heard(server):
    one, other = Tables(server), Tables(server)
    other.prefix_index.record([boundary(1, tokens=100)], "elsewhere")
    other.positions.put(key_of(5), 64)
    one.hold(1, tokens=9_999)
    one.positions.put(key_of(5), 9_999)
    await one.exchange()
    await other.exchange()
    assert other.prefix_index.longest([key_of(1)], [BOOT])[BOOT].tokens == 100
    assert other.positions.get(key_of(5)) == 64


async def test_what_is_sent_again_and_again_is_told_once_in_a_while(server, client, monkeypatch):
    one = Tables(server)
    for _ in range(50):
        one.hold(1)
        await one.exchange()
    assert client.xlen(redis_sync.holdings_stream(BOOT)) == 1
    monkeypatch.setattr(redis_sync, "REPEAT_SECONDS", 0.0)
    one.hold(1)
    await one.exchange()
    assert client.xlen(redis_sync.holdings_stream(BOOT)) == 2


def garbage() -> Iterator[bytes]:
    draw = random.Random(7)
    for form, record in (
        (redis_sync.HOLDINGS, (redis_sync.HELD, key_of(66), 9)),
        (redis_sync.POSITIONS, (key_of(66), 9)),
    ):
        sound = redis_sync.pack(form, b"w" * 8, [record])
        yield from (b"", b"text", sound[:-1], sound + b"x", sound[:12], b"xxxx" + sound[4:], sound * 2)
        yield sound[:-4] + (redis_sync.MAX_TOKENS + 1).to_bytes(4, "little")
        yield sound[:-4] + b"\xff" * 4
        yield sound + sound[12:] * redis_sync.MAX_RECORDS
        yield from (draw.randbytes(draw.randrange(200)) for _ in range(200))
    for record in (
        (3, key_of(66), 9),
        (0, key_of(66), 0),
        (redis_sync.HELD, key_of(66), 0),
        (redis_sync.GONE, key_of(66), 9),
    ):
        yield redis_sync.pack(redis_sync.HOLDINGS, b"w" * 8, [record])


async def test_garbage_is_counted_and_changes_nothing(server, client):
    one, other = Tables(server), Tables(server)
    streams, rubbish = (redis_sync.POSITIONS_STREAM, redis_sync.holdings_stream(BOOT)), list(garbage())
    other_form = {streams[0]: redis_sync.HOLDINGS, streams[1]: redis_sync.POSITIONS}
    entries = 0
    for stream in streams:
        for raw in rubbish:
            if redis_sync.unpack(redis_sync.HOLDINGS if stream == streams[1] else redis_sync.POSITIONS, raw) is None:
                client.xadd(stream, {"n": raw})
                entries += 1
        record = (redis_sync.HELD, key_of(66), 9) if stream == streams[0] else (key_of(66), 9)
        client.xadd(stream, {"n": redis_sync.pack(other_form[stream], b"w" * 8, [record])})  # in the wrong stream
        client.xadd(stream, {"else": "x", "\xff": "y"})
        entries += 2
    assert entries == 2 * len(rubbish) + 4
    one.hold(1)
    await one.exchange()
    await other.exchange()
    assert other.holds(1) and len(other.prefix_index) == 1 and len(other.positions) == 0
    assert other.count("refused") == entries and other.count("heard") == 1


@pytest.mark.parametrize("nonsense", [redis_sync.MAX_TOKENS + 1, 2**40])
async def test_a_number_of_tokens_that_no_prompt_has_does_not_keep_others_from_going_out(server, nonsense):
    one, other = Tables(server), Tables(server)
    one.positions.put(key_of(1), nonsense)
    one.hold(2, tokens=nonsense)
    one.positions.put(key_of(3), 30)
    one.hold(4)
    await one.exchange()
    await other.exchange()
    assert (other.positions.get(key_of(1)), other.positions.get(key_of(3))) == (0, 30)
    assert not other.holds(2) and other.holds(4) and other.count("refused") == 0


async def test_a_key_of_another_kind_counts_as_redis_being_down_and_ends_nothing(server, client):
    client.set(redis_sync.POSITIONS_STREAM, "x")
    tables = Tables(server)
    running = asyncio.create_task(tables.redis_sync.run())
    await until(lambda: tables.redis_sync.state == "down")
    client.delete(redis_sync.POSITIONS_STREAM)
    await until(lambda: tables.redis_sync.state == "up")
    running.cancel()


async def test_a_redis_that_comes_back_empty_is_told_again(server):
    one, other = Tables(server), Tables(server)
    running = [asyncio.create_task(tables.redis_sync.run()) for tables in (one, other)]
    one.hold(1)
    await until(lambda: other.holds(1))
    server.kill()
    await until(lambda: one.redis_sync.state == other.redis_sync.state == "down")
    server.start()
    late = Tables(server)
    running.append(asyncio.create_task(late.redis_sync.run()))
    await until(lambda: one.redis_sync.state == other.redis_sync.state == "up")
    one.hold(1)
    await until(lambda: late.holds(1))
    for task in running:
        task.cancel()


async def test_streams_and_tables_are_bounded(server, client):
    stream = redis_sync.holdings_stream(BOOT)
    with client.pipeline(transaction=False) as pipeline:
        for number in range(2 * redis_sync.STREAM_ENTRIES):
            pipeline.xadd(
                stream, {"n": redis_sync.pack(redis_sync.HOLDINGS, b"w" * 8, [(redis_sync.HELD, key_of(number), 9)])}
            )
        pipeline.execute()
    small = Tables(server, size=ENTRY_BYTES * 100)
    small.hold(10**6)
    await small.exchange()
    assert client.xlen(stream) <= redis_sync.STREAM_ENTRIES + 200
    assert len(small.prefix_index) == 100 and small.holds(2 * redis_sync.STREAM_ENTRIES - 1)


async def test_while_redis_is_away_the_oldest_news_is_dropped_and_counted(server):
    one, other = Tables(server), Tables(server)
    server.kill()
    with pytest.raises(redis_client.ConnectionError):
        await one.redis_sync._exchange()
    for number in range(redis_sync.WAITING_EVENTS + 5):
        one.positions.put(key_of(number), 16)
    assert one.count("dropped") == 5
    with pytest.raises(redis_client.ConnectionError):
        await one.redis_sync._exchange()
    server.start()
    await one.exchange()
    await other.exchange()
    assert one.count("sent") == other.count("heard") == len(other.positions) == redis_sync.WAITING_EVENTS
    assert other.positions.get(key_of(4)) == 0 and other.positions.get(key_of(5)) == 16


async def test_sixteen_gateways_know_all_that_each_has_learnt_within_two_rounds(server):
    many = [Tables(server) for _ in range(16)]
    for at, one in enumerate(many):
        one.hold(at)
        for number in range(20):
            one.positions.put(key_of(1000 + 20 * at + number), 64)
    for _ in range(2):
        for one in many:
            await one.redis_sync._exchange()
    for one in many:
        assert all(one.holds(at) for at in range(16)) and len(one.positions) == 16 * 20


async def test_the_more_gateways_write_the_less_often_each_does(server, client, monkeypatch):
    many = [Tables(server) for _ in range(16)]
    now = [1000.0]
    monkeypatch.setattr(redis_sync, "time", SimpleNamespace(monotonic=lambda: now[0]))
    interval = redis_sync.INTERVAL_SECONDS
    for at in range(40):
        for number, one in enumerate(many):
            one.hold(100 * at + number)
            await one.redis_sync._exchange()
        now[0] += interval
        if at == 19:
            before = client.xlen(redis_sync.holdings_stream(BOOT))
    written = client.xlen(redis_sync.holdings_stream(BOOT)) - before
    assert written <= 20 * (redis_sync.GATEWAYS_AT_ONCE + 1)
    assert sum(one.count("sent") for one in many) >= 16 * (40 - 16 // redis_sync.GATEWAYS_AT_ONCE)


def test_a_stream_takes_no_more_of_redis_than_is_said(client):
    records = [(redis_sync.HELD, bytes(16), 9)] * redis_sync.MAX_RECORDS
    largest = redis_sync.pack(redis_sync.HOLDINGS, b"w" * 8, records)
    with client.pipeline(transaction=False) as pipeline:
        for _ in range(redis_sync.STREAM_ENTRIES + 500):
            pipeline.xadd("stream", {"n": largest}, maxlen=redis_sync.STREAM_ENTRIES, approximate=True)
        pipeline.execute()
    used = client.memory_usage("stream", samples=0)
    assert redis_sync.STREAM_BYTES / 2 < used < redis_sync.STREAM_BYTES


async def test_a_full_redis_drops_the_stream_that_was_written_to_longest_ago(server, client, monkeypatch):
    client.config_set("maxmemory-policy", "volatile-ttl")
    monkeypatch.setattr(redis_sync, "STREAM_SECONDS", 100)
    old, new = Tables(server, boot="old"), Tables(server)
    for number in range(8000):
        old.redis_sync._held(key_of(number), 100, "old")
    await old.exchange()
    monkeypatch.setattr(redis_sync, "STREAM_SECONDS", 6 * 3600)  # as if it were much later
    new.hold(1)
    await new.exchange()
    client.config_set("maxmemory", client.info("memory")["used_memory"] - 2**15)
    new.hold(2)
    await new.exchange()
    assert not client.exists(redis_sync.holdings_stream("old"))
    assert client.exists(redis_sync.holdings_stream(BOOT))
