"""A worker that has restarted gets the hottest prefixes back before it gets requests."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found
from proxy.chat.chat import CHAT
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet
from proxy.http.client import Broken, Unreachable
from proxy.metrics import Metrics
from proxy.pipeline.replayer import Replayed
from proxy.pipeline.warm_up import WarmUp
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


PROMPT = WarmupRequest(CHAT, b"{}", (), {}, Found((Boundary("system", b"s", "first:1"),)), "m")


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (Replayed(200, b"usage"), "done"),
        (Replayed(503, b"no"), "failed"),
        (Unreachable("refused"), "failed"),
        (Broken("gone"), "failed"),
    ],
)
async def test_a_replay_is_counted_and_its_cost_if_it_was_computed(answer, result):
    kept, metrics, sent, spent = WarmupSet(10**6), Metrics(), [], []

    async def send(worker: Any, prompt: WarmupRequest) -> Replayed:
        sent.append(prompt.model)
        if isinstance(answer, Exception):
            raise answer
        return answer

    accounting = SimpleNamespace(replayed=lambda *what: spent.append(what))
    part = WarmUp(kept, SimpleNamespace(send=send), accounting, metrics)  # type: ignore[arg-type]
    worker = SimpleNamespace(name="w", takes_hints=True, names=SimpleNamespace(templates={"m": "m"}))
    await part.prepare(worker)  # type: ignore[arg-type]
    assert sent == [] and part.held == 0
    for key, model in ((b"s", "m"), (b"t", "another worker's")):
        kept.add(key, 100, (), PROMPT._replace(model=model))
    await part.prepare(worker)  # type: ignore[arg-type]
    assert sent == ["m"] and part.held == kept.held > 0
    labels = {"worker": "w", "result": result}
    assert metrics.registry.get_sample_value("seamark_replays_total", labels) == 1
    assert spent == ([("m", worker, b"usage")] if result == "done" else [])
    worker.takes_hints = False
    await part.prepare(worker)  # type: ignore[arg-type]
    assert sent == ["m"]
