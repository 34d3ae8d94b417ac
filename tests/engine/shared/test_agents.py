"""Twenty turns with tools in the request shapes of two coding agents, on a real engine."""

from __future__ import annotations

import asyncio

import pytest

from proxy.bench.agents import efficiency, shapes
from tests.harness.engines import SharedServers


@pytest.mark.parametrize("agent", shapes())
def test_an_agents_requests_hit_nearly_all_they_can(servers: SharedServers, agent):
    requests = shapes()[agent]
    result = asyncio.run(efficiency(servers.gateway.url, servers.seamark.url, requests, match_unit=16))
    assert result.share >= 0.95, result
