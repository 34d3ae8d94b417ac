"""Seconds saved and spent, as the gateway counts them: at the pace that the worker's engine tells."""

from __future__ import annotations

import pytest

from proxy.bench.harness.servers import Servers
from tests.harness.fake_engine import template
from tests.harness.gateways import chat, metric, post, start_gateway, wait_for
from tests.harness.recording_worker import recording_worker

PACE = "seamark_pass_seconds 0.5\nseamark_token_seconds 0.001\n"

SAVED, SPENT = "seamark_seconds_saved_total", "seamark_seconds_spent_total"


def test_cached_tokens_are_seconds_saved_at_the_pace_of_their_worker(fleet: Servers):
    with recording_worker(cached=160) as worker:
        worker.more_metrics = PACE
        gateway = start_gateway(fleet, worker)
        post(gateway, chat("one"))
        post(gateway, chat("two", stream=True))
        wait_for(lambda: metric(gateway, SAVED) == pytest.approx(2 * 160 * 0.001))
        assert 0 < metric(gateway, SPENT) < 10  # two prompts were read


def test_nothing_is_saved_while_the_engine_has_not_learnt_its_pace(fleet: Servers):
    with recording_worker(cached=160) as worker:
        gateway = start_gateway(fleet, worker)
        post(gateway, chat("one"))
        assert metric(gateway, "seamark_cached_tokens_total") == 160 and metric(gateway, SAVED) == 0


def test_a_replay_is_seconds_spent_at_the_pace_from_before_the_restart(fleet: Servers):
    with recording_worker(cached=0) as worker:
        worker.more_metrics = PACE
        gateway = start_gateway(fleet, worker, flags=("--health-interval", "0.1"))
        for question in ("one", "two", "six"):
            post(gateway, chat(question))
        prompt = len(template(chat("one")))
        before = metric(gateway, SPENT)
        worker.more_metrics, worker.boot = "", "1.8e+09"
        wait_for(lambda: metric(gateway, 'seamark_replays_total{result="done"') == 1)
        assert metric(gateway, SPENT) - before == pytest.approx(0.5 + prompt * 0.001)
