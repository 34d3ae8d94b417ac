"""Gateways that share what they learn through a real Redis, and what they do when it is dead, frozen or full."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import redis as redis_client

from proxy.bench.harness.servers import Server, Servers
from proxy.routing import redis_sync
from tests.harness.gateways import GatewayForks, chat, metric, post, start_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.redis_server import RedisServer, redis_server
from tests.harness.waiting import wait_for

SECRET = "the lighthouse keeper's diary"

# Seconds, in place of the defaults, which a busy machine alone may exceed. Three later answers in a row: Redis is down.
TIMES = {"CONNECT_SECONDS": 1.0, "ANSWER_SECONDS": 1.0, "RETRY_SECONDS": 0.2}


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


HARMS = {"killed": ("kill", "start"), "frozen": ("freeze", "thaw"), "full": ("fill", "make_room")}


@pytest.mark.parametrize(
    "harm", ["killed", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("frozen", "full"))]
)
def test_redis_that_is_lost_costs_no_request_and_comes_back(fleet, workers, server, harm):
    first, second = (sharing_gateway(fleet, workers, server.url) for _ in range(2))
    with steady_traffic(first) as wrong:
        wait_for(lambda: news_count(second, "heard") > 20)
        assert metric(first, "seamark_redis_up") == 1
        getattr(server, HARMS[harm][0])()
        wait_for(lambda: metric(first, "seamark_redis_up") == 0)
        assert status(first)["redis"]["state"] == "down"
        served = metric(first, "seamark_requests_total")
        wait_for(lambda: metric(first, "seamark_requests_total") > served + 20)
        getattr(server, HARMS[harm][1])()
        wait_for(lambda: all(metric(gateway, "seamark_redis_up") == 1 for gateway in (first, second)))
        heard = news_count(second, "heard")
        wait_for(lambda: news_count(second, "heard") > heard)
    assert wrong == []
    words = [line.split("seamark.redis ", 1)[1].split(" (")[0] for line in told_of_redis(first)]
    assert words == ["redis is up", "redis is down", "redis is up"]
    assert "Traceback" not in first.log.read_text()


def test_a_password_is_never_told(fleet, workers, server):
    url = server.url.replace("://", "://user:hunter2@")
    gateway = start_gateway(fleet, *workers, flags=("--redis", url))
    wait_for(lambda: status(gateway)["redis"]["state"] == "down")
    assert "hunter2" not in gateway.log.read_text() + json.dumps(status(gateway))
    assert "AuthenticationError" in told_of_redis(gateway)[0]


def test_a_stream_takes_no_more_room_than_is_said(client):
    largest = redis_sync.pack(redis_sync.HOLDINGS, b"w" * 8, [(redis_sync.HELD, bytes(16), 9)] * redis_sync.MAX_RECORDS)
    with client.pipeline(transaction=False) as pipeline:
        for _ in range(2 * redis_sync.STREAM_ENTRIES):
            pipeline.xadd("largest", {"n": largest}, maxlen=redis_sync.STREAM_ENTRIES, approximate=True)
        pipeline.execute()
    assert redis_sync.STREAM_BYTES / 2 < client.memory_usage("largest", samples=0) < redis_sync.STREAM_BYTES
