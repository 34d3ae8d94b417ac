"""What the pages say of workers and hits: each alarm and warning for its cause alone."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from proxy.boundaries.template_facts import Opener, TemplateFacts
from proxy.chat.chat import CHAT
from proxy.fleet.probe import Probed
from proxy.fleet.reports import Reports
from proxy.fleet.worker import BREAKER_FAILURES, GateReport, Worker
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
from proxy.observability.explanations import Explanation
from proxy.observability.reasons import REASON_TEXT
from proxy.observability.rolling_sums import Totals
from proxy.pipeline.gateway import Gateway
from proxy.server.status import (
    HOUR,
    MOST_REQUESTS,
    alarms,
    changing,
    drafts_status,
    live,
    redis_status,
    self_check_status,
    template_status,
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


def test_all_is_well_with_two_workers_that_have_the_plugin(gateway):
    assert (alarms(gateway), warnings(gateway)) == ([], [])


# Alarms.


@pytest.mark.parametrize(
    ("words", "boot", "says"),
    [
        ("connection refused", "b", "Worker worker-1 is down: connection refused."),
        ("", "b", "Worker worker-1 is down: it does not answer."),
        ("", "", "Worker worker-1 is down: it does not answer. It has not served since the gateway started."),
        (
            "asleep (level 1): POST /wake_up wakes it",
            "b",
            "Worker worker-1 is asleep (level 1): POST /wake_up wakes it.",
        ),
    ],
)
def test_a_worker_that_is_down_is_an_alarm_that_says_why(gateway, words, boot, says):
    worker = gateway.pool.workers[1]
    worker.up, worker.words, worker.probed = False, words, replace(worker.probed, boot=boot)
    assert (alarms(gateway), warnings(gateway)) == ([says], [])


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


def test_a_worker_without_the_plugin_is_told_with_its_cure_while_it_is_up(gateway):
    worker = gateway.pool.workers[1]
    set_up(worker, metrics=metrics(None))
    (only,) = warnings(gateway)
    assert only.startswith("Worker worker-1 runs without") and "seamark doctor --worker http://worker-1" in only
    worker.up = False
    assert warnings(gateway) == []


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


async def test_a_worker_that_drafts_is_on_trial_while_it_is_up(in_memory):
    checking = (await in_memory(RecordingWorker(), is_started=False, self_check_interval=60)).gateway
    blind = (await in_memory(RecordingWorker(), is_started=False)).gateway
    for gateway, says in ((checking, "hints are off until its trial is over"), (blind, "self_check_interval is 0")):
        (worker,) = gateway.pool.workers
        set_up(worker, metrics=metrics(replace(ENGINE, drafts="trial")))
        (only,) = warnings(gateway)
        assert only.startswith("Worker worker-0 drafts") and says in only and "()" not in only
        assert drafts_status(worker, gateway) == {"state": "trial", "trial": ""}
        for state in ("open", "closed", "on", "off", ""):
            set_up(worker, metrics=metrics(replace(ENGINE, drafts=state)))
            assert warnings(gateway) == [], state
            assert (drafts_status(worker, gateway) or {}).get("state", "") == state
        set_up(worker, metrics=metrics(replace(ENGINE, drafts="trial")))
        worker.up = False
        assert warnings(gateway) == []


async def test_how_far_a_trial_is_stands_in_its_warning(in_memory, monkeypatch):
    gateway = (await in_memory(RecordingWorker(), is_started=False, self_check_interval=60)).gateway
    (worker,) = gateway.pool.workers
    set_up(worker)
    worker.draft_gate = GateReport("trial", "g", "", read_at=time.perf_counter())
    monkeypatch.setattr(gateway.self_check.gates, "words", lambda of: "7 of 30 prompts" if of is worker else "")
    (only,) = warnings(gateway)
    assert only.endswith("until its trial is over (7 of 30 prompts).")
    assert worker_status(worker, gateway)["drafts"] == {"state": "trial", "trial": "7 of 30 prompts"}


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


# One worker.


def test_a_worker_is_shown_as_it_was_found_and_as_it_is_used(gateway):
    worker = gateway.pool.workers[0]
    shown = worker_status(worker, gateway)
    assert shown == {
        "url": "http://worker-0",
        "name": "worker-0",
        "up": True,
        "why_down": "",
        "asleep": False,
        "refused": "",
        "breaker": "closed",
        "warming": False,
        "boot": "b#1",
        "inflight": 0,
        "prefill_tokens": 0,
        "others": {"requests": 0, "prefill_tokens": 0},
        "frontend": {"name": "", "lacks": ()},
        "reports": {"url": "http://worker-0:1", "why_not": ""},
        "models": [],
        "drafts": None,
        "engine": shown["engine"],
        "templates": {},
    }
    assert (shown["engine"]["version"], shown["engine"]["match_unit"]) == ("0.9.0", 16)
    for number in range(BREAKER_FAILURES):
        worker.breaker.failed(number)
    set_up(worker, metrics=metrics(None), models=({"id": "m"}, {"id": "n"}))
    shown = worker_status(worker, gateway)
    assert (shown["breaker"], shown["engine"], shown["models"]) == ("open", None, ["m", "n"])


def test_each_model_has_its_template_whose_facts_are_known_or_not(gateway):
    worker = gateway.pool.workers[0]
    set_up(worker, models=({"id": "b"}, {"id": "a"}))
    shown = worker_status(worker, gateway)["templates"]
    assert list(shown) == ["a", "b"]
    assert shown["a"] == {"learnt": False, "known": [], "unknown": []}


def test_a_template_is_shown_with_what_it_determines():
    names = ["end of a user turn", "end of a tool turn", "end of a system turn"]
    names += [f"opener: {place}{tools}" for place in ("first", "alone", "user") for tools in ("", " with tools")]
    names += ["opener: tool with tools", "opener: results with tools"]
    assert template_status(TemplateFacts()) == {"learnt": True, "known": [], "unknown": names}
    facts = TemplateFacts(
        {"user": 0},
        {("first", True): Opener((1,)), ("alone", False): Opener((2,)), ("tool", False): Opener((3,))},
    )
    shown = template_status(facts)
    assert shown["known"] == ["end of a user turn", "opener: first with tools", "opener: alone"]
    assert sorted([*shown["known"], *shown["unknown"]]) == sorted(names)
    assert template_status(None) == {"learnt": False, "known": [], "unknown": []}


async def test_the_self_check_is_shown_unless_it_is_off(in_memory):
    off = (await in_memory(RecordingWorker(), is_started=False)).gateway
    on = (await in_memory(RecordingWorker(), is_started=False, self_check_interval=60)).gateway
    assert self_check_status(off) is None
    on.self_check.checked, on.pool.workers[0].cache.hints_allowed = 7, False
    assert self_check_status(on) == {"checked": 7, "differs": 0, "hints_off": True, "cache_off": False}


# The live page.


def test_the_live_page_of_a_gateway_without_requests(gateway):
    shown = live(gateway)
    assert gateway.created == shown["since"] <= shown["now"] <= time.time()
    nothing = {"requests": 0, "prompt": 0, "shareable": 0, "came": 0, "delivered": 0, "changed": 0}
    assert shown["sums"] == {"minute": nothing, "hour": nothing, "whole": nothing}
    assert shown["efficiency"] == {"now": None, "hour": None, "minutes": [None] * 60}
    assert shown["day"] == [[0, 0, 0]] * 144
    assert (shown["shadow_mode"], shown["shadow"], shown["changing"]) == (False, None, None)
    assert (shown["seconds_saved"], shown["requests"], shown["inflight"], shown["queued"]) == (None, [], 0, 0)
    assert shown["time"]["measurable"] is True and shown["words"].keys() == REASON_TEXT.keys()
    assert [each["name"] for each in shown["workers"]] == ["worker-0", "worker-1"]
    for worker in gateway.pool.workers:
        assert live(gateway)["time"]["measurable"] is True
        set_up(worker, metrics=metrics(None))
        worker.inflight = 3
    assert live(gateway)["time"]["measurable"] is False and live(gateway)["inflight"] == 6
    assert len(live(gateway)["warnings"]) == 2


async def test_the_live_page_shows_sums_and_the_newest_requests(in_memory):
    gateway = (await in_memory(RecordingWorker(), is_started=False)).gateway
    gateway.accounting.sums.add(100, 80, 60, 5)
    explanations = gateway.accounting.explanations
    for number in range(MOST_REQUESTS + 1):
        explanations.begin(str(number), None, lambda _, name=str(number): Explanation(name, CHAT))
    shown = live(gateway)
    wanted = {"requests": 1, "prompt": 100, "shareable": 80, "came": 60, "delivered": 60, "changed": 5}
    assert shown["sums"] == {"minute": wanted, "hour": wanted, "whole": wanted}
    assert (shown["efficiency"]["now"], shown["efficiency"]["minutes"][-1]) == (0.75, 0.75)
    assert shown["day"][-1] == [100, 80, 60]
    names = [each["request_id"] for each in shown["requests"]]
    assert names == [str(number) for number in range(MOST_REQUESTS, 0, -1)]


async def test_in_shadow_mode_the_live_page_shows_what_would_have_come(in_memory, monkeypatch):
    gateway = (await in_memory(RecordingWorker(), is_started=False, shadow=True)).gateway
    gateway.accounting.sums.add(7, 7, 7)
    gateway.shadow.sums.add(100, 80, 60)
    shown = live(gateway)
    assert shown["shadow_mode"] is True and shown["shadow"] is None and shown["sums"]["whole"]["prompt"] == 100
    monkeypatch.setattr(type(gateway.shadow), "judged", 1)
    assert live(gateway)["shadow"] == gateway.shadow.would_save()


@pytest.mark.parametrize(
    ("shareable", "changed", "is_told"),
    [(10, 975, True), (900, 100, True), (901, 99, False), (985, 0, False), (0, 0, False)],
)
def test_a_tenth_of_what_prompts_have_in_common_is_worth_a_headline(shareable, changed, is_told):
    found = changing(Totals(2, 2000, shareable, shareable, shareable, changed), [])
    wanted = {"lost": changed, "common": shareable + changed, "text": None, "cure": None}
    assert found == (wanted if is_told else None)


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
