"""A worker without a gateway: a child of its own tries its drafts, and ends with the trial or with its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys

import pytest

from proxy.commands import draft_trial
from proxy.commands.draft_trial import OwnTrial, with_worker
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
    await asyncio.sleep(0.1)
    assert not running.done()
    del upstream.faults[worker.url]
    async with asyncio.timeout(60):
        await running
    assert not worker.drafting.asked


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


async def test_it_ends_with_the_process_that_has_started_it():
    worker = RecordingWorker()
    trial, upstream = own_trial(worker)
    upstream.faults[worker.url] = Unreachable("connection refused")
    async with asyncio.timeout(60):
        await with_worker(trial, parent=-1)


def test_the_module_runs_by_itself_and_leaves_nothing_in_the_output():
    words = [sys.executable, "-m", "proxy.commands.draft_trial", "--worker", "http://127.0.0.1:9", "--parent", "-1"]
    ended = subprocess.run(words, capture_output=True, timeout=120, env=dict(os.environ), check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
