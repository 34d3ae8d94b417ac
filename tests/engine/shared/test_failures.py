"""Bad input and dying workers, on real engines. The worker that dies here is used by no later test of this file."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.engines import SharedServers

CHAT = "/v1/chat/completions"

ENVELOPE = {"message", "type", "param", "code"}


def chat(text: str = "Hello", **fields) -> dict:
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


def post(servers: SharedServers, body) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(servers.gateway.url + CHAT, content=content, headers=headers, timeout=60)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"not json", 400),
        ({}, 400),
        (chat(messages=[{"role": "user", "content": {"a": 1}}]), 400),
        (chat(vllm_xargs=[1]), 400),
        (chat(vllm_xargs={"seamark_boundaries": {"a": 1}}), 200),  # replaced by the gateway's own
        (chat(model="made-up"), 404),
        (chat("tide " * 1_000_000), 400),  # 5 MB, longer than the model takes
    ],
)
def test_bad_input_gets_openais_envelope_and_the_right_status(servers, body, status):
    answer = post(servers, body)
    assert answer.status_code == status
    if status != 200:
        assert set(answer.json()["error"]) >= ENVELOPE
        assert "Traceback" not in answer.text


def test_a_worker_without_the_plugin_is_served_and_shown(servers):
    answer = httpx.post(servers.untouched_gateway.url + CHAT, json=chat(), timeout=60)
    assert answer.status_code == 200 and "x-seamark-boundary" not in answer.headers
    assert answer.headers["x-seamark-reason"] == "unpatched"
    metrics = httpx.get(servers.untouched_gateway.url + "/metrics").text
    assert f'seamark_engine_patched{{worker="{servers.untouched.url[7:]}"}} 0.0' in metrics
    assert "seamark_" not in httpx.get(servers.untouched.url + "/metrics").text


@pytest.mark.ends_a_server
def test_a_worker_killed_in_the_middle_of_a_stream_and_then_gone(servers):
    body = chat(prose(20, 1), stream=True, max_tokens=2000, ignore_eos=True)
    text = b""
    with httpx.stream("POST", servers.untouched_gateway.url + CHAT, json=body, timeout=60) as answer:
        assert answer.status_code == 200
        for chunk in answer.iter_raw():
            text += chunk
            if text.count(b"data:") > 5 and servers.untouched.process.poll() is None:
                os.killpg(servers.untouched.process.pid, signal.SIGKILL)
                servers.untouched.process.wait()
    last = text.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_failed"
    assert b"[DONE]" not in text
    gone = httpx.post(servers.untouched_gateway.url + CHAT, json=chat(), timeout=60)
    assert gone.status_code == 503 and gone.headers["retry-after"]
    assert set(gone.json()["error"]) == ENVELOPE
    assert httpx.get(servers.untouched_gateway.url + "/health").status_code == 200
    assert httpx.get(servers.untouched_gateway.url + "/ready").status_code == 503
