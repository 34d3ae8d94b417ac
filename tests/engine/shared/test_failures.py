"""Clients that leave, an engine that sleeps, one without the plugin, and one that dies, which no later test uses."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import pytest

from proxy.bench.harness.client import CHAT, open_client, prose
from proxy.bench.harness.servers import MODEL_NAME, Server
from tests.harness.engines import SharedServers
from tests.harness.gateways import metric
from tests.harness.waiting import until, wait_for

TOKENS = 7000  # of an answer that takes minutes


def chat(text: str = "Hello", **fields: object) -> dict:
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def ask(gateway: Server) -> httpx.Response:
    return httpx.post(gateway.url + CHAT, json=chat(temperature=0), timeout=60)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_a_real_engine_behind_the_gateway(servers: SharedServers, stream):
    def running() -> float:
        return metric(servers.seamark, "vllm:num_requests_running")

    before = metric(servers.seamark, "vllm:generation_tokens_total")
    async with open_client() as client:
        body = chat(stream=stream, max_tokens=TOKENS, ignore_eos=True)
        asking = asyncio.create_task(client.post(servers.gateway.url + CHAT, json=body))
        await until(lambda: running() == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: running() == 0 and metric(servers.gateway, "seamark_inflight") == 0)
    assert metric(servers.seamark, "vllm:generation_tokens_total") - before < TOKENS / 2


@pytest.mark.parametrize(
    ("sleep", "wake", "words"),
    [
        ("/sleep?level=1", "/wake_up", "asleep (level 1): POST /wake_up wakes it"),
        ("/pause", "/resume", "asleep (paused): POST /resume wakes it"),
    ],
)
def test_an_engine_that_sleeps_gets_no_request_until_it_is_woken(servers: SharedServers, sleep, wake, words):
    engine, gateway = servers.tight, servers.tight_gateway
    before = ask(gateway).raise_for_status().json()["choices"]
    httpx.post(engine.url + sleep, timeout=60).raise_for_status()
    try:
        wait_for(lambda: httpx.get(gateway.url + "/ready").status_code == 503)
        refused = ask(gateway)
        assert refused.status_code == 503 and words in refused.json()["error"]["message"]
    finally:
        httpx.post(engine.url + wake, timeout=60).raise_for_status()
    assert ask(gateway).json()["choices"] == before  # a request has the gateway look again


def test_a_worker_without_the_plugin_is_served_and_shown(servers: SharedServers):
    answer = ask(servers.untouched_gateway)
    assert answer.status_code == 200 and "x-seamark-boundary" not in answer.headers
    assert answer.headers["x-seamark-reason"] == "unpatched"
    metrics = httpx.get(servers.untouched_gateway.url + "/metrics").text
    assert f'seamark_engine_patched{{worker="{servers.untouched.url[7:]}"}} 0.0' in metrics
    assert "seamark_" not in httpx.get(servers.untouched.url + "/metrics").text


@pytest.mark.ends_a_server
def test_a_worker_killed_in_the_middle_of_a_stream_and_then_gone(servers: SharedServers):
    gateway, worker = servers.untouched_gateway, servers.untouched.process
    body, text = chat(prose(20, 1), stream=True, max_tokens=2000, ignore_eos=True), b""
    with httpx.stream("POST", gateway.url + CHAT, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for chunk in answer.iter_raw():
            text += chunk
            if text.count(b"data:") > 5 and worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    last = text.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_failed"
    assert b"[DONE]" not in text
    gone = ask(gateway)
    assert gone.status_code == 503 and gone.headers["retry-after"]
    assert set(gone.json()["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(gateway.url + "/health").status_code == 200
    assert httpx.get(gateway.url + "/ready").status_code == 503
