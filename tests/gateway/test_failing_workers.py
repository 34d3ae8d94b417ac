"""Workers that fail: what is sent again, who is taken out, and what reaches the client of an answer that is none."""

from __future__ import annotations

import time

from proxy.fleet.worker import BREAKER_FAILURES
from tests.harness.gateways import chat, metric, post, start_gateway
from tests.harness.raw_worker import raw_worker
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

EMBEDDINGS = "/v1/embeddings"


def dies(body: bytes, served: int) -> None:
    """A worker that has worked on a request for a while: what it was sent is not lost on the way."""
    time.sleep(0.3)


def test_what_a_worker_has_read_is_never_sent_again(fleet):
    with raw_worker(dies) as worker:
        gateway = start_gateway(fleet, worker)
        failed = post(gateway, chat("once"))
        assert failed.status_code == 502 and failed.json()["error"]["code"] == "worker_failed"
        assert len(worker.seen[""]) == 1 and metric(gateway, "seamark_resent_total") == 0


async def test_a_worker_that_fails_while_its_health_is_well_is_taken_out(in_memory, caplog):
    sick, well = RecordingWorker(status=500), RecordingWorker()
    gateway = await in_memory(sick, well)
    answers = [await gateway.post({"model": "m", "input": f"{number}"}, EMBEDDINGS) for number in range(60)]
    failed = [answer for answer in answers if answer.status_code != 200]
    # A slow machine may come to the first trial.
    assert BREAKER_FAILURES <= len(failed) == len(sick.requests) <= BREAKER_FAILURES + 2
    name = sick.url.removeprefix("http://")
    assert gateway.metric("seamark_worker_up", worker=name) == 0
    states = {each["name"]: each["breaker"] for each in (await gateway.status())["workers"]}
    assert sorted(states.values()) == ["closed", "open"] and states[name] == "open"
    assert f"worker {name} fails" in caplog.text


async def test_a_worker_that_is_well_again_is_used_again(in_memory, monkeypatch):
    monkeypatch.setattr("proxy.fleet.worker.TRIAL_SECONDS", 0.05)
    failures = iter([500] * (BREAKER_FAILURES + 1))
    sick, well = RecordingWorker(status_by=lambda body: next(failures, 200)), RecordingWorker()
    gateway = await in_memory(sick, well)
    numbers = iter(range(10_000))

    async def is_used() -> bool:
        await gateway.post({"model": "m", "input": f"{next(numbers)}"}, EMBEDDINGS)
        return len(sick.requests) > BREAKER_FAILURES + 1

    await until(is_used)
    await until(lambda: gateway.metric("seamark_worker_up") == 2)


async def test_one_request_that_fails_everywhere_takes_no_worker_out(in_memory):
    both = [RecordingWorker(status_by=lambda body: 500 if b"poison" in body else 200) for _ in range(2)]
    gateway = await in_memory(*both)
    for _ in range(4 * BREAKER_FAILURES):
        assert (await gateway.post(chat("poison"))).status_code == 500
    assert gateway.metric("seamark_worker_up") == 2


async def test_the_last_worker_is_not_taken_out(in_memory):
    gateway = await in_memory(RecordingWorker(status_by=lambda body: 200 if b"good" in body else 500))
    words = [f"bad {number}" for number in range(2 * BREAKER_FAILURES)] + ["good", "bad", "good"]
    statuses = [(await gateway.post(chat(word))).status_code for word in words]
    assert statuses == [500] * 2 * BREAKER_FAILURES + [200, 500, 200]
