"""Honest clients beside attackers, for some seconds: a short run of `make attacks`."""

from __future__ import annotations

import dataclasses

import pytest

from tests.bench.attacks import complaints, run
from tests.harness.forked_gateways import GatewayForks


@pytest.mark.thorough
async def test_honest_streams_survive_all_kinds_of_attacks(tmp_path):
    with GatewayForks(tmp_path) as fleet:
        found = await run(fleet, attackers=8, seconds=12.0)
    # How long they waited depends on the machine.
    found = dataclasses.replace(found, health_p99=0.0, late_most=0.0)
    quiet = dataclasses.replace(found, failed=0, health_failed=0, files_after=found.files_before, log=[])
    assert complaints(quiet, found, per_second=0.0) == []
    assert found.frames > 0 and sum(found.attacks.values()) > 0
