"""What runs beside the requests goes on, whatever a worker, a file or a server does to it."""

from __future__ import annotations

import asyncio

import pytest

from proxy.fleet import part as part_of
from proxy.fleet.part import Change, Part, Shelf
from proxy.fleet.worker import Worker
from proxy.metrics import Metrics


class Watching(Part):
    """It runs as a test wants it to, and notes what it is told."""

    name = "watching"

    def __init__(self, run=None) -> None:
        self.held = 7
        self.told: list[tuple[str, Change, str]] = []
        self.prepared: list[str] = []
        self.is_closed = False
        self._run = run

    async def run(self) -> None:
        if self._run is not None:
            await self._run()

    async def aclose(self) -> None:
        self.is_closed = True

    async def prepare(self, worker: Worker) -> None:
        self.prepared.append(worker.name)

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        self.told.append((worker.name, change, model))


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> Metrics:
    monkeypatch.setattr(part_of, "RESTART_SECONDS", 0.0)
    return Metrics()


def failures(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value("seamark_task_failures_total", {"task": name})


async def test_a_part_that_fails_is_started_again_and_counted(metrics, caplog):
    done = asyncio.Event()
    runs = 0

    async def watch() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RecursionError("sk-secret")
        done.set()
        await asyncio.Event().wait()

    shelf = Shelf(metrics)
    part = shelf.put(Watching(watch))
    shelf.also_run("files", asyncio.Event().wait)
    shelf.start()
    async with asyncio.timeout(30):
        await done.wait()
    await shelf.stop()
    assert not part.is_closed
    await shelf.aclose()
    assert (runs, failures(metrics, "watching"), failures(metrics, "files")) == (3, 2, 0)
    assert "RecursionError" in caplog.text and "sk-secret" not in caplog.text and part.is_closed
