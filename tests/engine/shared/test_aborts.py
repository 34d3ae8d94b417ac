"""A client that leaves stops a real engine behind the gateway: nothing is computed for nobody."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT, metric
from tests.harness.waiting import until

TOKENS = 7000  # of an answer that takes minutes


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_a_real_engine_behind_the_gateway(servers: SharedServers, stream):
    def generated() -> float:
        return metric(servers.seamark, "vllm:generation_tokens_total")

    def running() -> float:
        return metric(servers.seamark, "vllm:num_requests_running")

    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Tell all."}], "stream": stream}
    body |= {"max_tokens": TOKENS, "ignore_eos": True}
    before = generated()
    async with httpx.AsyncClient(timeout=120) as client:
        asking = asyncio.create_task(client.post(servers.gateway.url + CHAT, json=body))
        await until(lambda: running() == 1, 120)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: running() == 0 and metric(servers.gateway, "seamark_inflight") == 0, 60)
    assert generated() - before < TOKENS / 2
