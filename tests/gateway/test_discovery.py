"""Workers that a resolver names: they join, leave, change addresses; requests under way end as they should."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from proxy.commands.render_server import free_port
from proxy.fleet import discovery
from tests.harness.gateways import CHAT, OwnGateway, chat, own_gateway
from tests.harness.recording_worker import RecordingWorker, recording_worker
from tests.harness.waiting import wait_for

HOST = "vllm.test"


class Resolver:
    addresses: tuple[str, ...] | None = None  # the name is not known

    def tell(self, *addresses: str) -> None:
        self.addresses = addresses

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        assert host == HOST
        if self.addresses is None:
            raise socket.gaierror(socket.EAI_NONAME, "told to")
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
    with own_gateway(workers_dns=(f"{HOST}:{port}",), workers_dns_interval=0.05) as started:
        yield started


def are_up(own: OwnGateway, *workers: RecordingWorker) -> None:
    """Return once these are, and no other one."""
    wait_for(lambda: {worker.url for worker in own.gateway.pool.up} == {worker.url for worker in workers})
    wait_for(lambda: not any(worker.warming for worker in own.gateway.pool.workers))


def post(own: OwnGateway, **fields: Any) -> httpx.Response:
    return httpx.post(own.url + CHAT, json=chat("Tide?", **fields), timeout=30)


def test_a_gateway_may_start_before_any_worker_and_follows_them_to_the_end_of_their_requests(own, resolver, port):
    assert httpx.get(own.url + "/ready").status_code == post(own).status_code == 503
    with (
        recording_worker("127.0.0.2", port) as one,
        recording_worker("::1", port) as two,
        ThreadPoolExecutor() as pool,
    ):
        resolver.tell("127.0.0.2", "127.0.0.3")  # nothing listens at the second
        are_up(own, one)
        assert {post(own).headers["x-seamark-worker"] for _ in range(4)} == {one.url[7:]}
        resolver.tell("127.0.0.2", "::1")
        are_up(own, one, two)
        before = len(one.requests), len(two.requests)
        one.hold.set()
        two.hold.set()
        under_way = pool.submit(post, own)
        wait_for(lambda: (len(one.requests), len(two.requests)) != before)
        gone, stays, address = (one, two, "::1") if len(one.requests) > before[0] else (two, one, "127.0.0.2")
        resolver.tell(address)
        are_up(own, stays)
        stays.hold.clear()
        assert post(own).headers["x-seamark-worker"] == stays.url[7:]
        gone.hold.clear()
        assert under_way.result().headers["x-seamark-worker"] == gone.url[7:]
        wait_for(lambda: gone.url[7:] not in httpx.get(own.url + "/metrics").text)


def test_addresses_that_change_all_the_time_fail_no_request(own, resolver, port):
    addresses = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
    with ExitStack() as stack:
        for address in addresses:
            stack.enter_context(recording_worker(address, port))
        for number in range(30):
            stays = [address for address in addresses if any(address in each.url for each in own.gateway.pool.up)]
            coming = addresses[number % 3 :][:2]
            resolver.tell(*coming, *stays)
            wait_for(lambda: len(own.gateway.pool.up) >= 2)
            resolver.tell(*coming)
            assert post(own).status_code == 200
