"""A client that leaves stops a real engine as soon behind the gateway as without it."""

from __future__ import annotations

import pytest

from tests.bench.aborts import leave_engine, remains
from tests.harness.engines import SharedServers


@pytest.mark.parametrize("stream", [True, False])
async def test_a_real_engine_stops_as_soon_behind_the_gateway_as_without(servers: SharedServers, stream):
    left = await leave_engine(servers.seamark, servers.gateway, stream, 3)
    print(left)
    assert left.held, left
    after = await remains(servers.gateway)
    assert after.inflight == 0
