"""Small traffic on one engine with the plugin, every answer compared with a reference engine's.

For engines in configurations of their own. All raise `AssertionError` where an answer or a hit is not the right one.
"""

from __future__ import annotations

import asyncio
import random

import httpx

from proxy.bench.harness import exact
from proxy.bench.harness.client import complete, tokens_of
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Server

PARALLEL = 8

# Flags of the engine. Steps of 320 tokens and 64 blocks: chunked prefill, fan-outs over several steps, eviction.
TIGHT = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")


async def _both(
    client: httpx.AsyncClient, engine: Server, reference: Server, prompts: list[list[int]], hint: list[int]
) -> list[int]:
    """Tokens that each prompt found in the cache; all are asked at once, and each answer is exact."""
    fields = {"vllm_xargs": {"seamark_boundaries": hint}}
    answers = await asyncio.gather(*(complete(client, engine.url, prompt, **fields) for prompt in prompts))
    right = await asyncio.gather(*(complete(client, reference.url, prompt) for prompt in prompts))
    found = [exact.compare(answer, wanted) for answer, wanted in zip(answers, right, strict=True)]
    assert not [(number, each) for number, each in enumerate(found) if not each.exact]
    return [answer.cached_tokens for answer in answers]


async def _prompt_of(client: httpx.AsyncClient, reference: Server, words: int, seed: int) -> list[int]:
    return await tokens_of(client, reference.url, [{"role": "user", "content": prose(words, seed)}])


async def shared_beginnings(client: httpx.AsyncClient, engine: Server, reference: Server) -> None:
    """Random prompts hit where they share a beginning."""
    draw = random.Random(11)
    heads = [await _prompt_of(client, reference, words, 300 + words) for words in (80, 200, 500)]
    prompts, shared = [], 0
    for _ in range(40):
        head = draw.choice(heads)
        cut = draw.choice((50, 96, 160, len(head) - 9))
        prompts.append(
            [*head[: min(cut, len(head))], *(draw.randrange(100, 4000) for _ in range(draw.randint(3, 200)))]
        )
    for begin in range(0, len(prompts), PARALLEL):
        shared += sum(await _both(client, engine, reference, prompts[begin : begin + PARALLEL], [50, 96, 160]))
    assert shared > 0.2 * sum(map(len, prompts))
    assert (await samples_of(client, engine))["seamark_checkpoint_hits_total"] > len(prompts) // 4


async def cold_fan_out(client: httpx.AsyncClient, engine: Server, reference: Server) -> None:
    """Four prompts on a prefix of several steps share one prefill."""
    head = (await _prompt_of(client, reference, 2000, 401))[:1600]
    prompts = [[*head, *(1000 + number * 50 + index for index in range(20))] for number in range(4)]
    assert sorted(await _both(client, engine, reference, prompts, [1600])) == [0, 1600, 1600, 1600]


async def clients_that_leave(client: httpx.AsyncClient, engine: Server, reference: Server) -> None:
    """Clients that leave at any token cost nobody a state."""
    head = (await _prompt_of(client, reference, 900, 402))[:700]
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
    await _both(client, engine, reference, prompts, [300 + 80 * number for number in range(6)])
    while (await samples_of(client, engine))["vllm:num_requests_running"]:
        await asyncio.sleep(0.1)
    assert (await samples_of(client, engine))["vllm:num_requests_waiting"] == 0
