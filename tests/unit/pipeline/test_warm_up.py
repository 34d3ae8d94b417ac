"""A worker that has restarted gets the hottest prefixes back before it gets requests."""

from __future__ import annotations

import json

import pytest

from tests.harness.gateways import chat
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until


async def test_a_restarted_worker_is_given_the_hot_prefixes_first(in_memory):
    worker = RecordingWorker()
    other = RecordingWorker()
    gateway = await in_memory(worker, other, health_interval=0.2)
    for number in range(4):
        owner = (await gateway.post(chat(f"{number}", max_tokens=50, stream=True))).headers["x-seamark-worker"]
    restarted, stays = (worker, other) if owner in worker.url else (other, worker)
    restarted.hold.set()  # the replay takes a while
    restarted.requests.clear()
    restarted.boot = "1.8e+09"
    await until(lambda: restarted.requests)
    sent = json.loads(restarted.requests[0].body)
    assert (sent["max_tokens"], sent["stream"]) == (1, False)
    assert sent["vllm_xargs"]["seamark_boundaries"]
    during = await gateway.post(chat("during"))
    assert during.headers["x-seamark-worker"] in stays.url
    restarted.hold.clear()
    await until(lambda: gateway.metric("seamark_replays_total") >= 1)
    await gateway.shows(lambda status: not any(each["warming"] for each in status["workers"]))
    # The other holds it too by now; gone, the restarted one is known to hold it.
    stays.models = ()
    await gateway.shows(lambda status: [] in [each["models"] for each in status["workers"]])
    after = await gateway.post(chat("after"))
    assert after.headers["x-seamark-worker"] in restarted.url
    assert int(after.headers["x-seamark-predicted"]) > 0


@pytest.mark.parametrize("seconds", [0.2, 3600])
async def test_without_another_worker_nobody_waits_for_a_replay_which_is_bounded(in_memory, worker, seconds):
    gateway = await in_memory(worker, replay_seconds=seconds)
    for number in range(3):
        await gateway.post(chat(f"{number}"))
    worker.held_text = b'"max_tokens":1'  # replays
    worker.hold.set()
    worker.boot = "1.8e+09"
    await until(lambda: any(b'"max_tokens":1' in request.body for request in worker.requests))
    assert (await gateway.post(chat("at once"))).status_code == 200
    if seconds < 1:
        await gateway.shows(lambda status: not any(each["warming"] for each in status["workers"]))
    else:
        assert any(each["warming"] for each in (await gateway.status())["workers"])
