"""What became of each request of a real engine, as the gateway learns it and a client cannot."""

from __future__ import annotations

import httpx

from proxy.bench.harness.servers import MODEL_NAME
from proxy.fleet import worker_metrics
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT
from tests.harness.waiting import wait_for

SYSTEM = {"role": "system", "content": "You keep the log of the lighthouse and write down every ship that passes. " * 6}


def test_each_request_has_its_reason_and_its_states_in_the_workers_feed(servers: SharedServers):
    feed = servers.seamark.url + "/seamark/outcomes"

    def ask(name: str, url: str, **body: object) -> None:
        asked = {"model": MODEL_NAME, "max_tokens": 2} | body
        httpx.post(url, json=asked, headers={"x-request-id": name}, timeout=120).raise_for_status()

    def outcomes() -> dict[str, tuple[str, int]]:
        return {name: (reason, tokens) for name, reason, tokens in httpx.get(feed, timeout=60).json()["outcomes"]}

    for name, question, stream in (("feed-1", "Any ship today?", False), ("feed-2", "Any ship tomorrow?", True)):
        messages = [SYSTEM, {"role": "user", "content": question}]
        ask(name, servers.gateway.url + CHAT, messages=messages, stream=stream)
    ask("feed-3", servers.seamark.url + "/v1/completions", prompt=["one", "two"])
    wait_for(lambda: {"feed-1", "feed-2", "feed-3"} <= outcomes().keys())
    found = outcomes()
    assert found["feed-1"] == ("cold", 0) and found["feed-3"] == ("no_boundary", 0)
    assert found["feed-2"][0] == "hit" and found["feed-2"][1] >= 64
    states = httpx.get(feed, timeout=60).json()["states"]
    (came,) = (event for kind, *event in states if kind == "came" and event[0] == "feed-1")
    assert came[1] > came[2][-1][0] >= 64 and all(name for _, name in came[2])
    assert httpx.get(servers.gateway.url + "/seamark/outcomes", timeout=60).status_code == 404


def test_a_worker_gives_some_of_its_metrics_as_it_gives_all(servers: SharedServers):
    some, whole = (httpx.get(servers.seamark.url + path).text for path in (worker_metrics.OF_PLUGIN, "/metrics"))
    found = worker_metrics.read(some)
    assert found == worker_metrics.read(whole) and found.engine is not None and found.cache_tokens > 0
    assert len(some) < len(whole) / 5
    assert httpx.get(servers.gateway.url + worker_metrics.OF_PLUGIN).status_code == 404
