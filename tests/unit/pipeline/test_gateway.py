"""What runs beside the requests goes on, whatever a worker, a file or a server does to it."""

from __future__ import annotations

import asyncio

import pytest

from proxy.pipeline import gateway as gateway_of
from proxy.pipeline.gateway import Gateway
from proxy.settings import Settings


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    monkeypatch.setattr(gateway_of, "RESTART_SECONDS", 0.0)
    return Gateway(Settings(health_interval=0.001))


def failures(gateway: Gateway, task: str) -> float:
    return gateway.metrics.registry.get_sample_value("seamark_task_failures_total", {"task": task}) or 0.0


async def test_a_part_that_fails_is_started_again_and_counted(gateway, caplog):
    done = asyncio.Event()
    runs = 0

    async def watch() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RecursionError("sk-secret")
        done.set()
        await asyncio.Event().wait()

    gateway.pool.watch = watch
    gateway.start()
    async with asyncio.timeout(30):
        await done.wait()
    await gateway.stop()
    assert (runs, failures(gateway, "workers"), failures(gateway, "files")) == (3, 2, 0)
    assert "RecursionError" in caplog.text and "sk-secret" not in caplog.text


async def test_a_part_that_has_nothing_to_do_ends(gateway):
    async def nothing() -> None:
        return

    await gateway._keep_running("heartbeats", nothing)
    assert failures(gateway, "heartbeats") == 0


async def test_a_part_that_loses_a_cancellation_is_ended_all_the_same(gateway, monkeypatch):
    monkeypatch.setattr(gateway_of, "CANCEL_SECONDS", 0.01)
    started, lost = asyncio.Event(), 0

    async def watch() -> None:
        nonlocal lost
        started.set()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                if lost == 2:
                    raise
                lost += 1

    gateway.pool.watch = watch
    gateway.start()
    await started.wait()
    async with asyncio.timeout(30):
        await gateway.stop()
    assert lost == 2


async def test_files_in_force_are_told_by_the_settings_that_name_them(tmp_path):
    path = tmp_path / "workers.toml"
    path.write_text("")
    gateway = Gateway(Settings(workers_file=path))

    def current(setting: str) -> float | None:
        return gateway.metrics.registry.get_sample_value("seamark_file_current", {"setting": setting})

    def errors() -> float | None:
        return gateway.metrics.registry.get_sample_value("seamark_config_reload_errors_total", {"file": "workers_file"})

    assert (current("workers_file"), current("api_keys")) == (1.0, None)
    assert errors() == 0.0
    for depth in (5000, 5001):
        path.write_text("a = " + "[" * depth + "]" * depth)
        gateway.pool.refresh()
        gateway.pool.refresh()  # unchanged since
        assert current("workers_file") == 0.0
    assert errors() == 2.0
    path.write_text('[[worker]]\nurl = "http://127.0.0.1:9"\n')
    gateway.pool.refresh()
    assert current("workers_file") == 1.0 and len(gateway.pool.workers) == 1 and errors() == 2.0
    await gateway.stop()
