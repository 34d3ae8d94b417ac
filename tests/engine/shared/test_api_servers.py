"""Several API servers before one engine: each answers some requests, and tells a part of what happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import ask, open_client
from proxy.bench.harness.prompts import QUESTIONS, prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from tests.harness.engines import SharedServers

PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def gateway(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Servers(tmp_path_factory.mktemp("api-servers")) as fleet:
        engine = fleet.engine("two-api-servers", model, "1", ("--api-server-count", "2"), PROCESSES)
        engine.wait_until_ready()
        started = fleet.gateway(engine)
        started.wait_until_ready("/ready", seconds=60)
        yield started


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
