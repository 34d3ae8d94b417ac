"""States written by workers in processes of their own: two of them, each with half of the heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import complete, open_client, tokens_of
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import Server, Servers
from tests.harness.engines import SharedServers

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
