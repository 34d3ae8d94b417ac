"""What became of each request, as the gateway learns it and a client cannot."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from engine_patches.feed import MAX_KEPT, Feed, client_id
from proxy.bench.client import open_client
from proxy.bench.engines import MODEL_NAME
from tests.conftest import Servers


@pytest.mark.parametrize(
    ("engine_id", "request_id"),
    [
        ("chatcmpl-my-id-0-deadbeef", "my-id-0"),
        ("1_chatcmpl-my-id-deadbeef", "my-id"),
        ("cmpl-my-id-0-deadbeef", "my-id"),
        ("0_cmpl-my-id-3-deadbeef", "my-id"),
        ("resp_my-id-deadbeef", "my-id"),
        ("odd", "odd"),
    ],
)
def test_the_clients_id_is_found_in_the_engines(engine_id, request_id):
    assert client_id(engine_id) == request_id


def test_only_what_is_new_is_told():
    feed = Feed()
    feed.add("chatcmpl-a-00000000", "cold", 0)
    first = feed.after(0)
    assert first["outcomes"] == [("a", "cold", 0)]
    feed.add("chatcmpl-b-00000000", "hit", 160)
    assert feed.after(first["cursor"], first["boot"])["outcomes"] == [("b", "hit", 160)]
    assert feed.after(2, feed.boot)["outcomes"] == []
    assert len(feed.after(2, "another process's")["outcomes"]) == 2


def test_what_is_kept_is_bounded():
    feed = Feed()
    for number in range(MAX_KEPT + 10):
        feed.add(f"chatcmpl-{number}-00000000", "cold", 0)
    outcomes = feed.after(0)["outcomes"]
    assert (len(outcomes), outcomes[-1].request_id) == (MAX_KEPT, str(MAX_KEPT + 9))


SYSTEM = {"role": "system", "content": "You keep the log of the lighthouse and write down every ship that passes. " * 6}


async def reasons(client: httpx.AsyncClient, server, names: set[str]) -> dict[str, tuple[str, int]]:
    deadline = time.monotonic() + 20
    while True:
        told = (await client.get(server.url + "/seamark/outcomes")).json()
        found = {name: (reason, tokens) for name, reason, tokens in told["outcomes"]}
        if names <= found.keys() or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


async def test_each_request_of_a_real_engine_has_its_reason(servers: Servers):
    async with open_client(120) as client:

        async def chat(name: str, text: str, **more) -> None:
            body = {"model": MODEL_NAME, "messages": [SYSTEM, {"role": "user", "content": text}], "max_tokens": 2}
            headers = {"x-request-id": name}
            url = servers.gateway.url + "/v1/chat/completions"
            answer = await client.post(url, json=body | more, headers=headers)
            answer.raise_for_status()

        await chat("feed-first", "Any ship today?")
        await chat("feed-second", "Any ship tomorrow?", stream=True)
        completion = {"model": MODEL_NAME, "prompt": ["one", "two"], "max_tokens": 1}
        url = servers.seamark.url + "/v1/completions"
        (await client.post(url, json=completion, headers={"x-request-id": "feed-third"})).raise_for_status()
        found = await reasons(client, servers.seamark, {"feed-first", "feed-second", "feed-third"})
        assert found["feed-first"] == ("cold", 0) and found["feed-third"] == ("no_boundary", 0)
        reason, tokens = found["feed-second"]
        assert reason == "hit" and tokens >= 64
        assert (await client.get(servers.gateway.url + "/seamark/outcomes")).status_code == 404
        assert (await client.get(servers.seamark.url + "/seamark/outcomes?after=x")).status_code == 400
        assert (await client.post(servers.seamark.url + "/seamark/outcomes")).status_code == 405
