"""Some of `python -m tests.bench.fuzz`: broken requests break nothing, and ambiguous ones reach no worker."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.bench import fuzz_framing
from tests.bench.fuzz import GATEWAY_FLAGS, Run, fuzz, render
from tests.bench.fuzz_cases import ANSWERED, REFUSED, Case, Sent, case, name_of
from tests.harness.forked_gateways import GatewayForks
from tests.harness.raw_http import request
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


async def test_a_body_in_utf_16_is_answered_whatever_it_is_called(run):
    """What is read as UTF-16 must be changed as UTF-16 too, or not at all."""
    body = {"model": "m", "messages": [], "stream": True, "cache_salt": "x", "kv_transfer_params": {"a": 1}}
    raw = json.dumps(body).encode("utf-16")
    for number, path in enumerate(("/v1/rerank", "/v1/chat/completions")):
        sent = Sent(f"utf-16-{number}", "POST", path, raw)
        headers = {"content-type": "text/plain; charset=utf-16", "x-mock-id": sent.name}
        data = request(sent.method, sent.target, headers, raw)
        assert await run.judged(Case(number, "well framed", ANSWERED, [data], [sent])) == ""
