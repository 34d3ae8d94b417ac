"""States written by workers in processes of their own: each with half of the heads, or with some of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from proxy.bench.harness.client import open_client
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import QWEN3_NEXT, Servers
from tests.harness import engine_traffic
from tests.harness.engines import EAGER_STAGES, SharedServers

# With two stages, the first one computes the next step while the second computes the last one.
WAYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "half of the heads": ("--tensor-parallel-size", {}),
    "some of the layers": ("--pipeline-parallel-size", EAGER_STAGES),
}


@pytest.mark.thorough
@pytest.mark.parametrize("way", WAYS)
async def test_two_workers_write_the_same_states(
    servers: SharedServers, fleet: Servers, model: Path, family: str, tmp_path: Path, way: str
):
    flag, plugins = WAYS[way]
    if plugins and family == QWEN3_NEXT:
        pytest.skip("the generated model has experts in one layer, and vLLM wants some in each stage")
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **plugin_environment(tmp_path / "plugins", plugins)}
    engine = fleet.engine("two-workers", model, flags=(flag, "2", *engine_traffic.TIGHT), environment=environment)
    engine.wait_until_ready()
    async with open_client(300) as client:
        for traffic in (engine_traffic.shared_beginnings, engine_traffic.clients_that_leave):
            await traffic(client, engine, servers.reference)
