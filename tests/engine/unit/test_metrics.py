"""What the collecting process makes of the engine cores' reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engine_patches.reporting import metrics
from engine_patches.reporting.events_api import Feeds
from engine_patches.reporting.metrics import CollectedMetrics, EngineNumbers, families
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.load import GatewayLoad
from engine_patches.scheduler.refusals import Refusal
from engine_patches.scheduler.state_events import AdapterReplaced, CacheCleared, StateEvicted, StateStored
from tests.harness.reports import collect, scheduler_of, sent

ROOT = Path(__file__).parents[3]


@pytest.fixture
def feeds(monkeypatch) -> Feeds:
    """Of a process to which no engine has reported yet."""
    feeds = Feeds()
    monkeypatch.setattr(metrics, "feeds", feeds)
    families().info.clear()
    return feeds


def shown(label: str) -> list[str]:
    return [sample.labels[label] for sample in families().info.collect()[0].samples]


def test_what_an_engine_is_is_shown_as_it_tells_it_last_and_where_its_reports_are_read(feeds):
    collected, told = CollectedMetrics("127.0.0.1:33007", beside_vllms=True), []
    for refusal in (Refusal("no_states", "a layer has a window, or two"), None):
        collected.take(sent(scheduler_of(Checkpoints(Grid(16, 16), 384, refusal=refusal))))
        told.append((shown("refused"), shown("reports")))
    assert told == [(["a layer has a window, or two"], ["127.0.0.1:33007"]), ([""], ["127.0.0.1:33007"])]


def losing_a_state(*more: Any) -> Any:
    """The states of a scheduler, one of which can no longer be found."""
    numbered = list(enumerate((StateEvicted("5c"), *more), start=1))
    events = SimpleNamespace(pending=True, take=lambda: numbered)
    return SimpleNamespace(events=events, bytes_held=0, pins=SimpleNamespace(num_blocks=0))


@pytest.mark.parametrize("resolved", [(), (0,), (163, 0, 24_001)])
@pytest.mark.parametrize("name", ["a", "a/b:c,d/", "/", "ü\u2028 x"])
def test_requests_and_states_arrive_where_a_gateway_reads_them_as_they_left(feeds, name, resolved):
    engine_id = f"chatcmpl-{name}-00000000"
    more = (StateStored(engine_id, 200, ((160, "5c"), (192, ""))), CacheCleared(), AdapterReplaced("an adapter"))
    checkpoints = Checkpoints(Grid(16, 16), 384, losing_a_state(*more))
    checkpoints.counters.request_admitted(AdmittedRequest(engine_id, "hit", 160, 176, resolved))
    collect(checkpoints)
    answer = feeds.main.after(0)
    assert answer["outcomes"] == [(name, "hit", 160)] and answer["resolved"] == [(name, 176, resolved)]
    came = ["came", name, 200, [[160, "5c"], [192, ""]]]
    assert answer["states"] == [["gone", "5c"], came, ["cleared"], ["adapter", "an adapter"]]


def test_what_became_of_a_pin_arrives_with_the_outcome_of_its_request(feeds):
    checkpoints = Checkpoints(Grid(16, 16), 384)
    counters = checkpoints.counters
    for name, fate in (("chatcmpl-a/b-00000000", "pinned"), ("chatcmpl-c-00000000", "no_room")):
        counters.request_admitted(AdmittedRequest(name, "cold", 0, 0, (163,)))
        counters.prompt_pinned(name, fate)
    counters.prompt_pinned("chatcmpl-unknown-00000000", "released")
    collect(checkpoints)
    headers = [outcome.header for name in ("a/b", "c") if (outcome := feeds.main.take_latest(name)) is not None]
    assert headers == [b"cold,0,0,163,pinned", b"cold,0,0,163,no_room"]
    assert feeds.main.take_latest("unknown") is None


def test_where_vllms_own_metrics_are_elsewhere_a_gateway_finds_what_it_reads_of_them_with_ours(feeds):
    registry, numbers = CollectorRegistry(), EngineNumbers()
    registry.register(numbers)
    for rank, hits in ((0, 160), (1, 16), (0, 32)):
        scheduler = scheduler_of(Checkpoints(Grid(16, 16), 384), rank=rank, ranks=2)
        scheduler.seamark.counters.cache_hit(hits)
        numbers.take(sent(scheduler, {"a": GatewayLoad(1, 400)}))
    samples = [line for line in generate_latest(registry).decode().splitlines() if line[0] != "#"]
    assert samples == [
        *(f'vllm:num_requests_running{{engine="{rank}"}} 2.0' for rank in "01"),
        *(f'vllm:num_requests_waiting{{engine="{rank}"}} 1.0' for rank in "01"),
        'vllm:prefix_cache_hits_total{engine="0"} 192.0',
        'vllm:prefix_cache_hits_total{engine="1"} 16.0',
        *(f'vllm:cache_config_info{{engine="{rank}",kv_cache_size_tokens="9000"}} 1.0' for rank in "01"),
    ]


BESIDE_API_SERVERS = """
import prometheus_client, os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]  # as vLLM does, once the client is imported
from engine_patches.reporting.metrics import CollectedMetrics
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.grid import Grid
from tests.harness.reports import scheduler_of, sent
checkpoints = Checkpoints(Grid(16, 16), 384)
checkpoints.counters.state_written("tail")
CollectedMetrics("127.0.0.1:7", beside_vllms=False).take(sent(scheduler_of(checkpoints)))
"""


def test_several_api_servers_show_what_the_collecting_process_has_added_up_and_vllms_numbers_once(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", BESIDE_API_SERVERS, str(tmp_path)], env=environment, check=True)
    reading = (
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry()\n"
        "multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())\n"
    )
    environment["PROMETHEUS_MULTIPROC_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", reading], env=environment, check=True, capture_output=True, text=True)
    assert 'seamark_checkpoints_written_total{kind="tail"} 1.0' in done.stdout
    assert 'reports="127.0.0.1:7"' in done.stdout and "vllm:" not in done.stdout
