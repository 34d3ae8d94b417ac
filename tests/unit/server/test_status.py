"""What the pages say of workers and hits: each alarm and warning for its cause alone."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from proxy.chat.chat import CHAT
from proxy.fleet.probe import Probed
from proxy.fleet.reports import Reports
from proxy.fleet.worker import BREAKER_FAILURES, Worker
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
from proxy.observability.explanations import Explanation
from proxy.observability.rolling_sums import Totals
from proxy.pipeline.gateway import Gateway
from proxy.server.status import (
    HOUR,
    alarms,
    changing,
    drafts_status,
    redis_status,
    warnings,
    worker_status,
)
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker

Started = Callable[..., Awaitable[InMemoryGateway]]

ENGINE = EngineInfo("0.9.0", "0.32.0", 16, 384)

READ = Reports("http://worker-0:1")


def metrics(engine: EngineInfo | None = ENGINE, **fields: Any) -> WorkerMetrics:
    return WorkerMetrics("b", engine, **fields)


def set_up(worker: Worker, **fields: Any) -> None:
    """A worker that is up and has the plugin, but for `fields` of what it was found to be."""
    worker.up = True
    worker.probed = replace(Probed("http://worker-0", boot="b#1", metrics=metrics(), reports=READ), **fields)


@pytest.fixture
async def gateway(in_memory: Started) -> Gateway:
    """Not started: it does nothing by itself, and its workers are what a test makes of them."""
    own = (await in_memory(RecordingWorker(), RecordingWorker(), is_started=False)).gateway
    for worker in own.pool.workers:
        set_up(worker)
    return own


# Alarms.


def test_a_worker_whose_requests_fail_is_an_alarm_unless_it_is_down(gateway):
    worker = gateway.pool.workers[0]
    for number in range(BREAKER_FAILURES):
        assert alarms(gateway) == []
        worker.breaker.failed(number)
    (only,) = alarms(gateway)
    assert only.startswith("Worker worker-0 fails")
    worker.up = False
    (only,) = alarms(gateway)
    assert only.startswith("Worker worker-0 is down")


@pytest.mark.parametrize(
    ("hints_off", "cache_off", "ends"),
    [
        (False, False, "Hints are still on."),
        (True, False, "Hints are off."),
        (True, True, "Hints are off and nothing is taken from the cache."),
    ],
)
def test_answers_that_differ_are_an_alarm_with_what_is_done_about_it(gateway, hints_off, cache_off, ends):
    check = gateway.self_check
    check.checked, check.differs = 1234, 1
    cache = gateway.pool.workers[1].cache
    cache.hints_allowed, cache.cache_allowed = not hints_off, not cache_off
    (only,) = alarms(gateway)
    assert only.startswith("Answers differ: 1,234 prompts") and " 1 of them" in only and only.endswith(" " + ends)
    assert warnings(gateway) == []  # the alarm says it
    check.differs = 0
    assert alarms(gateway) == [] and warnings(gateway) == ([ends] if hints_off else [])


# Warnings.


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"metrics": metrics(replace(ENGINE, refused="two groups"))}, "Worker worker-0 gets no hints: two groups."),
        (
            {"metrics": metrics(None)._replace(other_release="update the plugin")},
            "Worker worker-0 gets no hints: update the plugin.",
        ),
        (
            {"reports": Reports(why_not="HTTP 404")},
            "What the engine of worker worker-0 reports cannot be read: HTTP 404.",
        ),
    ],
)
def test_what_a_worker_that_is_up_lacks_is_told(gateway, fields, says):
    set_up(gateway.pool.workers[0], **fields)
    assert warnings(gateway) == [says]
    gateway.pool.workers[0].up = False
    assert warnings(gateway) == []


async def test_a_worker_that_drafts_is_on_trial_while_it_is_up_and_how_far_that_is(in_memory, monkeypatch):
    checking = (await in_memory(RecordingWorker(), is_started=False, self_check_interval=60)).gateway
    blind = (await in_memory(RecordingWorker(), is_started=False)).gateway
    monkeypatch.setattr(checking.self_check.gates, "words", lambda of: "7 of 30 prompts")
    for gateway, says, trial in (
        (checking, "until its trial is over (7 of 30 prompts).", "7 of 30 prompts"),
        (blind, "self_check_interval is 0", ""),
    ):
        (worker,) = gateway.pool.workers
        for state in ("trial", "open", "closed", "on", "off", ""):
            set_up(worker, metrics=metrics(replace(ENGINE, drafts=state)))
            told = warnings(gateway)
            assert len(told) == (state == "trial"), state
            assert (drafts_status(worker, gateway) or {}).get("state", "") == state
        set_up(worker, metrics=metrics(replace(ENGINE, drafts="trial")))
        (only,) = warnings(gateway)
        assert only.startswith("Worker worker-0 drafts") and says in only and "()" not in only
        assert worker_status(worker, gateway)["drafts"] == {"state": "trial", "trial": trial}
        worker.up = False
        assert warnings(gateway) == []


async def test_in_shadow_mode_that_comes_first_and_no_plugin_is_missed(in_memory):
    gateway = (await in_memory(RecordingWorker(), is_started=False, shadow=True)).gateway
    (worker,) = gateway.pool.workers
    set_up(worker, metrics=metrics(None))
    (only,) = warnings(gateway)
    assert only.startswith("Shadow mode")
    set_up(worker, metrics=metrics(None, drafts=True))
    first, second = warnings(gateway)
    assert first == only and second.startswith("Worker worker-0 drafts")
    worker.up = False
    assert warnings(gateway) == [only]
    set_up(worker, reports=Reports(why_not="HTTP 404"))
    assert warnings(gateway)[0] == only and len(warnings(gateway)) == 2


@pytest.mark.parametrize(("state", "is_told"), [("down", True), ("up", False)])
def test_a_redis_that_is_down_is_a_warning(gateway, state, is_told):
    class Sync:
        def status(self) -> dict[str, Any]:
            return {"state": state}

    assert redis_status(gateway) == {"state": "off"}
    gateway.redis_sync = Sync()
    assert redis_status(gateway) == {"state": state}
    assert [told.startswith("Redis does not answer") for told in warnings(gateway)] == [True] * is_told
    gateway.redis_sync = None  # whose end this one cannot wait for


# The live page.


def test_the_cause_is_what_cost_most_lately_and_no_salt():
    def request(text: str | None, lost: int, began: float, where: tuple[str, str] = ("message", "user")) -> Explanation:
        changed = {"what": where[0], "role": where[1], "text": text, "cure": text and f"Move {text}.", "lost": lost}
        return Explanation("r", CHAT, began=began, changed=changed)

    now = time.time()
    newest = [
        request("an id", 300, now),
        Explanation("r", CHAT, began=now),
        request("a path", 9000, now - 2 * HOUR),
        request("a date", 200, now),
        request("a date", 200, now - HOUR / 2),
        request(None, 9000, now, ("setting", "cache_salt")),
        request("a model", 1, now, ("setting", "user")),
    ]
    found = changing(Totals(9, 2000, 0, 0, 0, 700), newest)
    assert found is not None and (found["text"], found["cure"]) == ("a date", "Move a date.")
    for what, role in (("setting", "tools"), ("message", "cache_salt")):
        found = changing(Totals(9, 2000, 0, 0, 0, 700), [*newest, request("another", 9000, now, (what, role))])
        assert found is not None and found["text"] == "another"
