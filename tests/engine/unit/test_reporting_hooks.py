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
from engine_patches.reporting import collector, hooks, metrics
from engine_patches.reporting.addresses import FOLDER, READ_AT
from engine_patches.reporting.hooks import Layout, collect_before_the_engines, keys_in


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

    def start(self, metrics: Any) -> None: ...


@pytest.fixture
def made(monkeypatch) -> list[Any]:
    """Of each collector that was made its address and keys."""
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


@pytest.mark.parametrize(
    ("rank", "options", "expected"),
    [
        (0, {}, None),  # the class `LLM`, for which no gateway asks
        (0, {"local_client": True}, None),
        (0, {"local_client": False}, Layout.OTHERS),
        (-1, {}, Layout.OTHERS),
        (1, {}, None),
        (None, {}, None),
    ],
)
def test_who_answers_http_is_told_by_vllms_own_arguments(rank, options, expected):
    ranks = {} if rank is None else {"_api_process_rank": rank}
    assert hooks._layout(SimpleNamespace(parallel_config=SimpleNamespace(**ranks)), options) is expected


async def test_beside_an_api_server_reports_are_collected_in_its_process():
    config = SimpleNamespace(parallel_config=SimpleNamespace(_api_process_rank=0))
    assert hooks._layout(config, {}) is Layout.THIS_PROCESS


@pytest.mark.parametrize(("read_at", "fails"), [("", False), ("127.0.0.1:7", False), ("", True)])
def test_engines_start_and_one_line_says_where_reports_are_read_or_why_there_are_none(
    made, monkeypatch, engine_log, read_at, fails
):
    engine_log.set_level(logging.INFO, "vllm.seamark")
    monkeypatch.setattr(Collector, "read_at", read_at)
    monkeypatch.setattr(Collector, "fails", fails)
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
        ("--config {file}", "api-key:", ("c",)),
        ("--config {file} --api-key b", "api-key: a", ("b",)),
        ("--config {file}.not", "", ("c",)),
        ("--api-key", "", ("c",)),
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
    monkeypatch.setattr(hooks.load, "may_have_changed", lambda planned: {"a step": busy}[planned])
    told: list[Any] = []
    own = SimpleNamespace(send=lambda: told.append("sent"), step_ends=lambda *, busy: told.append(busy))
    scheduler = SimpleNamespace(seamark=SimpleNamespace(last_planned="a step"), **{REPORTS: own})

    def vllms(self: Any, *args: Any, **kwargs: Any) -> Any:
        return list(told), args, kwargs

    make, reset = hooks.report_with_stats(vllms), hooks.report_resets(vllms)
    assert make(scheduler, 1, a=2) == ([busy], (1,), {"a": 2})
    assert reset(scheduler, 1, a=2) == ([busy], (1,), {"a": 2}) and told == [busy, "sent"]
    assert make(SimpleNamespace(), 1)[1:] == reset(SimpleNamespace(), 1)[1:] == ((1,), {}) and told == [busy, "sent"]
