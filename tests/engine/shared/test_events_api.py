"""What became of each request, as the gateway learns it and a client cannot."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from engine_patches.reporting.events_api import MAX_KEPT, MAX_TOLD, Feed, client_id
from engine_patches.scheduler.counters import AdmittedRequest
from proxy.bench.harness.client import open_client
from proxy.bench.harness.servers import MODEL_NAME
from proxy.fleet import worker_metrics
from tests.harness.engines import SharedServers


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


def admitted(name, reason="cold", hit_tokens=0, shared=0, resolved=()):
    return AdmittedRequest(f"chatcmpl-{name}-00000000", reason, hit_tokens, shared, resolved)


def test_a_reader_gets_what_is_new():
    feed = Feed("boot")
    feed.add_outcome(admitted("a"))
    first = feed.after(0)
    assert first["outcomes"] == [("a", "cold", 0)]
    feed.add_outcome(admitted("b", "hit", 160))
    assert feed.after(first["cursor"], first["boot"])["outcomes"] == [("b", "hit", 160)]
    assert feed.after(2, feed.boot)["outcomes"] == []
    assert len(feed.after(2, "another process's")["outcomes"]) == 2


def test_what_is_kept_is_bounded():
    feed = Feed("boot")
    for number in range(MAX_KEPT + 10):
        feed.add_outcome(admitted(str(number)))
    told, cursor = [], 0
    while outcomes := (answer := feed.after(cursor, feed.boot))["outcomes"]:
        assert len(outcomes) <= MAX_TOLD and answer["cursor"] > cursor
        told += outcomes
        cursor = answer["cursor"]
    assert [name for name, *_ in told] == [str(number) for number in range(10, MAX_KEPT + 10)]


def test_states_stand_beside_the_outcomes_in_their_order():
    feed = Feed("boot")
    feed.add_outcome(admitted("a"))
    feed.add_event(1, ["came", "chatcmpl-a-00000000", 200, [[160, "5c"], [192, ""]]])
    feed.add_event(2, ["gone", "5c"])
    feed.add_event(3, ["cleared"])
    answer = feed.after(0, "")
    assert answer["outcomes"] == [("a", "cold", 0)]
    assert answer["states"] == [["came", "a", 200, [[160, "5c"], [192, ""]]], ["gone", "5c"], ["cleared"]]
    assert feed.after(answer["cursor"] - 1, feed.boot)["states"] == [["cleared"]]


def test_after_lost_events_nothing_is_known_to_be_held():
    feed = Feed("boot")
    feed.add_event(1, ["gone", "a"])
    feed.add_event(5, ["gone", "c"])
    assert feed.after(0)["states"] == [["gone", "a"], ["cleared", "lost"], ["gone", "c"]]


def test_a_reader_that_comes_too_late_or_after_a_restart_is_reset():
    feed = Feed("boot")
    assert feed.after(0)["reset"] is False  # nothing was known yet
    for number in range(MAX_KEPT + 10):
        feed.add_outcome(admitted(str(number)))
    assert [feed.after(cursor, feed.boot)["reset"] for cursor in (9, 10, MAX_KEPT)] == [True, False, False]
    assert feed.after(MAX_KEPT, "another process's")["reset"] is True


async def test_a_reader_waits_for_an_event_and_no_longer_than_it_says():
    feed = Feed("boot")
    waiting = asyncio.create_task(feed.wait_after(0, feed.boot, 30))
    while not feed._readers:
        await asyncio.sleep(0)
    feed.add_event(1, ["gone", "a"])
    feed.wake_readers()
    assert (await asyncio.wait_for(waiting, 5))["states"] == [["gone", "a"]]
    assert (await feed.wait_after(1, feed.boot, 0.01))["states"] == [] and not feed._readers
    assert (await asyncio.wait_for(feed.wait_after(1, "another process's", 30), 5))["reset"] is True


SYSTEM = {"role": "system", "content": "You keep the log of the lighthouse and write down every ship that passes. " * 6}


async def reasons(client: httpx.AsyncClient, server, names: set[str]) -> dict[str, tuple[str, int]]:
    deadline = time.monotonic() + 120
    while True:
        answer = (await client.get(server.url + "/seamark/outcomes")).json()
        found = {name: (reason, tokens) for name, reason, tokens in answer["outcomes"]}
        if names <= found.keys() or time.monotonic() > deadline:
            return found
        await asyncio.sleep(0.1)


async def test_each_request_of_a_real_engine_has_its_reason(servers: SharedServers):
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
        answer = (await client.get(servers.seamark.url + "/seamark/outcomes")).json()
        (came,) = (states for kind, *states in answer["states"] if kind == "came" and states[0] == "feed-first")
        assert came[1] > came[2][-1][0] >= 64 and all(name for _, name in came[2])
        for query in ("after=x", "wait=x", "wait=-1", "wait=1e3", "wait=nan"):
            assert (await client.get(f"{servers.seamark.url}/seamark/outcomes?{query}")).status_code == 400
        assert (await client.post(servers.seamark.url + "/seamark/outcomes")).status_code == 405


async def test_a_worker_gives_some_of_its_metrics_as_it_gives_all(servers: SharedServers):
    async with open_client(120) as client:
        some = (await client.get(servers.seamark.url + worker_metrics.OF_PLUGIN)).text
        whole = (await client.get(servers.seamark.url + "/metrics")).text
        found = worker_metrics.read(some)
        assert found == worker_metrics.read(whole) and found.engine is not None and found.cache_tokens > 0
        assert len(some) < len(whole) / 5
        assert (await client.get(servers.gateway.url + worker_metrics.OF_PLUGIN)).status_code == 404
