"""When engines' reports are collected and sent, and where readers are sent to; vLLM goes on whatever fails."""

from __future__ import annotations

import logging
import os
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches import settings
from engine_patches.footprint import REPORTS
from engine_patches.reporting import collector, hooks, metrics, reporter
from engine_patches.reporting.addresses import FOLDER, READ_AT
from engine_patches.reporting.hooks import TOPIC, Layout, collect_before_the_engines, keys_in


@pytest.fixture(autouse=True)
def environment(monkeypatch) -> None:
    for name in (FOLDER, READ_AT, settings.REPORTS_AT):
        monkeypatch.delenv(name, raising=False)


class Collector:
    """In place of the real one."""

    made: list[Any]
    fails = False
    read_at = "127.0.0.1:7"
    folder = "/a/folder"

    def __init__(self, address: tuple[str, int], keys: Any) -> None:
        if self.fails:
            raise OSError("no sockets here")
        self.made.append((address, keys))

    def start(self, metrics: Any) -> None:
        self.made.append(metrics)


@pytest.fixture
def made(monkeypatch) -> list[Any]:
    """What was made: of a collector its address and keys, then what it takes reports for."""
    Collector.made = []
    monkeypatch.setattr(collector, "Collector", Collector)
    monkeypatch.setattr(metrics, "CollectedMetrics", lambda read_at, **more: (read_at, more))
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "--api-key", "a"])
    # What is set there is taken back behind the test.
    monkeypatch.setenv(FOLDER, "")
    monkeypatch.setenv(READ_AT, "")
    monkeypatch.delenv(FOLDER)
    monkeypatch.delenv(READ_AT)
    return Collector.made


def start(rank: int = -1, events: Any = None, *more: Any, **kwargs: Any) -> list[Any]:
    """Engines are started; what vLLM's own start was given."""
    given: list[Any] = []
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=rank), kv_events_config=events)
    begin = collect_before_the_engines(lambda self, *args, **kwargs: given.extend([args, kwargs]))
    begin(object(), 1, config, *more, **kwargs)
    assert given == [(1, config, *more), kwargs]
    return given


async def test_beside_an_api_server_vllms_own_metrics_are_known(made):
    start(rank=0)
    assert made[1] == ("127.0.0.1:7", {"beside_vllms": True})


@pytest.mark.parametrize(
    ("rank", "options", "expected"),
    [
        (0, {}, None),  # the class `LLM`
        (0, {"local_client": True}, None),
        (0, {"local_client": False}, Layout.OTHERS),
        (-1, {}, Layout.OTHERS),
        (1, {}, None),
    ],
)
def test_who_answers_http_is_told_by_vllms_own_arguments(rank, options, expected):
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=rank))
    assert hooks._layout(config, options) is expected
    assert hooks._layout(SimpleNamespace(parallel_config=SimpleNamespace()), options) == (
        Layout.OTHERS if options.get("local_client") is False else None
    )


def test_engines_start_without_reports_where_none_can_be_collected(made, monkeypatch, engine_log):
    monkeypatch.setattr(Collector, "fails", True)
    start()
    assert made == [] and FOLDER not in os.environ and READ_AT not in os.environ
    (line,) = engine_log.messages
    assert "no sockets here" in line


@pytest.mark.parametrize("read_at", ["", "127.0.0.1:7"])
def test_the_address_is_said_once_if_there_is_one(made, monkeypatch, engine_log, read_at):
    engine_log.set_level(logging.INFO, "vllm.seamark")
    monkeypatch.setattr(Collector, "read_at", read_at)
    start()
    assert [read_at in line for line in engine_log.messages] == ([True] if read_at else [])


@pytest.mark.parametrize(
    ("asked_for", "enabled", "port"),
    [("", True, 4), ("", False, 0), ("127.0.0.1:9", True, 9)],
)
def test_reports_are_beside_kv_events_if_these_are_published_and_nobody_says_where(
    made, monkeypatch, asked_for, enabled, port
):
    monkeypatch.setattr(hooks, "_beside", lambda endpoint: {"tcp://*:5": 4}[endpoint])
    monkeypatch.setenv(settings.REPORTS_AT, asked_for)
    start(events=SimpleNamespace(enable_kv_cache_events=enabled, endpoint="tcp://*:5"))
    assert made[0][0] == ("127.0.0.1", port)


class Probe:
    """A socket on a machine whose ports are all free."""

    bound: list[Any]

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def setsockopt(self, *option: Any) -> None:
        self.bound.append(option)

    def bind(self, address: tuple[str, int]) -> None:
        self.bound.append(address)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [
        ("tcp://*:5557", 5556),
        ("tcp://*:2", 1),
        ("tcp://*:1", 0),
        ("tcp://*:0", 0),
        ("tcp://*:65536", 65535),
        ("tcp://*:65537", 0),
        ("tcp://*:99999", 0),
        ("tcp://*:000005557", 0),
        ("tcp://*:-5", 0),
        ("inproc://x", 0),
    ],
)
def test_the_port_before_that_of_kv_events_is_one(monkeypatch, endpoint, port):
    monkeypatch.setattr(Probe, "bound", [], raising=False)
    monkeypatch.setattr(hooks.socket, "socket", Probe)
    assert hooks._beside(endpoint) == port
    reuse = (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    assert Probe.bound == ([reuse, ("127.0.0.1", port)] if port else [])


@pytest.mark.parametrize(
    ("arguments", "keys"),
    [
        ("--config {file}", ("a",)),
        ("--port 1 --config {file}", ("a",)),
        ("--config {file} --api-key b", ("b",)),
        ("--config", ("c",)),
        ("--config {file}.not", ("c",)),
        ("--api-key", ("c",)),
        ("--api-key --port 1", ("c",)),
        ("--other a --api-key b --other c", ("b",)),
        ("--api-key=", ("",)),
    ],
)
def test_keys_of_a_file_and_of_the_environment_stand_back_behind_flags(arguments, keys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("api-key: a")
    assert keys_in(["vllm", "serve", *arguments.format(file=file).split()], {"VLLM_API_KEY": "c"}) == keys


@pytest.mark.parametrize(
    ("text", "keys"),
    [("api-key: 5", ("5",)), ("api_key: [1, b]", ("1", "b")), ("api-key:", ()), ("api-key: []", ())],
)
def test_keys_of_a_file_are_text(text, keys, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert keys_in(["--config", str(file)], {}) == keys


class Reporter:
    """In place of the real one."""

    def __init__(self, scheduler: Any = None, address: str = "") -> None:
        self.scheduler, self.address = scheduler, address
        self.told: list[Any] = []

    def send(self) -> None:
        self.told.append("sent")

    def step_ends(self, *, busy: bool) -> None:
        self.told.append(busy)


def test_a_scheduler_that_cannot_report_is_made_without(monkeypatch, engine_log):
    def fails(*_: Any) -> None:
        raise OSError("no sockets here")

    monkeypatch.setenv(FOLDER, "/a/folder")
    monkeypatch.setattr(reporter, "Reporter", fails)
    scheduler = SimpleNamespace()
    hooks.report_from_the_start(lambda self: None)(scheduler)
    assert not hasattr(scheduler, REPORTS)
    (line,) = engine_log.messages
    assert "no sockets here" in line


@pytest.mark.parametrize("busy", [True, False])
def test_a_step_reports_before_its_numbers_are_made(monkeypatch, busy):
    monkeypatch.setattr(hooks.load, "may_have_changed", lambda planned: {"a step": busy}[planned])
    own = Reporter()
    scheduler = SimpleNamespace(seamark=SimpleNamespace(last_planned="a step"), **{REPORTS: own})
    make = hooks.report_with_stats(lambda self, *args, **kwargs: (list(own.told), args, kwargs))
    assert make(scheduler, 1, a=2) == ([busy], (1,), {"a": 2})
    assert make(SimpleNamespace(), 1) == ([busy], (1,), {}) and own.told == [busy]


def test_an_emptied_cache_is_reported_at_once():
    own = Reporter()
    reset = hooks.report_resets(lambda self, *args, **kwargs: (list(own.told), args, kwargs))
    assert reset(SimpleNamespace(**{REPORTS: own}), 1, a=2) == ([], (1,), {"a": 2})
    assert own.told == ["sent"] and reset(SimpleNamespace()) == (["sent"], (), {}) and own.told == ["sent"]


def test_a_frontend_without_routes_of_ours_tells_where_reports_are_read(monkeypatch):
    monkeypatch.setenv(READ_AT, "127.0.0.1:7")
    told = hooks.tell_where(lambda self: None)(SimpleNamespace())
    assert (told.publisher, told.endpoint, told.topic) == ("null", "tcp://127.0.0.1:7", TOPIC)
