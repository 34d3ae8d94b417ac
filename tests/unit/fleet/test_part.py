"""What runs beside the requests goes on, whatever a worker, a file or a server does to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from proxy.fleet import part as part_of
from proxy.fleet.part import Part, Shelf
from proxy.metrics import Metrics


class Watching(Part):
    name = "watching"

    def __init__(self, run: Callable[[], Awaitable[None]]) -> None:
        self._run, self.is_closed = run, False

    async def run(self) -> None:
        await self._run()

    async def aclose(self) -> None:
        self.is_closed = True


async def test_a_part_that_fails_is_started_again_and_counted(monkeypatch, caplog):
    monkeypatch.setattr(part_of, "RESTART_SECONDS", 0.0)
    metrics = Metrics()
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
    failures = [
        metrics.registry.get_sample_value("seamark_task_failures_total", {"task": name})
        for name in ("watching", "files")
    ]
    assert (runs, failures) == (3, [2, 0])
    assert "RecursionError" in caplog.text and "sk-secret" not in caplog.text and part.is_closed
