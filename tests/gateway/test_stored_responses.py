"""Responses that workers store are found: while they stream, after a restart, and through another gateway.

Each is found by the client that asked for it, and by no other key.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness.servers import Server
from tests.harness.api_keys import bearer, entry
from tests.harness.forked_gateways import GatewayForks
from tests.harness.gateways import start_gateway, wait_for
from tests.harness.redis_server import redis_server
from tests.harness.storing_worker import RESPONSES, StoringWorker, storing_worker

ASK = {"model": "m", "input": "Tide?"}

CLIENT = httpx.Client(timeout=30)


@pytest.fixture
def workers() -> Iterator[list[StoringWorker]]:
    with ExitStack() as stack:
        yield [stack.enter_context(storing_worker()) for _ in range(3)]


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "keys.toml").write_text(entry("ann") + entry("bob") + entry("root", admin=True))
    return ("--api-keys", str(tmp_path / "keys.toml"))


@pytest.fixture(params=["", "keys", "redis", "keys secret redis"])
def flags(request, keys, tmp_path) -> Iterator[tuple[str, ...]]:
    """What gateways have in common."""
    (tmp_path / "secret").write_text("salt secret\n")
    with redis_server() if "redis" in request.param else nullcontext() as server:
        known = {"keys": keys, "secret": ("--salt-secret-file", str(tmp_path / "secret"))}
        if server is not None:
            known["redis"] = ("--redis", server.url)
        yield tuple(flag for name in request.param.split() for flag in known[name])


def ask(server: Server, method: str, path: str = "", name: str = "ann", **body) -> httpx.Response:
    return CLIENT.request(method, server.url + RESPONSES + path, json=body or None, headers=bearer(name))


def metric(gateway: Server, name: str) -> float:
    text = CLIENT.get(gateway.url + "/metrics", headers=bearer("root")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def gateways(fleet: GatewayForks, workers: list[StoringWorker], *flags: str, count: int = 1) -> list[Server]:
    """So many that know all workers."""
    started = [start_gateway(fleet, *workers, flags=flags) for _ in range(count)]
    wait_for(lambda: all(metric(gateway, "seamark_worker_up") == len(workers) for gateway in started))
    return started


def id_in(answer: str) -> str:
    return answer.split('"id": "', 1)[1].split('"', 1)[0]


def made(server: Server, count: int) -> list[str]:
    """The ids of so many new responses, streamed or not. Their prompts share nothing, so that workers take turns."""
    bodies = ({**ASK, "input": f"{number}. Tide?", "stream": number % 4 > 0} for number in range(count))
    return [id_in(ask(server, "POST", **body).text) for body in bodies]


@pytest.mark.parametrize("background", [True, False])
def test_a_response_is_asked_for_and_cancelled_while_it_streams(fleet, workers, background):
    """Its worker is the busier one, which nobody would choose who does not know it."""
    (gateway,) = gateways(fleet, workers)
    for worker in workers:
        worker.opened.set()
    body = {**ASK, "stream": True, "background": background}
    with httpx.Client(timeout=30) as client, client.stream("POST", gateway.url + RESPONSES, json=body) as stream:
        texts = stream.iter_text()
        response_id = id_in(next(texts))
        for method, path in [("GET", ""), ("POST", "/cancel"), ("GET", "?stream=true")] * 2:
            answer = ask(gateway, method, f"/{response_id}{path}")
            # Without `background`, vLLM stores a response at its end.
            assert answer.status_code == (200 if background else 404)
            assert answer.headers["x-seamark-worker"] == stream.headers["x-seamark-worker"]
        for worker in workers:
            worker.opened.clear()
        assert "response.completed" in "".join(texts)
    assert ask(gateway, "GET", f"/{response_id}").status_code == 200
    assert sum(response_id in worker.asked_for for worker in workers) == 1


def test_no_gateway_loses_a_response_and_none_shows_it_to_another_key(fleet, workers, flags):
    """Made through one gateway; asked for, continued, cancelled and deleted there, at another, and at a later one."""
    order = random.Random(3)
    first, second = gateways(fleet, workers, *flags, count=2)
    ids = made(first, 25)
    assert all(worker.stored for worker in workers) and len(set(ids)) == 25
    (restarted,) = gateways(fleet, workers, *flags)
    order.shuffle(ids)
    for number, response_id in enumerate(ids):
        turns = order.sample([first, second, restarted], 3)
        if "--api-keys" in flags:
            asked = sum(len(worker.asked_for) for worker in workers)
            for gateway in turns:
                assert ask(gateway, "GET", f"/{response_id}", "bob").status_code == 404
                assert ask(gateway, "POST", "", "bob", **ASK, previous_response_id=response_id).status_code == 404
            assert sum(len(worker.asked_for) for worker in workers) == asked
        tries = [
            ("GET", f"/{response_id}", {}),
            ("POST", "", {**ASK, "previous_response_id": response_id}),
            ("POST", f"/{response_id}/cancel", {}),
        ]
        for gateway, (method, path, body) in zip(turns, order.sample(tries, 3), strict=True):
            assert ask(gateway, method, path, **body).status_code == 200
        assert ask(turns[number % 3], "DELETE", f"/{response_id}").status_code == 200
    # Whoever has asked all of them remembers the one.
    assert all(worker.asked_for.count(response_id) <= 7 for worker in workers for response_id in ids)


def test_while_the_worker_of_a_response_is_not_ready_nobody_says_that_there_is_none(fleet, workers):
    (gateway,) = gateways(fleet, workers, "--health-interval", "0.1")
    response_id = ask(gateway, "POST", **ASK).json()["id"]
    (keeper,) = (worker for worker in workers if response_id in worker.stored)
    keeper.sleeps = (1,)
    wait_for(lambda: metric(gateway, "seamark_worker_up") == len(workers) - 1)
    assert ask(gateway, "GET", f"/{response_id}").status_code == 503
    assert ask(gateway, "POST", **ASK, previous_response_id=response_id).status_code == 503
    keeper.sleeps = (None,)
    wait_for(lambda: ask(gateway, "GET", f"/{response_id}").status_code == 200)
    keeper.boot = "1.8e+09"  # and with it its responses
    keeper.stored.clear()
    others = [worker for worker in workers if worker is not keeper]
    while not all(response_id in worker.asked_for for worker in others):  # once it is known to have restarted
        assert ask(gateway, "GET", f"/{response_id}").status_code == 404


def test_what_one_gateway_learns_of_a_response_another_knows_through_redis(fleet, workers):
    with redis_server() as server:
        first, second = gateways(fleet, workers, "--redis", server.url, count=2)
        ids = made(first, 9)
        wait_for(lambda: metric(second, 'seamark_redis_news_total{fate="heard"') >= len(ids))
        for response_id in ids:
            assert ask(second, "GET", f"/{response_id}").status_code == 200
        assert metric(second, 'seamark_resent_total{reason="not_found"') == 0


def test_a_response_that_no_worker_knows_is_sought_once_at_each(fleet, workers):
    (gateway,) = gateways(fleet, workers)
    continued = {**ASK, "previous_response_id": "resp_1"}
    for method, path, body in (("GET", "/resp_1", {}), ("POST", "", continued)):
        answer = ask(gateway, method, path, **body)
        assert answer.status_code == 404 and "resp_1" in answer.json()["error"]["message"]
    assert [worker.asked_for for worker in workers] == [["resp_1"] * 2] * 3


def test_an_id_that_no_gateway_with_this_key_made_is_nobodys(fleet, workers, keys):
    """Not a stored one's of a worker's own naming, nor one that a client makes up of two others."""
    (gateway,) = gateways(fleet, workers, *keys)
    workers[0].stored["resp_1"] = {}
    anns, bobs = (ask(gateway, "POST", "", name, **ASK).json()["id"] for name in ("ann", "bob"))
    for response_id in ("resp_1", bobs, anns[:40] + bobs[40:], bobs[:40] + anns[40:], anns[:-1], anns.upper()):
        assert ask(gateway, "GET", f"/{response_id}").status_code == 404
    assert not any(worker.asked_for for worker in workers)
    assert ask(gateway, "GET", f"/{anns}").status_code == 200


def test_a_worker_that_names_its_responses_itself_keeps_them_their_owners(fleet, workers, keys):
    for worker in workers:
        worker.names = False
    with redis_server() as server:
        first, second = gateways(fleet, workers, *keys, "--redis", server.url, count=2)
        response_id = ask(first, "POST", **ASK).json()["id"]
        wait_for(lambda: ask(second, "GET", f"/{response_id}").status_code == 200)
        for gateway in (first, second):
            for name, status in (("ann", 200), ("bob", 404)):
                assert ask(gateway, "GET", f"/{response_id}", name).status_code == status


def test_a_response_is_continued_and_counted_although_a_proxy_compresses(fleet, workers):
    for worker in workers:
        worker.gzips = "accepted"
    (gateway,) = gateways(fleet, workers)
    for _ in range(4):
        first = ask(gateway, "POST", **ASK)
        assert first.headers["x-seamark-cached"] == "160"
        assert ask(gateway, "POST", **ASK, previous_response_id=first.json()["id"]).status_code == 200
    assert sum(len(worker.asked_for) for worker in workers) == 4
    assert metric(gateway, "seamark_prompt_tokens_total") == 8 * 300
