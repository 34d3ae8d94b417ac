"""A gateway beside one worker: its metrics with ours, and ready when it is."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.http.client import Unreachable
from tests.harness.gateways import CHAT, SYSTEM_END, chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker

VLLM = """# HELP vllm:num_requests_waiting Number of requests waiting.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
# HELP seamark_seconds_saved_total Prefill not computed
# TYPE seamark_seconds_saved_total counter
seamark_seconds_saved_total 2.0
"""


async def values(gateway: InMemoryGateway) -> dict[str, float]:
    text = (await gateway.get("/metrics")).text
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))  # which a strict reader wants
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: sample.value for sample in samples if "worker" not in sample.labels}


async def test_a_picker_finds_the_workers_figures_beside_ours_for_as_long_as_the_worker_answers(in_memory):
    worker = RecordingWorker(more_metrics=VLLM)
    gateway = await in_memory(worker, sidecar=True)
    answers = [await gateway.post(chat(question)) for question in ("Tide?", "Ebb?")]
    assert all("x-seamark-boundary" in answer.headers for answer in answers)
    assert int(answers[1].headers["x-seamark-predicted"]) // 16 == SYSTEM_END // 16
    shown = await values(gateway)
    assert shown["vllm:num_requests_waiting"] == 3 and shown["seamark_seconds_saved_total"] == 2
    assert "seamark_queued" in shown and (await gateway.get("/ready")).status_code == 200
    gateway.upstream.faults[worker.url] = Unreachable("connection refused")
    await gateway.shows(lambda status: not status["workers"][0]["up"])
    assert [(await gateway.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]
    shown = await values(gateway)
    assert "seamark_queued" in shown and "vllm:num_requests_waiting" not in shown


@pytest.mark.parametrize("sidecar", [False, True])
async def test_the_hint_header_of_a_client_goes_no_further(in_memory, worker, sidecar):
    gateway = await in_memory(worker, sidecar=sidecar)
    for path in (CHAT, "/v1/other"):
        await gateway.post(chat("Tide?"), path, x_seamark_boundaries="163")
        assert b"x-seamark-boundaries" not in dict(worker.requests[-1].headers)
