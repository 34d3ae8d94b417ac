"""Honest clients beside attackers, for some seconds; what is wrong with a run of `make attacks` is told."""

from __future__ import annotations

import dataclasses

import pytest

from tests.bench.attackers import KINDS
from tests.bench.attacks import Run, complaints, memory_bound, render, run
from tests.harness.forked_gateways import GatewayForks

FINE = Run(
    attackers=16,
    seconds=24.0,
    streams=64,
    failed=0,
    frames=1000,
    late_p99=0.01,
    late_most=0.1,
    health_p50=0.001,
    health_p99=0.05,
    health_most=0.2,
    health_failed=0,
    memory_most=100 * 2**20,
    files_before=15,
    files_after=15,
    attacks=dict.fromkeys(KINDS, 100),
    failures={},
    log=[],
)


@pytest.mark.parametrize("seconds", [3.0, pytest.param(12.0, marks=pytest.mark.thorough)])
async def test_honest_streams_survive_all_kinds_of_attacks(tmp_path, seconds):
    with GatewayForks(tmp_path) as fleet:
        found = await run(fleet, attackers=8, seconds=seconds)
    wrong = complaints(FINE, dataclasses.replace(found, health_p99=0.0, late_most=0.0), per_second=0.0)
    assert not wrong, wrong  # how long they waited depends on the machine
    assert found.frames > 0 and sum(found.attacks.values()) > 0


def test_a_run_that_is_fine_held():
    assert complaints(FINE, FINE) == [] and "held" in render(FINE, FINE, [])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"failed": 1}, "1 honest streams"),
        ({"health_failed": 2}, "2 questions for the health"),
        ({"health_p99": 0.11}, "p99 of /health 110 ms"),
        ({"late_most": 0.27}, "270 ms late"),
        ({"memory_most": memory_bound() + 1}, "resident"),
        ({"files_after": 16}, "16 descriptors"),
        ({"attacks": {**FINE.attacks, "deep": 4}}, "deep"),
        ({"log": ["ERROR x"]}, "ERROR x"),
    ],
)
def test_what_is_wrong_is_told(wrong, told):
    (complaint,) = complaints(FINE, dataclasses.replace(FINE, **wrong))
    assert told in complaint


def test_what_fails_without_attackers_is_not_theirs():
    quiet = dataclasses.replace(FINE, failed=3)
    assert not complaints(quiet, dataclasses.replace(FINE, failed=3))
