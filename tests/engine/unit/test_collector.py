"""From an engine's step to who reads it: nothing waits, nothing is lost unsaid, and nobody reads who may not."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine_patches import settings
from engine_patches.footprint import REPORTS
from engine_patches.reporting import addresses, collector, events_api, hooks, reporter
from engine_patches.reporting.addresses import FOLDER
from engine_patches.reporting.collector import Collector
from engine_patches.reporting.events_api import METRICS_PATH, PATH, Feeds
from engine_patches.scheduler import state_events
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.state_events import StateEvents
from tests.harness.reports import scheduler_of
from tests.harness.waiting import until

KEY = {"authorization": "Bearer right"}


class Taking:
    """In place of the metrics: what was reported."""

    def __init__(self, feeds: Feeds) -> None:
        self.reports: list[Any] = []
        self._feeds = feeds

    def take(self, report: Any) -> None:
        self.reports.append(report)
        for request in report.requests:
            self._feeds.add_outcome(report, request)
        self._feeds.add_events(report)


@pytest.fixture
def taking(monkeypatch) -> Taking:
    feeds = Feeds()
    for module in (events_api, collector):
        monkeypatch.setattr(module, "feeds", feeds)
    monkeypatch.delenv(FOLDER, raising=False)
    return Taking(feeds)


def engine(at: Collector) -> tuple[Any, reporter.Reporter, Callable[[], None]]:
    """A scheduler that reports to a collector, and what has an event happen there: an adapter is another."""
    numbers = itertools.count(1)
    events = StateEvents(SimpleNamespace(watch=lambda: None))
    states = SimpleNamespace(events=events, bytes_held=0, pins=SimpleNamespace(num_blocks=0))
    scheduler = scheduler_of(Checkpoints(Grid(16, 16), 384, states))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(at.folder))
        hooks.report_from_the_start(lambda self: None)(scheduler)
    return scheduler, getattr(scheduler, REPORTS), lambda: events.adapter_replaced(str(next(numbers)))


def read(url: str, headers: Any = None, path: str = PATH) -> httpx.Response:
    return httpx.get(f"http://{url}{path}", headers=headers, timeout=60)


async def read_beside(url: str, headers: Any = None, path: str = PATH) -> httpx.Response:
    return await asyncio.to_thread(read, url, headers, path)


async def test_what_an_engine_reports_is_read_where_the_collector_says(taking):
    at = Collector(("127.0.0.1", 0), ())
    at.start(taking)
    scheduler, own, happen = engine(at)
    await until(lambda: len(taking.reports) == 1)  # before any step
    assert taking._feeds.collected_by == os.getpid()  # by which its own reads know it
    scheduler.seamark.counters.request_admitted(AdmittedRequest("chatcmpl-a-00000000", "hit", 160, 176, (163,)))
    happen()
    scheduler.seamark.last_planned = None
    assert hooks.report_with_stats(lambda self: "statistics")(scheduler) == "statistics"
    await until(lambda: len(taking.reports) == 2)
    told = (await read_beside(at.read_at)).json()
    assert told["outcomes"] == [["a", "hit", 160]] and told["states"] == [["adapter", "1"]]
    own.step_ends(busy=False)
    assert len(taking.reports) == 2  # nothing new, nothing sent
    assert hooks.report_resets(lambda self: True)(scheduler) is True
    await until(lambda: len(taking.reports) == 3)
    assert (await read_beside(at.read_at, path="/other")).status_code == 404
    asks = SimpleNamespace(sampling_params=None, num_prompt_tokens=400, num_computed_tokens=0)
    scheduler.requests["r"] = asks
    own.step_ends(busy=False)  # one request more
    await until(lambda: len(taking.reports) == 4)
    assert taking.reports[3].loads == {"": (1, 400)}


def test_where_no_event_loop_runs_a_thread_collects(taking):
    at = Collector(("127.0.0.1", 0), ())
    at.start(taking)
    engine(at)
    assert read(at.read_at).status_code == 200
    assert any(thread.name == "seamark-reports" and thread.daemon for thread in threading.enumerate())


async def test_a_collector_that_takes_nothing_makes_no_step_wait_and_what_was_lost_is_said(taking, monkeypatch):
    monkeypatch.setattr(reporter, "MAX_WAITING", 4)
    monkeypatch.setattr(collector, "MAX_WAITING", 4)
    monkeypatch.setattr(state_events, "MAX_EVENTS", 4)
    at = Collector(("127.0.0.1", 0), ())
    scheduler, own, happen = engine(at)
    for number in range(400):
        scheduler.seamark.counters.request_admitted(AdmittedRequest(f"chatcmpl-{number}-00000000", "cold", 0, 0, ()))
        happen()
        own.step_ends(busy=True)
    at.start(taking)
    # What did not fit went on being counted, and comes with the next report.
    async with asyncio.timeout(60):
        while sum(each.outcomes.get("cold", 0) for each in taking.reports) < 400:
            own.step_ends(busy=True)
            await asyncio.sleep(0.01)
    told = (await read_beside(at.read_at)).json()
    assert ["cleared", "lost"] in told["states"] and told["states"][-1] == ["adapter", "400"]
    names = [name for name, *_ in told["outcomes"]]
    assert names == [str(number) for number in range(400)]


async def test_what_cannot_be_sent_or_read_ends_nothing_and_is_seen_as_lost(taking, engine_log):
    at = Collector(("127.0.0.1", 0), ())
    at.start(taking)
    scheduler, own, happen = engine(at)
    scheduler.seamark.counters.request_admitted(AdmittedRequest("half of a pair: \ud800", "cold", 0, 0, ()))
    for _ in range(2):
        happen()
        own.step_ends(busy=True)
    own._socket.send(b"no report")
    happen()
    own.step_ends(busy=True)
    await until(lambda: taking.reports and taking.reports[-1].events == [(3, ["adapter", "3"])])
    assert (await read_beside(at.read_at)).json()["states"] == [["cleared", "lost"], ["adapter", "2"], ["adapter", "3"]]
    said = [record.getMessage() for record in engine_log.records]
    assert [line.split(":")[1] for line in said] == [" a report could not be sent", " a report could not be read"]


async def test_without_one_of_vllms_keys_nothing_is_told(taking):
    at = Collector(("127.0.0.1", 0), ("right", "another"))
    at.start(taking)
    for path in (PATH, METRICS_PATH):
        for headers in (None, {"authorization": "Bearer wrong"}, {"authorization": "right"}, {"x-api-key": "right"}):
            answer = await read_beside(at.read_at, headers, path)
            assert answer.status_code == 404 and answer.json() == (await read_beside(at.read_at, KEY, "/no")).json()
        assert (await read_beside(at.read_at, KEY, path)).status_code == 200
        assert (await read_beside(at.read_at, {"authorization": "Bearer another"}, path)).status_code == 200


async def test_other_processes_of_the_same_server_read_without_a_key_and_no_other_user_can(taking):
    at = Collector(("127.0.0.1", 0), ("right",))
    at.start(taking)
    assert at.folder.stat().st_mode & 0o777 == 0o700
    transport = httpx.AsyncHTTPTransport(uds=str(at.folder / addresses.READ_INSIDE))
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await client.get(f"http://inside{PATH}")).status_code == 200


async def test_nobody_reads_from_elsewhere_unless_it_was_asked_for(taking, monkeypatch):
    """Another address of this machine stands for another machine."""
    monkeypatch.delenv(settings.REPORTS_AT, raising=False)
    at = Collector(settings.reports_at(), ())
    at.start(taking)
    port = at.read_at.rpartition(":")[2]
    assert at.read_at.startswith("127.0.0.1:")
    with pytest.raises(httpx.ConnectError):
        await read_beside(f"127.0.0.2:{port}")
    monkeypatch.setenv(settings.REPORTS_AT, "0.0.0.0:0")
    opened = Collector(settings.reports_at(), ())
    opened.start(taking)
    assert (await read_beside(f"127.0.0.2:{opened.read_at.rpartition(':')[2]}")).status_code == 200


async def test_a_port_that_is_taken_costs_a_line_and_reports_still_come(taking, caplog):
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        at = Collector(("127.0.0.1", port), ())
    assert at.read_at == "" and f"127.0.0.1:{port}" in caplog.text and "SEAMARK_REPORTS_AT" in caplog.text
    at.start(taking)
    engine(at)
    await until(lambda: taking.reports)
