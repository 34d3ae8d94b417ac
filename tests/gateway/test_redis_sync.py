"""Gateways that share what they learn, and whose responses are whose, through a real Redis: dead or frozen, too.

Responses that workers store are found while they stream, after a restart, and through another gateway; by no other key.
"""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import redis as redis_client

from proxy.bench.harness.servers import Server, Servers, free_port
from proxy.chat.chat import RESPONSES
from proxy.http import token_limits
from proxy.routing import redis_sync
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import GatewayForks, chat, metric, post, start_gateway
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import until, wait_for


class RedisServer:
    """A started server that keeps nothing on disk."""

    def __init__(self, servers: Servers) -> None:
        self._servers, self.port = servers, free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start it, after a `kill` again and empty, on the same port."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        started = self._servers.start("redis", self.port, command, {})
        self._process = started.process
        wait_for(lambda: "Ready to accept" in started.log.read_text())

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def freeze(self) -> None:
        """From now on connections are accepted and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, frozen or not."""
        self._process.kill()
        self._process.wait()


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
def server(tmp_path) -> Iterator[RedisServer]:
    with Servers(tmp_path) as servers:
        yield (started := RedisServer(servers))
        started.kill()


@pytest.fixture
def client(server: RedisServer) -> Iterator[redis_client.Redis]:
    with redis_client.Redis.from_url(server.url) as connected:
        yield connected


@pytest.fixture
def pair() -> Iterator[list[RecordingWorker]]:
    with recording_worker() as first, recording_worker() as second:
        yield [first, second]


def status(gateway: Server) -> dict:
    return httpx.get(gateway.url + "/seamark/status").json()


def sharing_gateway(fleet: Servers, pair: list[RecordingWorker], url: str) -> Server:
    gateway = start_gateway(fleet, *pair, flags=("--redis", url))
    wait_for(lambda: status(gateway)["redis"]["state"] == "up")
    return gateway


def news_count(gateway: Server, fate: str) -> float:
    return metric(gateway, f'seamark_redis_news_total{{fate="{fate}"}}')


def told_of_redis(gateway: Server) -> list[str]:
    """The gateway's log lines about Redis."""
    return [line for line in gateway.log.read_text().splitlines() if "redis" in line.lower()]


def test_a_prefix_learnt_by_one_gateway_is_known_to_the_other(fleet, pair, server):
    first, second = (sharing_gateway(fleet, pair, server.url) for _ in range(2))
    learnt = 0
    for number in range(4):  # four prefixes, spread over both workers
        body = chat(f"Tide {number}?")
        body["messages"][0] = {"role": "system", "content": f"You pilot ship {number}. " * 20}
        here = post(first, body)
        # Of each boundary its position, and that it is held. What the second learns of its own requests does not count.
        learnt += 2 * len(here.headers["x-seamark-boundary"].split(";"))
        wait_for(lambda n=learnt: news_count(second, "heard") == n)
        renders = sum(worker.renders for worker in pair)
        body["messages"][-1] = {"role": "user", "content": "And the wind?"}
        there = post(second, body)
        assert there.headers["x-seamark-worker"] == here.headers["x-seamark-worker"]
        assert int(there.headers["x-seamark-predicted"]) > 0
        assert sum(worker.renders for worker in pair) == renders
    assert all(worker.requests for worker in pair)
    assert told_of_redis(first)[0].endswith("redis is up") and len(told_of_redis(first)) == 1


def test_redis_holds_no_text_and_nothing_without_an_end(fleet, pair, server, client):
    gateway = sharing_gateway(fleet, pair, server.url)
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


def drive(gateway: Server, done: threading.Event) -> list[str]:
    """Requests one after the other until then, each with a new prefix: what went wrong."""
    wrong, number = [], 0
    while not done.is_set():
        number += 1
        body = chat(f"Tide {number}?")
        body["messages"][0] = {"role": "system", "content": f"You pilot ship {number}. " * 20}
        answer = post(gateway, body)
        if answer.status_code != 200 or "x-seamark-boundary" not in answer.headers:
            wrong.append(f"{answer.status_code} {answer.headers.get('x-seamark-boundary')}")
    return wrong


@pytest.mark.parametrize(
    ("harm", "cure"), [("kill", "start"), pytest.param("freeze", "thaw", marks=pytest.mark.thorough)]
)
def test_redis_that_is_lost_costs_no_request_and_comes_back(fleet, pair, server, harm, cure):
    first, second = (sharing_gateway(fleet, pair, server.url) for _ in range(2))
    done = threading.Event()
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        stack.callback(done.set)
        driven = pool.submit(drive, first, done)
        wait_for(lambda: news_count(second, "heard") > 20)
        assert metric(first, "seamark_redis_up") == 1
        getattr(server, harm)()
        wait_for(lambda: metric(first, "seamark_redis_up") == 0)
        assert status(first)["redis"]["state"] == "down"
        served = metric(first, "seamark_requests_total")
        wait_for(lambda: metric(first, "seamark_requests_total") > served + 20)
        getattr(server, cure)()
        wait_for(lambda: all(metric(gateway, "seamark_redis_up") == 1 for gateway in (first, second)))
        heard = news_count(second, "heard")
        wait_for(lambda: news_count(second, "heard") > heard)
    assert driven.result() == []
    words = [line.split("seamark.redis ", 1)[1].split(" (")[0] for line in told_of_redis(first)]
    assert words == ["redis is up", "redis is down", "redis is up"]
    assert "Traceback" not in first.log.read_text()


def test_a_password_is_never_told(fleet, pair, server):
    url = server.url.replace("://", "://user:hunter2@")
    gateway = start_gateway(fleet, *pair, flags=("--redis", url))
    wait_for(lambda: status(gateway)["redis"]["state"] == "down")
    assert "hunter2" not in gateway.log.read_text() + json.dumps(status(gateway))
    assert "AuthenticationError" in told_of_redis(gateway)[0]


def test_a_stream_takes_no_more_room_than_is_said(client):
    largest = redis_sync.pack(b"w" * 8, [(redis_sync.HELD, bytes(16), 9)] * redis_sync.MAX_RECORDS)
    with client.pipeline(transaction=False) as pipeline:
        for _ in range(2 * redis_sync.STREAM_ENTRIES):
            pipeline.xadd("largest", {"n": largest}, maxlen=redis_sync.STREAM_ENTRIES, approximate=True)
        pipeline.execute()
    assert redis_sync.STREAM_BYTES / 2 < client.memory_usage("largest", samples=0) < redis_sync.STREAM_BYTES


async def test_a_keys_limit_is_one_for_all_gateways_while_redis_is_there(in_memory, server, keys, workers, monkeypatch):
    now = [60.0]
    monkeypatch.setattr(token_limits, "time", SimpleNamespace(time=lambda: now[0]))
    keys.write_text(entry("ann", tokens_per_minute=3000, count="prompt"))
    first, second = [await in_memory(*workers, api_keys=keys, redis=server.url) for _ in range(2)]
    windows = [each.gateway.keys.limited["ann"].minute for each in (first, second)]

    async def let_in(gateway: InMemoryGateway, most: int = 12) -> int:
        answers = [await gateway.post(ASK, "/v1/embeddings", **bearer("ann")) for _ in range(most)]
        return [each.status_code for each in answers].count(200)

    assert await let_in(first, 3) == 3  # of 300 tokens each
    await until(lambda: windows[1].others == 900)
    assert await let_in(second) == 7
    server.kill()
    await until(lambda: {each.gateway.redis_sync.state for each in (first, second)} == {"down"})
    now[0] += 60
    assert [await let_in(first), await let_in(second)] == [10, 10]
    server.start()
    await until(lambda: [each.others for each in windows] == [3000, 3000])


ASK = {"model": "m", "input": "Tide?"}


@pytest.fixture
def workers() -> list[RecordingWorker]:
    return [RecordingWorker(stored={}) for _ in range(3)]


def asked_for(worker: RecordingWorker) -> list[str]:
    """Ids of responses, stored there or not."""
    named = [each.fields.get("previous_response_id") or each.path.removeprefix(RESPONSES) for each in worker.requests]
    return [name.removeprefix("/").removesuffix("/cancel") for name in named if name]


@pytest.fixture(params=[False, True], ids=["nothing", "keys, secret, Redis"])
def settings(request, keys, tmp_path) -> dict[str, Any]:
    """What gateways have in common."""
    if not request.param:
        return {}
    (tmp_path / "secret").write_text("salt secret\n")
    server = request.getfixturevalue("server")
    return {"api_keys": keys, "salt_secret_file": tmp_path / "secret", "redis": server.url}


async def ask(gateway: InMemoryGateway, method: str, path: str = "", name: str = "ann", **body) -> httpx.Response:
    return await gateway.client.request(method, RESPONSES + path, json=body or None, headers=bearer(name))


async def is_found(gateway: InMemoryGateway, response_id: str) -> bool:
    return (await ask(gateway, "GET", f"/{response_id}")).status_code == 200


def id_in(answer: str) -> str:
    return answer.split('"id": "', 1)[1].split('"', 1)[0]


async def made(gateway: InMemoryGateway, count: int) -> list[str]:
    """The ids of so many new responses, streamed or not. Their prompts share nothing, so that workers take turns."""
    bodies = ({**ASK, "input": f"{number}. Tide?", "stream": number % 4 > 0} for number in range(count))
    return [id_in((await ask(gateway, "POST", **body)).text) for body in bodies]


@pytest.mark.parametrize("background", [True, False])
async def test_a_response_is_asked_for_and_cancelled_while_it_streams(in_memory, workers, background):
    """Its worker is the busier one, which nobody would choose who does not know it."""
    gateway = await in_memory(*workers)
    for worker in workers:
        worker.pause.set()
    body = {**ASK, "stream": True, "background": background}
    stream = gateway.opened(body, RESPONSES)
    headers = dict((await stream.message())["headers"])
    texts = stream.body()
    response_id = id_in((await anext(texts)).decode())
    for method, path in [("GET", ""), ("POST", "/cancel"), ("GET", "?stream=true")] * 2:
        answer = await ask(gateway, method, f"/{response_id}{path}")
        # Without `background`, vLLM stores a response at its end.
        assert answer.status_code == (200 if background else 404)
        assert answer.headers["x-seamark-worker"] == headers[b"x-seamark-worker"].decode()
    for worker in workers:
        worker.pause.clear()
    assert b"response.completed" in b"".join([text async for text in texts])
    assert (await ask(gateway, "GET", f"/{response_id}")).status_code == 200
    assert sum(response_id in asked_for(worker) for worker in workers) == 1


async def test_no_gateway_loses_a_response_and_none_shows_it_to_another_key(in_memory, workers, settings):
    """Made through one gateway; asked for, continued, cancelled and deleted there, at another, and at a later one."""
    order = random.Random(3)
    first, second = [await in_memory(*workers, **settings) for _ in range(2)]
    ids = await made(first, 12)
    assert all(worker.stored for worker in workers) and len(set(ids)) == 12
    restarted = await in_memory(*workers, **settings)
    order.shuffle(ids)
    for number, response_id in enumerate(ids):
        turns = order.sample([first, second, restarted], 3)
        if "api_keys" in settings:
            asked = sum(len(asked_for(worker)) for worker in workers)
            for gateway in turns:
                assert (await ask(gateway, "GET", f"/{response_id}", "bob")).status_code == 404
                continued = {**ASK, "previous_response_id": response_id}
                assert (await ask(gateway, "POST", "", "bob", **continued)).status_code == 404
            assert sum(len(asked_for(worker)) for worker in workers) == asked
        tries = [
            ("GET", f"/{response_id}", {}),
            ("POST", "", {**ASK, "previous_response_id": response_id}),
            ("POST", f"/{response_id}/cancel", {}),
        ]
        for gateway, (method, path, body) in zip(turns, order.sample(tries, 3), strict=True):
            assert (await ask(gateway, method, path, **body)).status_code == 200
        assert (await ask(turns[number % 3], "DELETE", f"/{response_id}")).status_code == 200
    # Whoever has asked all of them remembers the one.
    assert all(asked_for(worker).count(response_id) <= 7 for worker in workers for response_id in ids)


async def test_while_the_worker_of_a_response_is_not_ready_nobody_says_that_there_is_none(in_memory, workers):
    gateway = await in_memory(*workers)
    response_id = (await ask(gateway, "POST", **ASK)).json()["id"]
    (keeper,) = (worker for worker in workers if response_id in worker.stored)
    keeper.sleeps = (1,)
    await until(lambda: gateway.metric("seamark_worker_up") == len(workers) - 1)
    assert (await ask(gateway, "GET", f"/{response_id}")).status_code == 503
    assert (await ask(gateway, "POST", **ASK, previous_response_id=response_id)).status_code == 503
    keeper.sleeps = (None,)
    await until(lambda: is_found(gateway, response_id))
    keeper.boot = "1.8e+09"  # and with it its responses
    keeper.stored.clear()
    others = [worker for worker in workers if worker is not keeper]
    while not all(response_id in asked_for(worker) for worker in others):  # once it is known to have restarted
        assert (await ask(gateway, "GET", f"/{response_id}")).status_code == 404


async def test_a_response_that_no_worker_knows_is_sought_once_at_each(in_memory, workers):
    gateway = await in_memory(*workers)
    continued = {**ASK, "previous_response_id": "resp_1"}
    cure = "VLLM_ENABLE_RESPONSES_API_STORE=1"
    for method, path, body, words in (("GET", "/resp_1", {}, "resp_1"), ("POST", "", continued, cure)):
        answer = await ask(gateway, method, path, **body)
        assert answer.status_code == 404 and words in answer.json()["error"]["message"]
    assert [asked_for(worker) for worker in workers] == [["resp_1"] * 2] * 3


async def test_an_id_that_no_gateway_with_this_key_made_is_nobodys(in_memory, workers, keys):
    """Not a stored one's of a worker's own naming, nor one that a client makes up of two others."""
    gateway = await in_memory(*workers, api_keys=keys)
    workers[0].stored["resp_1"] = {}
    anns, bobs = [(await ask(gateway, "POST", "", name, **ASK)).json()["id"] for name in ("ann", "bob")]
    for response_id in ("resp_1", bobs, anns[:40] + bobs[40:], bobs[:40] + anns[40:], anns[:-1], anns.upper()):
        assert (await ask(gateway, "GET", f"/{response_id}")).status_code == 404
    assert not any(asked_for(worker) for worker in workers)
    assert (await ask(gateway, "GET", f"/{anns}")).status_code == 200


async def test_a_worker_that_names_its_responses_itself_keeps_them_their_owners(in_memory, workers, keys, server):
    for worker in workers:
        worker.names_responses = True
    first, second = [await in_memory(*workers, api_keys=keys, redis=server.url) for _ in range(2)]
    response_id = (await ask(first, "POST", **ASK)).json()["id"]
    await until(lambda: is_found(second, response_id))
    for gateway in (first, second):
        for name, status in (("ann", 200), ("bob", 404)):
            assert (await ask(gateway, "GET", f"/{response_id}", name)).status_code == status
