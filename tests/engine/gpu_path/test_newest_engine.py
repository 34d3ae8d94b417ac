"""The newest vLLM as a real engine on a CPU: its Python files over the compiled ones of the CPU build that there is.

With asynchronous scheduling, as on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness.client import complete, open_client
from proxy.bench.harness.counters import PassCounter
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import Server, Servers
from tests.harness import engine_traffic
from tests.harness.async_scheduling import PLANS_AHEAD
from tests.harness.versions import engine_of

NEWEST = "0.33.0"

pytestmark = pytest.mark.on_request


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    """One with the plugin, and its reference."""
    folder = tmp_path_factory.mktemp("newest")
    environment = plugin_environment(folder, {"seamark_async": "tests.harness.async_scheduling:register"})
    environment = {"PYTHONPATH": os.pathsep.join((str(engine_of(NEWEST)), environment["PYTHONPATH"]))}
    with Servers(folder) as fleet:
        engine = fleet.engine("newest", model, "1", ("--async-scheduling", *engine_traffic.TIGHT), environment)
        reference = fleet.engine("reference", model, "reference", ("--no-enable-prefix-caching",), environment)
        for started in (engine, reference):
            started.wait_until_ready()
        yield engine, reference


@pytest.mark.parametrize(
    "traffic", [engine_traffic.shared_beginnings, engine_traffic.cold_fan_out, engine_traffic.clients_that_leave]
)
async def test_answers_are_exact_and_hit(engines, traffic):
    engine, reference = engines
    async with open_client(300) as client:
        await traffic(client, engine, reference)
    log = engine.log.read_text(errors="replace")
    assert PLANS_AHEAD in log and NEWEST in log


async def test_a_prompt_with_states_in_it_takes_one_pass(engines):
    engine, _ = engines
    async with open_client(300) as client:
        counter = PassCounter(engine.log)
        hint = {"vllm_xargs": {"seamark_boundaries": [100, 163, 250]}}
        answer = await complete(client, engine.url, list(range(700, 1000)), **hint)
        assert counter.after([answer]).with_prompt == 1
