"""Some of `python -m tests.bench.fuzz`: broken requests break nothing, and ambiguous ones reach no worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.bench import fuzz_framing
from tests.bench.fuzz import GATEWAY_FLAGS, Run, fuzz, render
from tests.bench.fuzz_cases import REFUSED, Case, case, name_of
from tests.harness.forked_gateways import GatewayForks
from tests.harness.raw_worker import RawWorker


@pytest.mark.parametrize("cases", [200, pytest.param(2000, marks=pytest.mark.thorough)])
async def test_nothing_breaks_at_broken_requests(tmp_path, cases):
    with GatewayForks(tmp_path) as fleet:
        rare = next(number for number in itertools.count() if case(1, number).kind == "at a limit")
        result = await fuzz(fleet, seed=1, seconds=0, only=sorted({*range(cases), rare}))
    assert result.held, render(result)
    kinds = {"well framed", "pipelined", "ambiguous", "odd", "mutated", "half", "at a limit"}
    assert kinds <= set(result.kinds)
    assert min(result.reached, result.statuses[200]) > cases / 2 and result.statuses[400] > cases / 20


@pytest.fixture
async def worker() -> AsyncIterator[RawWorker]:
    async with RawWorker() as made:
        yield made


@pytest.fixture
async def run(worker: RawWorker, tmp_path: Path) -> AsyncIterator[Run]:
    with GatewayForks(tmp_path) as fleet:
        gateway = fleet.gateway(worker, flags=GATEWAY_FLAGS)
        await asyncio.to_thread(gateway.wait_until_ready, "/ready")
        yield Run(gateway, worker, 0)


async def test_no_ambiguous_request_gets_past_the_gateway(run, worker):
    for number, wrong in enumerate(fuzz_framing.ambiguous("")):
        data = fuzz_framing.ambiguous(name_of(0, number))[wrong]
        assert await run.judged(Case(number, wrong, REFUSED, [data])) == "", wrong
    assert await run.left_behind() == []
    assert not worker.seen.keys() - {"last"}
