"""From an engine's step to who reads it: nothing waits, nothing is lost unsaid, and nobody reads who may not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine_patches import settings
from engine_patches.footprint import FOLDER, READ_AT, READ_INSIDE, REPORTS
from engine_patches.reporting import collector, events_api, hooks, metrics, report
from engine_patches.reporting.collector import Collector
from engine_patches.reporting.events_api import METRICS_PATH, PATH, Feeds
from engine_patches.reporting.hooks import collect_before_the_engines, keys_in
from engine_patches.scheduler import states
from engine_patches.scheduler.checkpoints import Checkpoints
from engine_patches.scheduler.counters import AdmittedRequest
from engine_patches.scheduler.planner import Grid
from engine_patches.scheduler.states import AdapterReplaced, StateEvents
from tests.harness.reports import scheduler_of
from tests.harness.waiting import until

KEY = {"authorization": "Bearer right"}


class Taking:
    """In place of the metrics: what was reported."""

    def __init__(self, feeds: Feeds) -> None:
        self.reports: list[Any] = []
        self._feeds = feeds

    def take(self, told: Any) -> None:
        self.reports.append(told)
        self._feeds.add_requests(told)
        self._feeds.add_events(told)


@pytest.fixture
def taking(monkeypatch) -> Taking:
    feeds = Feeds()
    for module in (events_api, collector):
        monkeypatch.setattr(module, "feeds", feeds)
    return Taking(feeds)


def engine(at: Collector) -> tuple[Any, report.Reporter, Callable[[], None]]:
    """A scheduler that reports to a collector, and what has an event happen there: an adapter is another."""
    numbers = itertools.count(1)
    pool = SimpleNamespace(cached_block_hash_to_block=None, seamark_watches=[])
    events = StateEvents(SimpleNamespace(pool=pool))
    states = SimpleNamespace(events=events, bytes_held=0, pins=SimpleNamespace(num_blocks=0))
    scheduler = scheduler_of(Checkpoints(Grid(16, 16), 384, states))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(at.folder))
        hooks.report_from_the_start(lambda self: None)(scheduler)
    return scheduler, getattr(scheduler, REPORTS), lambda: events.adapter_replaced(str(next(numbers)))


def read(url: str, headers: Any = None, path: str = PATH) -> httpx.Response:
    return httpx.get(f"http://{url}{path}", headers=headers, timeout=60)


async def read_beside(*given: Any, **more: Any) -> httpx.Response:
    return await asyncio.to_thread(read, *given, **more)


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
    assert told["events"] == [["admitted", "a", "hit", 160, 176, [163]], ["adapter", "1"]]
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
    monkeypatch.setattr(report, "MAX_WAITING", 4)
    monkeypatch.setattr(collector, "MAX_WAITING", 4)
    monkeypatch.setattr(events_api, "MAX_TOLD", 4096)
    monkeypatch.setattr(states, "MAX_EVENTS", 4)
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
    assert ["cleared", "lost"] in told["events"] and told["events"][-1] == ["adapter", "400"]
    names = [event[1] for event in told["events"] if event[0] == "admitted"]
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
    await until(lambda: taking.reports and taking.reports[-1].events == [(3, AdapterReplaced("3"))])
    assert (await read_beside(at.read_at)).json()["events"] == [["cleared", "lost"], ["adapter", "2"], ["adapter", "3"]]
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
    transport = httpx.AsyncHTTPTransport(uds=str(at.folder / READ_INSIDE))
    async with httpx.AsyncClient(transport=transport) as client:
        assert (await client.get(f"http://inside{PATH}")).status_code == 200


async def test_who_sends_no_whole_head_keeps_nobody_out_and_is_closed(taking, monkeypatch):
    monkeypatch.setattr(collector, "MOST_CONNECTIONS", 4)
    at = Collector(("127.0.0.1", 0), ())
    at.start(taking)

    async def half(sent: bytes = b"GET /") -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection(*at.read_at.split(":"))
        writer.write(sent)
        return reader

    async def end(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""

    halves = [await half() for _ in range(8)]
    for oldest in halves[:4]:
        await end(oldest)
    waiting = asyncio.create_task(read_beside(at.read_at, path=f"{PATH}?wait=1"))
    assert (await read_beside(at.read_at)).status_code == (await waiting).status_code == 200
    busy = f"GET {PATH}?wait=30 HTTP/1.1\r\nhost: a\r\n\r\n".encode()
    for first in (b"", busy):
        await end(await half(first + b"GET / HTTP/1.1\r\na: " + b"x" * collector.MAX_HEAD_BYTES))
    slow = [await half(busy) for _ in range(4)]
    assert (await read_beside(at.read_at)).status_code == 200
    await end(slow[0])
    monkeypatch.setattr(collector, "HEAD_SECONDS", 0.05)
    await end(await half())


async def test_nobody_reads_from_elsewhere_unless_it_was_asked_for(taking, monkeypatch):
    """Another address of this machine stands for another machine."""
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


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    for name in (FOLDER, READ_AT, settings.REPORTS_AT):
        monkeypatch.setenv(name, "")  # so that what a test sets is taken back behind it
        monkeypatch.delenv(name)


class Recorded:
    """In place of the real one."""

    made: list[Any]
    fails, read_at, folder = False, "127.0.0.1:7", "/a/folder"

    def __init__(self, address: tuple[str, int], keys: Any) -> None:
        if self.fails:
            raise OSError("no sockets here")
        self.made.append((address, keys))

    def start(self, metrics: Any) -> None: ...


@pytest.fixture
def made(monkeypatch) -> list[Any]:
    """Of each collector that was made its address and keys."""
    Recorded.made = []
    monkeypatch.setattr(collector, "Collector", Recorded)
    monkeypatch.setattr(metrics, "CollectedMetrics", lambda read_at, **more: (read_at, more))
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "--api-key", "a"])
    return Recorded.made


@pytest.mark.parametrize(
    ("rank", "options", "expected"),
    [
        (0, {"local_client": True}, None),  # the class `LLM`, for which no gateway asks
        (0, {"local_client": False}, False),
        (-1, {}, False),
        (None, {}, None),
    ],
)
def test_who_answers_http_is_told_by_vllms_own_arguments(rank, options, expected):
    ranks = {} if rank is None else {"_api_process_rank": rank}
    assert hooks._answers_http(SimpleNamespace(parallel_config=SimpleNamespace(**ranks)), options) is expected


async def test_beside_an_api_server_reports_are_collected_in_its_process():
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=0))
    assert hooks._answers_http(config, {}) is True


@pytest.mark.parametrize(("read_at", "fails"), [("", False), ("127.0.0.1:7", False), ("", True)])
def test_engines_start_and_one_line_says_where_reports_are_read_or_why_there_are_none(
    made, monkeypatch, engine_log, read_at, fails
):
    engine_log.set_level(logging.INFO, "vllm.seamark")
    monkeypatch.setattr(Recorded, "read_at", read_at)
    monkeypatch.setattr(Recorded, "fails", fails)
    given: list[Any] = []
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=-1), kv_events_config=None)
    collect_before_the_engines(lambda self, *args, **more: given.extend([args, more]))(object(), 1, config, more=2)
    assert given == [(1, config), {"more": 2}] and made == ([] if fails else [(("127.0.0.1", 0), ("a",))])
    said = "no sockets here" if fails else read_at
    assert [said in line for line in engine_log.messages] == [True] * bool(said)
    assert (FOLDER in os.environ) is (READ_AT in os.environ) is not fails


@pytest.mark.parametrize("is_free", [True, False])
def test_beside_kv_events_reports_are_read_at_the_port_before_theirs_if_that_is_free(is_free):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        if is_free:
            holder.close()
        assert hooks._beside(f"tcp://*:{port + 1}") == (port if is_free else 0)


@pytest.mark.parametrize(
    ("arguments", "text", "keys"),
    [
        ("--config {file}", "api-key: a", ("a",)),
        ("--port 1 --config {file}", "api_key: [a, 5]", ("a", "5")),
        ("--config {file} --api-key b", "api-key: a", ("b",)),
        ("--config {file}.not", "", ("c",)),
        ("--other a --api-key b --other c", "", ("b",)),
        ("--api-key=", "", ("",)),
    ],
)
def test_keys_of_a_file_and_of_the_environment_stand_back_behind_flags(arguments, text, keys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert keys_in(["vllm", "serve", *arguments.format(file=file).split()], {"VLLM_API_KEY": "c"}) == keys


@pytest.mark.parametrize("busy", [True, False])
def test_a_step_reports_before_its_numbers_are_made_and_an_emptied_cache_at_once(monkeypatch, busy):
    monkeypatch.setattr(hooks, "loads_may_have_changed", lambda planned: {"a step": busy}[planned])
    told: list[Any] = []
    own = SimpleNamespace(send=lambda: told.append("sent"), step_ends=lambda *, busy: told.append(busy))
    scheduler = SimpleNamespace(seamark=SimpleNamespace(last_planned="a step"), **{REPORTS: own})

    def vllms(self: Any, *args: Any, **kwargs: Any) -> Any:
        return list(told), args, kwargs

    make, reset = hooks.report_with_stats(vllms), hooks.report_resets(vllms)
    assert make(scheduler, 1, a=2) == ([busy], (1,), {"a": 2})
    assert reset(scheduler, 1, a=2) == ([busy], (1,), {"a": 2}) and told == [busy, "sent"]
    assert make(SimpleNamespace(), 1)[1:] == reset(SimpleNamespace(), 1)[1:] == ((1,), {}) and told == [busy, "sent"]
