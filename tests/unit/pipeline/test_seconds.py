"""Seconds saved and spent, as the gateway counts them: at the pace that the worker's engine tells."""

from __future__ import annotations

import pytest

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
