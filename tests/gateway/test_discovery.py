"""Workers that a resolver names: they join, leave, change addresses; requests under way end as they should."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from proxy.commands.render_server import free_port
from proxy.fleet import discovery
from tests.harness.gateways import CHAT, OwnGateway, chat, own_gateway
from tests.harness.recording_worker import recording_worker
from tests.harness.waiting import wait_for

HOST = "vllm.test"


class Resolver:
    """Of the test's own."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()
        self.error: int | None = socket.EAI_NONAME

    def tell(self, *addresses: str) -> None:
        self.addresses, self.error = addresses, None

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        assert host == HOST
        if self.error is not None:
            raise socket.gaierror(self.error, "told to")
        return self.addresses


@pytest.fixture
def resolver(monkeypatch) -> Resolver:
    made = Resolver()
    monkeypatch.setattr(discovery, "addresses_of", made)
    return made


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def own(resolver, port) -> Iterator[OwnGateway]:
    names = (f"{HOST}:{port}",)
    with own_gateway(workers_dns=names, workers_dns_interval=0.05, workers_dns_keep=600) as started:
        yield started


def up(own: OwnGateway) -> set[str]:
    return {worker.url for worker in own.gateway.pool.up}


def post(own: OwnGateway, **fields: Any) -> httpx.Response:
    return httpx.post(own.url + CHAT, json=chat("Tide?", **fields), timeout=30)


def test_a_gateway_may_start_before_any_worker_and_follows_them(own, resolver, port):
    assert httpx.get(own.url + "/ready").status_code == post(own).status_code == 503
    with recording_worker("127.0.0.2", port) as one, recording_worker("::1", port) as two:
        resolver.tell("127.0.0.2")
        wait_for(lambda: up(own) == {one.url})
        assert post(own).headers["x-seamark-worker"] == one.url[7:]
        resolver.tell("127.0.0.2", "::1")
        wait_for(lambda: up(own) == {one.url, two.url})
        resolver.tell("::1")
        wait_for(lambda: up(own) == {two.url})
        assert post(own).headers["x-seamark-worker"] == two.url[7:]
        metrics = httpx.get(own.url + "/metrics").text
        assert f'seamark_worker_up{{worker="{two.url[7:]}"}} 1.0' in metrics
        wait_for(lambda: one.url[7:] not in httpx.get(own.url + "/metrics").text)


def test_a_request_under_way_ends_when_its_worker_has_gone(own, resolver, port):
    with recording_worker("127.0.0.2", port) as one, recording_worker("127.0.0.3", port) as two:
        resolver.tell("127.0.0.2")
        wait_for(lambda: up(own) == {one.url})
        one.hold.set()
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(post(own)))
        asking.start()
        wait_for(lambda: one.requests)
        resolver.tell("127.0.0.3")
        wait_for(lambda: up(own) == {two.url})
        assert post(own).headers["x-seamark-worker"] == two.url[7:]
        one.hold.clear()
        asking.join()
        assert answers[0].status_code == 200 and answers[0].headers["x-seamark-worker"] == one.url[7:]


def test_one_that_joins_has_hot_prefixes_replayed_before_it_gets_requests(own, resolver, port):
    with recording_worker("127.0.0.2", port) as one, recording_worker("127.0.0.3", port) as two:
        resolver.tell("127.0.0.2")
        wait_for(lambda: up(own) == {one.url})
        for number in range(4):
            wait_for(lambda: one.is_read)
            post(own, temperature=number / 4)
        two.hold.set()  # its replay waits
        resolver.tell("127.0.0.2", "127.0.0.3")
        wait_for(lambda: two.requests)
        assert b'"max_tokens":1' in two.requests[0].body.replace(b" ", b"")
        assert {post(own).headers["x-seamark-worker"] for _ in range(5)} == {one.url[7:]}
        two.hold.clear()
        wait_for(lambda: up(own) == {one.url, two.url} and not any(w.warming for w in own.gateway.pool.workers))
        resolver.tell("127.0.0.3")
        wait_for(lambda: up(own) == {two.url})
        assert post(own).headers["x-seamark-worker"] == two.url[7:]


def test_they_go_when_it_has_not_been_resolved_for_long_and_come_back(resolver, port):
    names = (f"{HOST}:{port}",)
    with (
        recording_worker("127.0.0.2", port) as one,
        own_gateway(workers_dns=names, workers_dns_interval=0.05, workers_dns_keep=0) as own,
    ):
        resolver.tell("127.0.0.2")
        wait_for(lambda: up(own) == {one.url})
        resolver.error = socket.EAI_NONAME
        wait_for(lambda: not own.gateway.pool.workers)
        assert post(own).status_code == 503
        resolver.tell("127.0.0.2")
        wait_for(lambda: up(own) == {one.url})


def test_addresses_that_change_all_the_time_fail_no_request(own, resolver, port):
    with (
        recording_worker("127.0.0.2", port) as one,
        recording_worker("127.0.0.3", port),
        recording_worker("127.0.0.4", port),
    ):
        resolver.tell("127.0.0.2")
        wait_for(lambda: up(own) == {one.url})
        addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
        statuses = []
        for number in range(60):
            stays = {worker.url for worker in own.gateway.pool.up}
            coming = addresses[number % 3 :][:2]
            resolver.tell(*coming, *(each for each in addresses if f"http://{each}:{port}" in stays))
            wait_for(lambda: len(up(own)) >= 2)
            resolver.tell(*coming)
            statuses.append(post(own).status_code)
        assert set(statuses) == {200}
