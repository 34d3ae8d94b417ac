"""The trial of hints beside drafts, for a worker without a gateway: when it begins, and with what it ends."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import pytest

from proxy.commands import draft_trial
from proxy.commands.draft_trial import KEY_VARIABLE, OwnTrial, main
from proxy.http.client import Unreachable
from tests.harness.drafting_engine import DraftingEngine
from tests.harness.in_memory_gateway import DirectUpstream
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("GRACE_SECONDS", "IDLE_SECONDS", "POLL_SECONDS"):
        monkeypatch.setattr(draft_trial, name, 0.01)
    monkeypatch.setattr("proxy.fleet.idle_turns.IDLE_SECONDS", 0.05)
    monkeypatch.setattr("proxy.fleet.self_check.POLL_SECONDS", 0.01)
    caplog.set_level(logging.INFO, "seamark.drafts")


def own_trial(worker: RecordingWorker) -> tuple[OwnTrial, DirectUpstream]:
    worker.url = worker.url or "http://worker-0"
    upstream = DirectUpstream(worker)
    return OwnTrial(upstream, worker.url), upstream


@pytest.mark.parametrize(("fault", "state"), [({}, "open"), ({"hits_off": 0.25}, "closed")])
async def test_it_comes_to_the_verdict_that_a_gateway_would_and_ends(fault, state, caplog):
    worker = RecordingWorker(drafting=DraftingEngine(**fault), ahead=1)
    trial, _ = own_trial(worker)
    async with asyncio.timeout(120):
        await trial.run()
    assert worker.drafting.state == state and len(worker.drafting.commands) == 1
    assert "hints are on trial" in caplog.text


async def test_it_waits_until_the_server_answers_and_does_nothing_where_nothing_is_on_trial():
    worker = RecordingWorker(drafting=DraftingEngine(state="on"), ahead=1)
    trial, upstream = own_trial(worker)
    upstream.faults[worker.url] = Unreachable("connection refused")
    running = asyncio.create_task(trial.run())
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert not running.done()
    del upstream.faults[worker.url]
    async with asyncio.timeout(60):
        await running
    assert not worker.drafting.asked and trial.worker.up


async def test_a_gateway_that_has_taken_the_trial_keeps_it(in_memory):
    worker = RecordingWorker(drafting=DraftingEngine(), ahead=1)
    gateway = await in_memory(worker, self_check_interval=0.1)
    await until(lambda: worker.drafting.asked)  # the gateway has begun
    trial, _ = own_trial(worker)
    async with asyncio.timeout(120):
        await trial.run()
    assert worker.drafting.commands == ["open:engine-1"]
    await gateway.shows(lambda status: status["workers"][0]["drafts"]["state"] == "open")
    by_child = [each for each in worker.requests if each.header(b"x-request-id").startswith(b"own-drafts-worker-")]
    assert len(by_child) <= 30  # a prompt at most, which had begun before it saw the gateway's


async def test_a_server_that_is_another_one_now_ends_it():
    """The worker that this was started for is gone: nothing of the next one is tried."""
    worker = RecordingWorker(drafting=DraftingEngine(), ahead=1, more_metrics="vllm:num_requests_running 1.0\n")
    trial, _ = own_trial(worker)
    running = asyncio.create_task(trial.run())
    async with asyncio.timeout(60):
        while not trial.worker.up:
            await asyncio.sleep(0)
        worker.boot = "1.8e+09"
        await running
    assert not worker.drafting.commands and not trial.worker.up


async def test_a_busy_worker_is_left_alone_until_it_is_idle_or_the_trial_is_overdue(monkeypatch):
    looked = 0

    class Busy(RecordingWorker):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            nonlocal looked
            looked += scope["path"] in ("/metrics", "/seamark/metrics")
            await super().__call__(scope, receive, send)

    worker = Busy(drafting=DraftingEngine(), ahead=1, more_metrics="vllm:num_requests_running 1.0\n")
    trial, _ = own_trial(worker)
    running = asyncio.create_task(trial.run())
    await until(lambda: looked > 5)
    assert not worker.drafting.asked
    monkeypatch.setattr(draft_trial, "OVERDUE_SECONDS", 0.0)
    monkeypatch.setattr("proxy.fleet.draft_gates.REST_BESIDE", 0.0)
    async with asyncio.timeout(120):
        await running
    assert worker.drafting.state == "open"


@pytest.fixture
def unlogged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets up logging for a process of its own."""
    monkeypatch.setattr(draft_trial.logging, "basicConfig", lambda **given: None)


@pytest.mark.parametrize("key", ["secret", ""])
def test_the_command_asks_with_the_workers_key_and_closes_its_connections(key, unlogged, reachable, monkeypatch):
    worker = RecordingWorker(drafting=DraftingEngine(state="on"), ahead=1, api_key=key or None)
    reachable.add(worker, "http://a:1")
    reachable.serve(monkeypatch, draft_trial)
    monkeypatch.setenv(KEY_VARIABLE, key)
    assert main(["--worker", "http://a:1", "--parent", str(os.getppid())]) == 0 and reachable.unclosed == 0
