"""A client that leaves frees the worker at once, and nothing of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from statistics import median

import pytest

from proxy.commands.render_server import free_port
from proxy.server.uvicorn_server import server_for
from proxy.settings import Settings
from tests.bench.soak import bad_lines
from tests.harness.forked_gateways import GatewayForks
from tests.harness.leaving_clients import (
    CASES,
    FD_SLACK,
    LIMIT_SECONDS,
    leave_all,
    queue_case,
    remains,
    started,
)
from tests.harness.raw_worker import RawWorker

TIMES = 3


@pytest.fixture
async def worker() -> AsyncIterator[RawWorker]:
    async with RawWorker() as made:
        yield made


async def test_a_client_that_leaves_at_any_moment_frees_the_worker_within_100_ms(worker, tmp_path):
    with GatewayForks(tmp_path) as fleet:
        gateway = await started(fleet.gateway(worker))
        await leave_all(gateway, worker, 2)
        before = await remains(gateway)
        cases = await leave_all(gateway, worker, TIMES)
        after = await remains(gateway, before)
    # The slowest tell nothing: other work may have the processor.
    assert [case for case in cases if case.failures or median(case.seconds) > LIMIT_SECONDS] == []
    assert [len(case.seconds) for case in cases] == [TIMES] * len(CASES)
    assert (after.inflight, after.queued) == (0, 0) and after.open_files <= before.open_files + FD_SLACK
    assert not worker.malformed and bad_lines(gateway, 0) == []


async def test_a_client_that_leaves_in_the_queue_never_reaches_the_worker(worker, tmp_path):
    with GatewayForks(tmp_path) as fleet:
        left = await queue_case(fleet, worker, TIMES)
        assert not left.failures and median(left.seconds) <= LIMIT_SECONDS, left
        after = await remains(fleet.started[0])
    assert (after.inflight, after.queued) == (0, 0)


async def test_no_task_outlives_the_clients(worker):
    """The gateway in this process, where its tasks can be counted."""
    port = free_port()
    server = server_for(Settings(worker=(worker.url,), port=port), {"version": 1})
    serving = asyncio.create_task(server.serve())
    gateway = InProcess(f"http://127.0.0.1:{port}")
    async with asyncio.timeout(60):
        while not server.started:
            await asyncio.sleep(0.01)
        await leave_all(gateway, worker, 1)
        before = await tasks_at_rest()
        await leave_all(gateway, worker, 2)
        assert await tasks_at_rest(before) <= before
        server.should_exit = True
        await serving


@dataclass
class InProcess:
    """As much of a `Server` as is needed to talk to it."""

    url: str


async def tasks_at_rest(wanted: int = 0) -> int:
    """How many tasks there are once there are no more than `wanted`, or else after half a minute (0: three seconds)."""
    counts = []
    for _ in range(600 if wanted else 60):
        counts.append(len(asyncio.all_tasks()))
        if wanted and counts[-1] <= wanted:
            return counts[-1]
        await asyncio.sleep(0.05)
    return min(counts[-20:])
