"""Seconds saved and spent, as the gateway counts them: at the pace that the worker's engine tells."""

from __future__ import annotations

import pytest

from tests.harness.fake_engine import template
from tests.harness.gateways import chat
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

PACE = "seamark_pass_seconds 0.5\nseamark_token_seconds 0.001\n"

SAVED, SPENT = "seamark_seconds_saved_total", "seamark_seconds_spent_total"


async def test_cached_tokens_are_seconds_saved_at_the_pace_of_their_worker(in_memory):
    worker = RecordingWorker(cached=160)
    worker.more_metrics = PACE
    gateway = await in_memory(worker)
    await gateway.post(chat("one"))
    await gateway.post(chat("two", stream=True))
    await until(lambda: gateway.metric(SAVED) == pytest.approx(2 * 160 * 0.001))
    assert 0 < gateway.metric(SPENT) < 10  # two prompts were read


async def test_nothing_is_saved_while_the_engine_has_not_learnt_its_pace(in_memory):
    worker = RecordingWorker(cached=160)
    gateway = await in_memory(worker)
    await gateway.post(chat("one"))
    assert gateway.metric("seamark_cached_tokens_total") == 160 and gateway.metric(SAVED) == 0


async def test_a_replay_is_seconds_spent_at_the_pace_from_before_the_restart(in_memory):
    worker = RecordingWorker(cached=0)
    worker.more_metrics = PACE
    gateway = await in_memory(worker, health_interval=0.1)
    for question in ("one", "two", "six"):
        await gateway.post(chat(question))
    prompt = len(template(chat("one")))
    before = gateway.metric(SPENT)
    worker.more_metrics, worker.boot = "", "1.8e+09"
    await until(lambda: gateway.metric("seamark_replays_total", result="done") == 1)
    assert gateway.metric(SPENT) - before == pytest.approx(0.5 + prompt * 0.001)
