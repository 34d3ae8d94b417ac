"""A client that leaves stops a real engine as soon behind the gateway as without it."""

from __future__ import annotations

from statistics import median

import pytest

from tests.harness.engines import SharedServers
from tests.harness.leaving_clients import LIMIT_SECONDS, leave_engine, remains


@pytest.mark.parametrize("stream", [True, False])
async def test_a_real_engine_stops_as_soon_behind_the_gateway_as_without(servers: SharedServers, stream):
    left = await leave_engine(servers.seamark, servers.gateway, stream, 3)
    print(left)
    assert not left.direct.failures and not left.behind.failures, left
    # The slowest tell nothing: other work may have the processor.
    assert median(left.behind.seconds) <= median(left.direct.seconds) + LIMIT_SECONDS + left.step_seconds, left
    after = await remains(servers.gateway)
    assert after.inflight == 0
