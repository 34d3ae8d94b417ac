"""What a real engine says while it sleeps or is paused, and that its gateway believes it."""

from __future__ import annotations

import httpx
import pytest

from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT
from tests.harness.waiting import wait_for

BODY = {
    "model": MODEL_NAME,
    "messages": [{"role": "user", "content": "High tide?"}],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.mark.parametrize(
    ("sleep", "wake", "words"),
    [
        ("/sleep?level=1", "/wake_up", "asleep (level 1): POST /wake_up wakes it"),
        ("/pause", "/resume", "asleep (paused): POST /resume wakes it"),
    ],
)
def test_an_engine_that_sleeps_gets_no_request_until_it_is_woken(servers: SharedServers, sleep, wake, words):
    engine, gateway = servers.tight, servers.tight_gateway

    def ask() -> httpx.Response:
        return httpx.post(gateway.url + CHAT, json=BODY, timeout=60)

    before = text(ask())
    httpx.post(engine.url + sleep, timeout=60).raise_for_status()
    try:
        wait_for(lambda: httpx.get(gateway.url + "/ready").status_code == 503)
        refused = ask()
        assert refused.status_code == 503 and words in refused.json()["error"]["message"]
    finally:
        httpx.post(engine.url + wake, timeout=60).raise_for_status()
    assert text(ask()) == before  # a request has the gateway look again


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])
