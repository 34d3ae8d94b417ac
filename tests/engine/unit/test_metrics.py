"""What an API server makes of the engine core's reports."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.reporting import metrics
from engine_patches.reporting.events_api import Feed
from engine_patches.reporting.metrics import EngineMetrics, families
from engine_patches.reporting.stats_channel import attach, report_with_stats
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.refusals import Refusal
from engine_patches.scheduler.state_events import StateEvicted

LENGTHS = {"seamark/block_size": 384, "seamark/ahead": 0}


@pytest.fixture
def feed(monkeypatch) -> Feed:
    """Of a process that serves no engine yet."""
    feed = Feed()
    monkeypatch.setattr(metrics, "feed", feed)
    monkeypatch.setattr(EngineMetrics, "_engines", set())
    return feed


def served_by(processes: int) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(_api_process_count=processes),
        # Read if this process is patched.
        cache_config=SimpleNamespace(prefix_match_unit=16, block_size=384),
        model_config=SimpleNamespace(is_hybrid=False, is_attention_free=False),
        speculative_config=None,
        kv_transfer_config=None,
        num_speculative_tokens=0,
    )


def test_connectors_are_named_with_how_states_are_kept_beside_them(feed):
    transfer = {"kv_connector": "NixlConnector", "kv_connector_module_path": "my.connectors"}
    engine = served_by(1)
    engine.kv_transfer_config = SimpleNamespace(**transfer)
    engine.device_config = SimpleNamespace(device_type="cpu")
    shown = {}
    for config in (served_by(1), engine):
        logger = EngineMetrics(config)
        logger.record(SimpleNamespace(waiting_lora_adapters={"seamark/match_unit": 16, **LENGTHS}), None)
        samples = families().info.collect()[0].samples
        shown |= {sample.labels["connector"]: sample.labels["lane"] for sample in samples}
        logger._hide()
    assert shown == {"": "", "NixlConnector": "chunk_ends"}


def test_why_hints_are_refused_is_told_as_the_engine_core_tells_it(feed, monkeypatch):
    """Before its first step by the configuration, which does not know of windows."""
    monkeypatch.setattr(metrics.ledger, "patches_live", lambda: True)
    off = served_by(1)
    off.model_config.is_hybrid = True
    off.cache_config.enable_prefix_caching = False
    told: list[str] = []

    def note() -> None:
        told.append(families().info.collect()[0].samples[0].labels["refused"])

    logger = EngineMetrics(off)
    note()
    for refusal in (Refusal("no_states", "a layer has a window, or two"), None):
        checkpoints = Checkpoints(Grid(16, 16), 384, refusal=refusal)
        stats = SimpleNamespace(waiting_lora_adapters={})
        attach(stats, checkpoints)
        logger.record(stats, None)
        note()
    logger._hide()
    assert told == ["prefix caching is off (--enable-prefix-caching)", "a layer has a window, or two", ""]


@pytest.mark.parametrize(
    ("processes", "engines", "has_all"), [(1, [0], True), (1, [0, 0], True), (2, [0], False), (1, [0, 1], False)]
)
def test_states_are_reported_only_by_the_one_api_server_of_one_engine(feed, processes, engines, has_all):
    for engine in engines:
        EngineMetrics(served_by(processes), engine)
    assert feed.has_all_events is has_all


def test_a_step_that_has_nothing_to_report_is_none_of_the_feeds_business(feed, monkeypatch):
    monkeypatch.setattr(feed, "later", None)
    EngineMetrics(served_by(1)).record(
        SimpleNamespace(waiting_lora_adapters={"seamark/match_unit": 16, **LENGTHS}), None
    )


def test_the_head_of_an_answer_finds_its_outcome_while_the_rest_can_wait(feed):
    checkpoints = Checkpoints(Grid(16, 16), 384, losing_a_state())
    checkpoints.counters.request_admitted(AdmittedRequest("chatcmpl-a-00000000", "hit", 160, 176, (163,)))
    stats = SimpleNamespace(waiting_lora_adapters={})
    attach(stats, checkpoints)
    evicted = families().evicted._value.get

    async def scenario() -> None:
        before = evicted()
        EngineMetrics(served_by(1)).record(stats, None)
        assert (outcome := feed.take_latest("a")) is not None and outcome.hit_tokens == 160
        assert evicted() == before
        assert feed.after(0)["states"] == [["gone", "5c"]]
        assert evicted() == before + 1

    asyncio.run(scenario())


def losing_a_state() -> Any:
    """The states of a scheduler, one of which can no longer be found."""
    events = SimpleNamespace(pending=True, take=lambda: [(1, StateEvicted("5c"))])
    return SimpleNamespace(events=events, bytes_held=0, pins=SimpleNamespace(num_blocks=0))


def test_requests_and_states_arrive_where_a_gateway_reads_them(feed):
    checkpoints = Checkpoints(Grid(16, 16), 384, losing_a_state())
    checkpoints.counters.request_admitted(AdmittedRequest("chatcmpl-a-00000000", "hit", 160, 176, (163,)))
    stats = SimpleNamespace(waiting_lora_adapters={"an adapter": 1})
    attach(stats, checkpoints)
    EngineMetrics(served_by(1)).record(stats, None)
    answer = feed.after(0)
    assert [outcome[:3] for outcome in answer["outcomes"]] == [("a", "hit", 160)]
    assert answer["states"] == [["gone", "5c"]]
    assert stats.waiting_lora_adapters == {"an adapter": 1}


def test_the_statistics_of_a_scheduler_carry_the_report_where_it_makes_any(feed):
    scheduler = SimpleNamespace(seamark=Checkpoints(Grid(16, 16), 384, losing_a_state()))
    stats = SimpleNamespace(waiting_lora_adapters={})
    make_stats = report_with_stats(lambda scheduler, made: made)
    assert make_stats(scheduler, None) is None and make_stats(scheduler, stats) is stats
    EngineMetrics(served_by(1)).record(stats, None)
    assert feed.after(0)["states"] == [["gone", "5c"]]


def test_what_became_of_a_pin_arrives_with_the_outcome_of_its_request(feed):
    checkpoints = Checkpoints(Grid(16, 16), 384)
    counters = checkpoints.counters
    for name, fate in (("chatcmpl-a/b-00000000", "pinned"), ("chatcmpl-c-00000000", "no_room")):
        counters.request_admitted(AdmittedRequest(name, "cold", 0, 0, (163,)))
        counters.prompt_pinned(name, fate)
    counters.prompt_pinned("chatcmpl-unknown-00000000", "released")
    stats = SimpleNamespace(waiting_lora_adapters={})
    attach(stats, checkpoints)
    EngineMetrics(served_by(1)).record(stats, None)
    headers = [outcome.header for name in ("a/b", "c") if (outcome := feed.take_latest(name)) is not None]
    assert headers == [b"cold,0,0,163,pinned", b"cold,0,0,163,no_room"]
    assert feed.take_latest("unknown") is None and not stats.waiting_lora_adapters
