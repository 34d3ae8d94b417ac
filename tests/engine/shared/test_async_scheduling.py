"""Asynchronous scheduling on a real engine: the next step is planned before the last one's tokens are known.

It is the default wherever there is a GPU; vLLM's CPU platform switches it off, and a plugin of the tests back on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness.client import open_client
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import Server, Servers
from tests.harness import engine_traffic
from tests.harness.async_scheduling import PLANS_AHEAD
from tests.harness.engines import SharedServers


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("async")
    environment = plugin_environment(folder, {"seamark_async": "tests.harness.async_scheduling:register"})
    with Servers(folder) as fleet:
        started = fleet.engine("async", model, "1", ("--async-scheduling", *engine_traffic.TIGHT), environment)
        started.wait_until_ready()
        yield started


@pytest.mark.parametrize(
    "traffic", [engine_traffic.shared_beginnings, engine_traffic.cold_fan_out, engine_traffic.clients_that_leave]
)
async def test_answers_are_exact_and_hit(engine: Server, servers: SharedServers, traffic):
    async with open_client(300) as client:
        await traffic(client, engine, servers.reference)
    assert PLANS_AHEAD in engine.log.read_text(errors="replace")
