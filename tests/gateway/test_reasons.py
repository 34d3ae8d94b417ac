"""Reasons that a real engine takes too long to show, and those of gateway and engine together."""

from __future__ import annotations

import httpx
import pytest

from proxy.bench.harness.servers import Servers
from tests.harness.gateways import chat, post, start_gateway, told, wait_for
from tests.harness.recording_worker import RecordingWorker, recording_worker

CHAT = "/v1/chat/completions"

LONG = "You pilot ships into the harbour, and you name the tide before you name the berth. " * 6


@pytest.mark.parametrize("stream", [False, True])
def test_not_worth_it(fleet: Servers, stream):
    """An engine whose passes are dear: its answers are recorded ones, its word of this request is what counts."""
    with recording_worker(cached=0) as worker:
        gateway = start_gateway(fleet, worker)
        body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "?"}]}
        worker.reason = "not_worth_it"
        httpx.post(gateway.url + CHAT, json=body)
        told(worker)
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        httpx.post(gateway.url + CHAT, json={**body, **options}, headers={"x-request-id": "dear"})
        told(worker)
        assert httpx.get(f"{gateway.url}/seamark/requests/dear").json()["reason"] == "not_worth_it"
        assert 'seamark_miss_total{model="m",reason="not_worth_it"} 1.0' in httpx.get(gateway.url + "/metrics").text
        # What is not worth it is not kept: nobody expects it again.
        assert httpx.post(gateway.url + CHAT, json=body).headers["x-seamark-predicted"] == "0"


def test_no_facts(fleet: Servers, worker: RecordingWorker):
    worker.hang_renders, worker.cached = True, 0
    gateway = start_gateway(fleet, worker, flags=("--render-timeout", "0.2"))
    answer = post(gateway, chat("Tide?"))
    assert answer.status_code == 200 and answer.headers["x-seamark-reason"] == "no_facts"
    explained = httpx.get(f"{gateway.url}/seamark/requests/{answer.headers['x-request-id']}").json()
    assert explained["reason"] == "no_facts" and explained["lookup"] == "none"


def test_worker_restarted(fleet: Servers):
    """The one case a real engine takes too long to show: its answers are recorded ones."""
    with recording_worker() as worker:
        gateway = start_gateway(fleet, worker, flags=("--health-interval", "0.1"))
        body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "?"}]}
        httpx.post(gateway.url + CHAT, json=body)
        worker.boot, worker.cached = "1.8e+09", 0
        status = gateway.url + "/seamark/status"
        wait_for(lambda: httpx.get(status).json()["workers"][0]["boot"].endswith("#1.8e+09"))
        answer = httpx.post(gateway.url + CHAT, json=body)
        assert answer.headers["x-seamark-reason"] == "worker_restarted"


def test_beside_a_draft_head_a_full_hit_is_a_hit(fleet: Servers):
    """An engine whose requests have to share 16 tokens more than they find."""
    with recording_worker(cached=0, ahead=16) as worker:
        gateway = start_gateway(fleet, worker)
        body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "?"}]}
        httpx.post(gateway.url + CHAT, json=body)
        told(worker)
        body["messages"][1]["content"] = "High tide?"
        predicted = int(httpx.post(gateway.url + CHAT, json=body).headers["x-seamark-predicted"])
        told(worker)
        shared = len(f"<system>{LONG}<user>")
        assert predicted == (shared - 16) // 16 * 16
        worker.cached = predicted
        body["messages"][1]["content"] = "Low tide?"
        answer = httpx.post(gateway.url + CHAT, json=body)
        assert answer.headers["x-seamark-reason"] == "hit" and int(answer.headers["x-seamark-predicted"]) == predicted
        explained = httpx.get(f"{gateway.url}/seamark/requests/{answer.headers['x-request-id']}").json()
        assert explained["delivered"] == explained["shareable"] == predicted
