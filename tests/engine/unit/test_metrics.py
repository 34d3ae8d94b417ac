"""What the collecting process makes of engine cores' reports: each number once, and what gateways read of requests; and
that code, dashboards, alert rules and documents name the same metrics, with the same labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from engine_patches.reporting import metrics
from engine_patches.reporting.events_api import Feeds
from engine_patches.reporting.metrics import CollectedMetrics, EngineNumbers, families
from engine_patches.reporting.report import EngineReport
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest, GatewayLoad
from engine_patches.scheduler.planner import Grid
from engine_patches.scheduler.states import AdapterReplaced, CacheCleared, StateEvicted, StateStored
from engine_patches.version import version
from proxy.pipeline.gateway import Gateway
from proxy.settings import Settings
from tests.harness import dashboards
from tests.harness.dashboards import ENGINE, FOLDER, GATEWAY, family_of, metrics_in, queries, shown_in, with_metrics
from tests.harness.reports import collect, scheduler_of, sent


@pytest.fixture
def feeds(monkeypatch) -> Iterator[Feeds]:
    """Of a process to which no engine has reported yet."""
    feeds = Feeds()
    monkeypatch.setattr(metrics, "feeds", feeds)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    families()[0].clear()
    yield feeds
    families()[0].clear()


def values() -> dict[str, float]:
    """All numbers of ours, by name and labels."""
    return {
        ",".join([sample.name, *(f"{label}={value}" for label, value in sample.labels.items())]): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("seamark_") and "info" not in sample.name
    }


# By metric: what the report below adds, and what it shows as it is.
ADDED = {
    "seamark_checkpoints_written_total,kind=tail": 2,
    "seamark_checkpoints_evicted_total": 2,
    "seamark_checkpoint_hits_total": 1,
    "seamark_checkpoint_hit_tokens_total": 160,
    "seamark_pins_total,fate=pinned": 1,
    "seamark_checkpoint_files_refused_total,reason=checksum": 2,
    "seamark_checkpoint_bytes_written_total": 1000,
    "seamark_loads_declined_total": 1,
    "seamark_hints_ignored_total,reason=late": 1,
    "seamark_engine_requests_total,reason=hit": 1,
    "seamark_draft_windows_total,rows=healed": 1,
    "seamark_followers_total,fate=not_worth_it": 1,
    "seamark_followers_total,fate=held": 1,
    "seamark_seconds_saved_total": 0.5,
    "seamark_seconds_spent_total": 0.25,
    "seamark_long_prefill_waits_seconds_total,threshold=1024": 2.5,
}

SHOWN = {
    "seamark_checkpoint_bytes": 123,
    "seamark_pinned_blocks": 4,
    "seamark_checkpoint_directory_bytes": 5000,
    "seamark_pass_seconds": 0.125,
    "seamark_token_seconds": 0.0625,
}


def test_each_number_of_a_report_is_added_or_shown_and_nothing_else_changes(feeds):
    before = values()
    events = [(1, StateEvicted("5c")), (2, StateStored("r", 64, ())), (3, StateEvicted("6c"))]
    report = EngineReport(
        match_unit=32,
        block_size=384,
        loads={"g": GatewayLoad(1, 400)},
        state_bytes=123,
        pinned_blocks=4,
        disk_bytes=5000,
        pass_seconds=0.125,
        token_seconds=0.0625,
        cache_hit_tokens=7,
        hits=1,
        hit_tokens=160,
        saved_seconds=0.5,
        spent_seconds=0.25,
        long_prefill_waits={"1024": 2.5},
        file_bytes=1000,
        loads_declined=1,
        written={"tail": 2},
        outcomes={"hit": 1},
        followers={"not_worth_it": 1, "held": 1},
        ignored={"late": 1},
        files_refused={"checksum": 2},
        requests=[AdmittedRequest("chatcmpl-a-00000000", "hit", 160, 176, (163,))],
        pinned=[("chatcmpl-a-00000000", "pinned")],
        drafts=("closed", "2 of 3"),
        windows={"healed": 1},
        events=events,
    )
    CollectedMetrics("127.0.0.1:7", beside_vllms=True).take(report)
    after = values()
    changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert {name: after[name] for name in SHOWN} == SHOWN
    assert {name: value for name, value in changed.items() if name not in SHOWN} == ADDED
    told = feeds.alone.after(0)
    assert told["events"][:2] == [AdmittedRequest("a", "hit", 160, 176, (163,)), ("pinned", "a", "pinned")]
    assert told["drafts"] == ("closed", "2 of 3")
    assert len(told["events"]) == 5 and feeds.take_latest("a").endswith(b",pinned")


def infos() -> list[dict[str, str]]:
    """What engines are shown to be now."""
    return [sample.labels for sample in families()[0].collect()[0].samples if sample.value == 1]


def test_an_engine_is_shown_as_it_is_and_others_beside_it_that_differ(feeds):
    collector = CollectedMetrics("127.0.0.1:7", beside_vllms=True)
    same = {"match_unit": 16, "block_size": 64, "engines": 2}
    for engine in (0, 1):
        collector.take(EngineReport(engine=engine, **same))
    (info,) = infos()
    assert (info["match_unit"], info["block_size"], info["ahead"], info["reports"]) == ("16", "64", "0", "127.0.0.1:7")
    assert info["version"] == version() and info["vllm"] == metrics.vllm.__version__
    collector.take(EngineReport(engine=1, refused="a cause", **same))
    assert sorted(info["refused"] for info in infos()) == ["", "a cause"], "the other one is as it was"
    collector.take(EngineReport(engine=0, refused="a cause", **same))
    collector.take(EngineReport(engine=0, refused="a cause", **same))
    assert [info["refused"] for info in infos()] == ["a cause"]
    names = ("drafts", "connector", "lane", "ahead")
    collector.take(EngineReport(engine=0, drafts=("closed", ""), connector="c", lane="l", ahead=3, **same))
    assert [tuple(info[name] for name in names) for info in infos() if info["drafts"]] == [("closed", "c", "l", "3")]


@pytest.mark.parametrize("resolved", [(), (0,), (163, 0, 24_001)])
@pytest.mark.parametrize("name", ["a", "a/b:c,d/", "/", "ü\u2028 x"])
def test_requests_and_states_arrive_where_a_gateway_reads_them_as_they_left(feeds, name, resolved):
    engine_id = f"chatcmpl-{name}-00000000"
    came = StateStored(engine_id, 200, ((160, "5c"), (192, "")))
    happened = [StateEvicted("5c"), came, CacheCleared(), AdapterReplaced("an adapter")]
    events = SimpleNamespace(pending=True, take=lambda: list(enumerate(happened, start=1)))
    states = SimpleNamespace(events=events, bytes_held=0, pins=SimpleNamespace(num_blocks=0))
    checkpoints = Checkpoints(Grid(16, 16), 384, states)
    checkpoints.counters.request_admitted(AdmittedRequest(engine_id, "hit", 160, 176, resolved))
    collect(checkpoints)
    answer = msgspec.to_builtins(feeds.alone.after(0)["events"])
    came = ("came", name, 200, ((160, "5c"), (192, "")))
    states = [("gone", "5c"), came, ("cleared", ""), ("adapter", "an adapter")]
    assert list(map(tuple, answer)) == [("admitted", name, "hit", 160, 176, resolved), *states]


def test_where_vllms_own_metrics_are_elsewhere_a_gateway_finds_what_it_reads_of_them_with_ours(feeds):
    registry, numbers = CollectorRegistry(), EngineNumbers()
    registry.register(numbers)
    for rank, hits in ((0, 160), (1, 16), (0, 32)):
        scheduler = scheduler_of(Checkpoints(Grid(16, 16), 384), rank=rank, ranks=2)
        scheduler.seamark.counters.counts.cache_hit_tokens += hits
        numbers.take(sent(scheduler, {"a": GatewayLoad(1, 400)}))
    samples = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    assert samples == [
        *(f'vllm:num_requests_running{{engine="{rank}"}} 2.0' for rank in "01"),
        *(f'vllm:num_requests_waiting{{engine="{rank}"}} 1.0' for rank in "01"),
        'vllm:prefix_cache_hits_total{engine="0"} 192.0',
        'vllm:prefix_cache_hits_total{engine="1"} 16.0',
        *(f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="9000"}} 1.0' for rank in "01"),
    ]


ROOT = Path(__file__).parents[3]

DOCUMENTS = (
    *(ROOT / folder / "README.md" for folder in (".", "proxy", "engine_patches", "deploy", "grafana", "tests")),
    *(ROOT / folder / "HOW.md" for folder in ("proxy", "engine_patches")),
)

# Begin alike: fields of requests.
NO_METRICS = {"seamark_boundaries", "seamark_pin", "seamark_load", "seamark_stops", "seamark_keep"}


NAMES = {family.name for family in GATEWAY | ENGINE}


def test_the_table_has_every_metric_with_its_labels_and_where_it_is_shown_and_dashboards_ask_for_no_other():
    text = (FOLDER / "README.md").read_text()
    assert text == with_metrics(text), "run: python -m tests.harness.dashboards"
    assert shown_in().keys() <= NAMES


AT_START = {sample.name for family in REGISTRY.collect() for sample in family.samples}  # before any test


def test_a_counter_that_an_alert_reads_is_there_before_it_counts_unless_others_choose_its_labels():
    """Else its first increase is none to Prometheus."""
    gateway = Gateway(Settings(worker=("http://127.0.0.1:9",))).metrics.registry
    there = AT_START | {sample.name for family in gateway.collect() for sample in family.samples}
    read = {name for name, places in shown_in().items() if "rules" in places and name.endswith("_total")}
    closed = {name for name, labels in GATEWAY | ENGINE if name in read and not {"model", "worker"} & set(labels)}
    assert len(closed) > 3 and closed <= there
    assert not [name for name in there if name.startswith("seamark_") and name.endswith("_created")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_no_metric_that_is_not_there(document):
    mentioned = set(re.findall(r"\b(seamark_[a-z_]+[a-z])\b", document.read_text())) - NO_METRICS
    assert {family_of(name) for name in mentioned} <= NAMES


@pytest.mark.parametrize("query", list(queries()), ids=lambda query: f"{query.dashboard}-{query.panel}-{query.legend}")
def test_each_query_measures_what_its_panel_says(query):
    assert dashboards.dimension(query.tree) == dashboards.UNITS[query.unit]
    assert all(f"`{family_of(name)}`" in query.description for name in metrics_in(query.tree))
