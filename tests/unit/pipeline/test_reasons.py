"""Reasons that a real engine takes too long to show, and those of gateway and engine together."""

from __future__ import annotations

import pytest

from tests.harness.gateways import chat
from tests.harness.in_memory_gateway import told
from tests.harness.recording_worker import RecordingWorker

CHAT = "/v1/chat/completions"

LONG = "You pilot ships into the harbour, and you name the tide before you name the berth. " * 6


@pytest.mark.parametrize("stream", [False, True])
async def test_not_worth_it(in_memory, stream):
    """An engine whose passes are dear: its answers are recorded ones, its word of this request is what counts."""
    worker = RecordingWorker(cached=0)
    gateway = await in_memory(worker)
    body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "?"}]}
    worker.reason = "not_worth_it"
    await gateway.post(body)
    await told(worker)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    await gateway.post({**body, **options}, x_request_id="dear")
    await told(worker)
    assert (await gateway.explained("dear"))["reason"] == "not_worth_it"
    assert gateway.metric("seamark_miss_total", model="m", reason="not_worth_it") == 1
    # What is not worth it is not kept: nobody expects it again.
    assert (await gateway.post(body)).headers["x-seamark-predicted"] == "0"


async def test_no_facts(in_memory, worker):
    worker.hang_renders, worker.cached = True, 0
    gateway = await in_memory(worker, render_timeout=0.2)
    answer = await gateway.post(chat("Tide?"))
    assert answer.status_code == 200 and answer.headers["x-seamark-reason"] == "no_facts"
    explained = await gateway.explained(answer)
    assert explained["reason"] == "no_facts" and explained["lookup"] == "none"


async def test_worker_restarted(in_memory):
    """The one case a real engine takes too long to show: its answers are recorded ones."""
    worker = RecordingWorker()
    gateway = await in_memory(worker, health_interval=0.1)
    body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "?"}]}
    await gateway.post(body)
    worker.boot, worker.cached = "1.8e+09", 0
    await gateway.shows(lambda status: status["workers"][0]["boot"].endswith("#1.8e+09"))
    await gateway.shows(lambda status: status["workers"][0]["templates"]["m"]["learnt"])
    answer = await gateway.post(body)
    assert answer.headers["x-seamark-reason"] == "worker_restarted"


async def test_beside_a_draft_head_a_full_hit_is_a_hit(in_memory):
    """An engine whose requests have to share 16 tokens more than they find."""
    worker = RecordingWorker(cached=0, ahead=16)
    gateway = await in_memory(worker)
    body = {"model": "m", "messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "?"}]}
    await gateway.post(body)
    await told(worker)
    body["messages"][1]["content"] = "High tide?"
    predicted = int((await gateway.post(body)).headers["x-seamark-predicted"])
    await told(worker)
    shared = len(f"<system>{LONG}<user>")
    assert predicted == (shared - 16) // 16 * 16
    worker.cached = predicted
    body["messages"][1]["content"] = "Low tide?"
    answer = await gateway.post(body)
    assert answer.headers["x-seamark-reason"] == "hit" and int(answer.headers["x-seamark-predicted"]) == predicted
    explained = await gateway.explained(answer)
    assert explained["delivered"] == explained["shareable"] == predicted
