"""`tests.bench.gateway_cost`: run small, and what it makes of made-up batches."""

from __future__ import annotations

import pytest

from tests.bench import gateway_cost
from tests.bench.gateway_cost import (
    BARE,
    CASES,
    DIRECT,
    SEAMARK,
    Batch,
    Case,
    Report,
    verdicts,
)
from tests.bench.peers import VLLM_ROUTER


@pytest.mark.thorough
async def test_the_gateway_benchmark_has_a_row_for_each_gateway_and_kind_of_traffic():
    report = await gateway_cost.run([], CASES, 8, 2, print)
    assert list(report.batches) == [DIRECT, SEAMARK, BARE]
    for name, batches in report.batches.items():
        assert {case: len(each) for case, each in batches.items()} == dict.fromkeys(CASES, 2)
        assert name == DIRECT or all(report.cpu(name, case).median > 20e-6 for case in CASES)
    assert report.renders == 0  # no request is rendered


def made_up(ours: float, theirs: float, added: float) -> Report:
    """CPU seconds of both on every kind of traffic, and seconds that ours adds to the p50."""

    def batches(cpu: float | None, more: float) -> dict[Case, list[Batch]]:
        rounds = [Batch(cpu and cpu * n, 0.001 * n + more, 0.003, 0.001) for n in (1, 2, 3)]
        return dict.fromkeys(CASES, rounds)

    gateways = {DIRECT: batches(None, 0.0), SEAMARK: batches(ours, added), VLLM_ROUTER: batches(theirs, 0.0001)}
    return Report(gateways, {"litellm": "no such version"}, 0, 100)


def test_a_gateway_that_costs_too_much_or_was_not_measured_beside_the_router_has_not_held():
    for report, held in ((made_up(170e-6, 200e-6, 0.0004 - 1e-9), 3), (made_up(510e-6, 200e-6, 0.00071), 0)):
        assert [line.startswith("held") for line in verdicts(report, beside_router=True)] == [bool(held)] * 3
    assert "NOT HELD: CPU over vllm-router, 2 kB, plain, 16 clients: 2.55, at most 1.5 wanted" in verdicts(report, True)
    del report.batches[VLLM_ROUTER]
    assert [line.count("not taken") for line in verdicts(report, beside_router=True)] == [0, 1, 1]
