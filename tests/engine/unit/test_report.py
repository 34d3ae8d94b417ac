"""A report tells all that an engine counts, once; it is sent when there is something new; and it is added up whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from engine_patches.reporting import metrics
from engine_patches.reporting.events_api import Feeds
from engine_patches.reporting.metrics import CollectedMetrics, families
from engine_patches.reporting.report import EngineReport, as_read
from engine_patches.scheduler.counters import AdmittedRequest, DraftedRequest
from engine_patches.scheduler.state_events import AdapterReplaced, CacheCleared, StateEvicted, StateStored


def expected() -> dict[str, Any]:
    """What is told then."""
    return {
        "engine": 1,
        "engines": 2,
        "match_unit": 32,
        "block_size": 384,
        "ahead": 1,
        "refused": "a cause",
        "connector": "NixlPushConnector",
        "lane": "chunk_ends",
        "cache_tokens": 9000,
        "running": 2,
        "waiting": 1,
        "loads": {"g": (1, 400)},
        "state_bytes": 123,
        "pinned_blocks": 4,
        "disk_bytes": 5000,
        "pass_seconds": 0.125,
        "token_seconds": 0.0625,
        "cache_hit_tokens": 7,
        "hits": 1,
        "hit_tokens": 160,
        "saved_seconds": 0.5,
        "spent_seconds": 0.25,
        "file_bytes": 1000,
        "loads_declined": 1,
        "written": {"tail": 2},
        "outcomes": {"hit": 1},
        "followers": {"not_worth_it": 1, "held": 1},
        "ignored": {"late": 1},
        "files_refused": {"checksum": 2},
        "requests": [AdmittedRequest("chatcmpl-a-00000000", "hit", 160, 176, (163,))],
        "pinned": [("chatcmpl-a-00000000", "pinned")],
        "drafts": ("closed", "0f", "it drafts worse"),
        "windows": {"healed": 1},
        "window_of": [("chatcmpl-a-00000000", "healed")],
        "drafted": [DraftedRequest("chatcmpl-a-00000000", 7, 12)],
        "events": [(1, ["gone", "5c"])],
    }


def test_what_is_left_out_of_a_report_is_nothing():
    """Older engines and newer collectors meet: a field that was not sent has to mean that nothing happened."""
    empty = msgspec.msgpack.decode(msgspec.msgpack.encode({"match_unit": 16, "block_size": 64}), type=EngineReport)
    values = {name: getattr(empty, name) for name in empty.__struct_fields__}
    assert (values.pop("match_unit"), values.pop("block_size"), values.pop("engines")) == (16, 64, 1)
    assert values.pop("drafts") == ("", "", "") and not any(values.values())


@pytest.mark.parametrize(
    ("event", "read"),
    [
        (StateStored("r", 200, ((160, "5c"),)), ["came", "r", 200, ((160, "5c"),)]),
        (StateEvicted("5c"), ["gone", "5c"]),
        (CacheCleared(), ["cleared"]),
        (AdapterReplaced("a"), ["adapter", "a"]),
    ],
)
def test_each_kind_of_event_is_read_by_its_name(event, read):
    assert as_read(event) == read


@pytest.fixture
def collected(monkeypatch) -> Iterator[tuple[CollectedMetrics, Feeds]]:
    """Of a process to which no engine has reported."""
    feeds = Feeds()
    monkeypatch.setattr(metrics, "feeds", feeds)
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    families().info.clear()
    yield CollectedMetrics("127.0.0.1:7", beside_vllms=True), feeds
    families().info.clear()


def values() -> dict[str, float]:
    """All numbers of ours, by name and labels."""
    return {
        ",".join([sample.name, *(f"{label}={value}" for label, value in sample.labels.items())]): sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("seamark_") and not sample.name.endswith("_created") and "info" not in sample.name
    }


# By metric: what one report of `expected` adds, and what it shows as it is.
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
}

SHOWN = {
    "seamark_checkpoint_bytes": 123,
    "seamark_pinned_blocks": 4,
    "seamark_checkpoint_directory_bytes": 5000,
    "seamark_pass_seconds": 0.125,
    "seamark_token_seconds": 0.0625,
}


def report_of_all() -> EngineReport:
    events = [(1, ["gone", "5c"]), (2, ["came", "r", 64, []]), (3, ["gone", "6c"])]
    return EngineReport(**{**expected(), "engine": 0, "engines": 1, "events": events})


def test_each_number_of_a_report_is_added_or_shown_and_nothing_else_changes(collected):
    collector, feeds = collected
    before = values()
    collector.take(report_of_all())
    after = values()
    changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert {name: after[name] for name in SHOWN} == SHOWN
    assert {name: value for name, value in changed.items() if name not in SHOWN} == ADDED
    told = feeds.main.after(0)
    assert told["outcomes"] == [("a", "hit", 160)] and told["pins"] == [("a", "pinned")]
    assert told["windows"] == [("a", "healed")] and told["drafted"] == [("a", 7, 12)]
    assert told["drafts"] == {"state": "closed", "id": "0f", "why": "it drafts worse"}
    assert len(told["states"]) == 3 and feeds.main.take_latest("a").pin == "pinned"


def infos() -> list[dict[str, str]]:
    """What engines are shown to be now."""
    return [sample.labels for sample in families().info.collect()[0].samples if sample.value == 1]


def test_an_engine_is_shown_as_it_is_and_others_beside_it_that_differ(collected):
    collector, _ = collected
    same = {"match_unit": 16, "block_size": 64, "engines": 2}
    for engine in (0, 1):
        collector.take(EngineReport(engine=engine, **same))
    (info,) = infos()
    assert (info["match_unit"], info["block_size"], info["ahead"], info["reports"]) == ("16", "64", "0", "127.0.0.1:7")
    assert info["version"] == metrics.own_version() and info["vllm"] == metrics.vllm.__version__
    collector.take(EngineReport(engine=1, refused="a cause", **same))
    assert sorted(info["refused"] for info in infos()) == ["", "a cause"], "the other one is as it was"
    collector.take(EngineReport(engine=0, refused="a cause", **same))
    collector.take(EngineReport(engine=0, refused="a cause", **same))
    assert [info["refused"] for info in infos()] == ["a cause"]
    names = ("drafts", "connector", "lane", "ahead")
    collector.take(EngineReport(engine=0, drafts=("closed", "", ""), connector="c", lane="l", ahead=3, **same))
    assert [tuple(info[name] for name in names) for info in infos() if info["drafts"]] == [("closed", "c", "l", "3")]


def test_a_bare_copy_of_the_plugin_has_no_version(monkeypatch):
    def absent(name: str) -> str:
        assert name == "vllm-seamark"
        raise metrics.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metrics.metadata, "version", absent)
    assert metrics.own_version() == "unknown"
