"""Asynchronous scheduling on a real engine: the next step is planned before the last one's tokens are known.

It is the default wherever there is a GPU; vLLM's CPU platform switches it off, and a plugin of the tests back on.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import complete, open_client, tokens_of
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from tests.harness.async_scheduling import PLANS_AHEAD
from tests.harness.engines import SharedServers

PARALLEL = 8

# Steps of 320 tokens and 64 blocks: chunked prefill, fan-outs over several steps, eviction.
TIGHT = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("async")
    environment = plugin_environment(folder, {"seamark_async": "tests.harness.async_scheduling:register"})
    with Servers(folder) as fleet:
        started = fleet.engine("async", model, "1", ("--async-scheduling", *TIGHT), environment)
        started.wait_until_ready()
        yield started


@pytest.fixture
async def client():
    async with open_client(300) as opened:
        yield opened


async def both(client, engine: Server, servers: SharedServers, prompts: list[list[int]], hint: list[int]) -> list[int]:
    """Tokens that each prompt found in the cache; all are asked at once, and each answer is exact."""
    fields = {"vllm_xargs": {"seamark_boundaries": hint}}
    answers = await asyncio.gather(*(complete(client, engine.url, prompt, **fields) for prompt in prompts))
    right = await asyncio.gather(*(complete(client, servers.reference.url, prompt) for prompt in prompts))
    found = [exact.compare(answer, wanted) for answer, wanted in zip(answers, right, strict=True)]
    assert not [(number, each) for number, each in enumerate(found) if not each.exact]
    return [answer.cached_tokens for answer in answers]


async def prompt_of(client, servers: SharedServers, words: int, seed: int) -> list[int]:
    return await tokens_of(client, servers.reference.url, [{"role": "user", "content": prose(words, seed)}])


async def test_random_prompts_with_shared_beginnings_hit_and_are_exact(client, engine, servers):
    draw = random.Random(11)
    heads = [await prompt_of(client, servers, words, 300 + words) for words in (80, 200, 500)]
    prompts, shared = [], 0
    for _ in range(40):
        head = draw.choice(heads)
        cut = draw.choice((50, 96, 160, len(head) - 9))
        prompts.append(
            [*head[: min(cut, len(head))], *(draw.randrange(100, 4000) for _ in range(draw.randint(3, 200)))]
        )
    for begin in range(0, len(prompts), PARALLEL):
        shared += sum(await both(client, engine, servers, prompts[begin : begin + PARALLEL], [50, 96, 160]))
    assert PLANS_AHEAD in engine.log.read_text(errors="replace")
    assert shared > 0.2 * sum(map(len, prompts))
    assert (await samples_of(client, engine))["seamark_checkpoint_hits_total"] > len(prompts) // 4


async def test_a_cold_fan_out_over_several_steps_shares_one_prefill(client, engine, servers):
    head = (await prompt_of(client, servers, 2000, 401))[:1600]
    prompts = [[*head, *(1000 + number * 50 + index for index in range(20))] for number in range(4)]
    assert sorted(await both(client, engine, servers, prompts, [1600])) == [0, 1600, 1600, 1600]


async def test_clients_that_leave_at_any_token_cost_nobody_a_state(client, engine, servers):
    head = (await prompt_of(client, servers, 900, 402))[:700]
    for number in range(6):
        body = {
            "model": MODEL_NAME,
            "prompt": [*head[: 300 + 80 * number], 7, 8, 9],
            "max_tokens": 400,
            "stream": True,
            "ignore_eos": True,
            "vllm_xargs": {"seamark_boundaries": [300 + 80 * number]},
        }
        async with client.stream("POST", f"{engine.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            if number % 2:  # while tokens come, and else while the prompt is computed
                await anext(response.aiter_lines())
    prompts = [[*head[: 300 + 80 * number], *range(500, 520)] for number in range(6)]
    await both(client, engine, servers, prompts, [300 + 80 * number for number in range(6)])
    while (await samples_of(client, engine))["vllm:num_requests_running"]:
        await asyncio.sleep(0.1)
    assert (await samples_of(client, engine))["vllm:num_requests_waiting"] == 0
