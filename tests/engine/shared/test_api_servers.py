"""Several API servers before one engine: each answers some requests, and all tell everything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import ask, open_client
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from tests.harness.engines import SharedServers
from tests.harness.predictions import is_known_as_gone, wait_for_predicted_hits
from tests.harness.waiting import wait_for

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """The engine's servers, and a gateway before them."""
    with Servers(tmp_path_factory.mktemp("api-servers")) as fleet:
        engine = fleet.engine("two-api-servers", model, "1", ("--api-server-count", "2"), ENVIRONMENT)
        engine.wait_until_ready()
        started = fleet.gateway(engine)
        started.wait_until_ready("/ready", seconds=60)
        yield engine, started


@pytest.fixture
def gateway(both: tuple[Server, Server]) -> Server:
    return both[1]


async def test_answers_are_exact_and_hits_are_those_of_a_single_api_server(gateway: Server, servers: SharedServers):
    async with open_client(300) as client:
        for number in range(3):
            head = {"role": "system", "content": prose(200, 7300 + number)}
            for question in QUESTIONS[:4]:
                messages = [head, {"role": "user", "content": question}]
                two, one = [await ask(client, each.url, messages, 32) for each in (gateway, servers.gateway)]
                right = await ask(client, servers.reference.url, messages, 32)
                assert exact.compare(two, right).exact and exact.compare(one, right).exact
                assert two.cached_tokens == one.cached_tokens and bool(two.cached_tokens) == (question != QUESTIONS[0])


def test_reasons_follow_from_usage(gateway: Server):
    head = {"role": "system", "content": prose(200, 7390)}
    told = []
    for question in QUESTIONS[:6]:
        body = {"model": MODEL_NAME, "messages": [head, {"role": "user", "content": question}], "max_tokens": 1}
        answer = httpx.post(gateway.url + CHAT, json=body, timeout=120)
        told.append(answer.headers["x-seamark-reason"])
    assert told == ["cold", *["hit"] * 5]


def fresh(url: str, path: str) -> httpx.Response:
    """On a connection of its own, so that any of the API servers may answer."""
    return httpx.get(url + path, headers={"connection": "close"}, timeout=60)


def test_whichever_server_is_asked_there_is_one_feed_with_every_outcome_and_every_state(both):
    engine, gateway = both
    names = [f"of-any-{number}" for number in range(10)]
    for number, name in enumerate(names):
        head = {"role": "system", "content": prose(200, 7400 + number)}
        body = {"model": MODEL_NAME, "messages": [head, {"role": "user", "content": "?"}], "max_tokens": 1}
        httpx.post(gateway.url + CHAT, json=body, headers={"x-request-id": name}, timeout=120).raise_for_status()
    feeds = [fresh(engine.url, "/seamark/outcomes").json() for _ in range(12)]
    assert len({feed["boot"] for feed in feeds}) == 1
    for feed in feeds:
        assert set(names) <= {name for name, *_ in feed["outcomes"]}
        came = {event[1]: event[3] for event in feed["states"] if event[0] == "came"}
        assert all(states and all(name for _, name in states) for states in map(came.get, names))
    metrics = [fresh(engine.url, path).text for path in ("/seamark/metrics", "/metrics") for _ in range(6)]
    counted = {re.search(r'seamark_engine_requests_total\{reason="cold"\} (\S+)', text)[1] for text in metrics}
    assert len(counted) == 1 and float(counted.pop()) >= len(names)
    assert all(re.search(r"^vllm:num_requests_running\{.*\} 0.0$", text, re.M) for text in metrics)


def test_an_emptied_cache_reaches_the_gateway_without_another_request_and_nothing_is_warned_of(both):
    engine, gateway = both

    def ask(seed: int, question: str) -> httpx.Response:
        head = {"role": "system", "content": prose(200, seed)}
        body = {"model": MODEL_NAME, "messages": [head, {"role": "user", "content": question}], "max_tokens": 1}
        return httpx.post(gateway.url + CHAT, json=body, timeout=120)

    seeds = range(7500, 7506)
    wait_for_predicted_hits(ask, seeds)
    httpx.post(engine.url + "/reset_prefix_cache", timeout=60).raise_for_status()
    wait_for(lambda: ["cleared"] in fresh(engine.url, "/seamark/outcomes").json()["states"])
    ask(7511, "Whose outcome is read, and so all that happened before?")
    assert is_known_as_gone(ask, seeds)
    assert "WARNING" not in gateway.log.read_text()
