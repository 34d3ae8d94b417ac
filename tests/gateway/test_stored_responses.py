"""Responses that workers store are found: while they stream, after a restart, and through another gateway.

Each is found by the client that asked for it, and by no other key.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from proxy.chat.chat import RESPONSES
from tests.harness.api_keys import bearer
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.redis_server import redis_server
from tests.harness.waiting import until

ASK = {"model": "m", "input": "Tide?"}


@pytest.fixture
def workers() -> list[RecordingWorker]:
    return [RecordingWorker(stored={}) for _ in range(3)]


def asked_for(worker: RecordingWorker) -> list[str]:
    """Ids of responses, stored there or not."""
    named = [each.fields.get("previous_response_id") or each.path.removeprefix(RESPONSES) for each in worker.requests]
    return [name.removeprefix("/").removesuffix("/cancel") for name in named if name]


@pytest.fixture(params=[False, True], ids=["nothing", "keys, secret, Redis"])
def settings(request, keys, tmp_path) -> Iterator[dict[str, Any]]:
    """What gateways have in common."""
    if not request.param:
        yield {}
        return
    (tmp_path / "secret").write_text("salt secret\n")
    with redis_server() as server:
        yield {"api_keys": keys, "salt_secret_file": tmp_path / "secret", "redis": server.url}


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
    for method, path, body in (("GET", "/resp_1", {}), ("POST", "", continued)):
        answer = await ask(gateway, method, path, **body)
        assert answer.status_code == 404 and "resp_1" in answer.json()["error"]["message"]
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


async def test_a_worker_that_names_its_responses_itself_keeps_them_their_owners(in_memory, workers, keys):
    for worker in workers:
        worker.names_responses = True
    with redis_server() as server:
        first, second = [await in_memory(*workers, api_keys=keys, redis=server.url) for _ in range(2)]
        response_id = (await ask(first, "POST", **ASK)).json()["id"]
        await until(lambda: is_found(second, response_id))
        for gateway in (first, second):
            for name, status in (("ann", 200), ("bob", 404)):
                assert (await ask(gateway, "GET", f"/{response_id}", name)).status_code == status
