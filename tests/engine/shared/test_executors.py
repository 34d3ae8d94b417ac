"""States written by workers in processes of their own: each with half of the heads, or with some of the layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import complete, fresh_tokens, open_client, tokens_of
from proxy.bench.harness.counters import PassCounter, samples_of
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import QWEN3_NEXT, Server, Servers
from tests.harness import engine_traffic
from tests.harness.engines import EAGER_STAGES, SharedServers

PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Servers(tmp_path_factory.mktemp("executors")) as fleet:
        started = fleet.engine("two-workers", model, "1", ("--tensor-parallel-size", "2"), PROCESSES)
        started.wait_until_ready()
        yield started


@pytest.mark.thorough
async def test_tensor_parallel_workers_write_the_same_states(engine: Server, servers: SharedServers):
    async with open_client(300) as client:
        prompt = await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(400, 120)}])
        for shared, own, hit in ((500, 40, 0), (500, 25, 496), (163, 9, 160), (163, 200, 160)):
            asked = [*prompt[:shared], *reversed(prompt[:own])]
            hint = {"vllm_xargs": {"seamark_boundaries": [163, 500]}}
            answer = await complete(client, engine.url, asked, **hint)
            right = await complete(client, servers.reference.url, asked)
            assert answer.cached_tokens == hit
            assert exact.compare(answer, right).exact
        counted = await samples_of(client, engine)
        assert counted["seamark_checkpoint_hits_total"] == 3


@pytest.fixture(scope="module")
def stages(model: Path, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Each has recurrent layers: vLLM's model runner V1 ends at the first prompt where one of them has none."""
    if family == QWEN3_NEXT:
        pytest.skip("the generated model has experts in one layer, and vLLM wants some in each stage")
    folder = tmp_path_factory.mktemp("stages")
    environment = plugin_environment(folder, EAGER_STAGES)
    flags = ("--pipeline-parallel-size", "2", *engine_traffic.TIGHT)
    with Servers(folder) as fleet:
        started = fleet.engine("two-stages", model, "1", flags, {**PROCESSES, **environment})
        started.wait_until_ready()
        yield started


@pytest.mark.thorough
@pytest.mark.parametrize(
    "traffic", [engine_traffic.shared_beginnings, engine_traffic.cold_fan_out, engine_traffic.clients_that_leave]
)
async def test_pipeline_stages_write_the_same_states(stages: Server, servers: SharedServers, traffic):
    """With two of them, the first stage computes the next step while the second computes the last one."""
    async with open_client(300) as client:
        await traffic(client, stages, servers.reference)


@pytest.mark.thorough
async def test_a_state_costs_pipeline_stages_no_pass(stages: Server):
    passes = []
    async with open_client(300) as client:
        for hint in ([], [130, 163, 200, 290]):
            counter = PassCounter(stages.log)
            fields = {"vllm_xargs": {"seamark_boundaries": hint}} if hint else {}
            answer = await complete(client, stages.url, fresh_tokens(300, "passes", *hint), **fields)
            passes.append(counter.after([answer]).with_prompt)
        before = (await samples_of(client, stages))["seamark_checkpoint_hits_total"]
        shared = [*fresh_tokens(300, "passes", *hint)[:163], *fresh_tokens(30, "others")]
        assert (await complete(client, stages.url, shared)).cached_tokens == 160
        assert (await samples_of(client, stages))["seamark_checkpoint_hits_total"] == before + 1
    assert passes == [1, 1]
