"""A cold fan-out on a busy engine whose steps are shorter than what its prompts share."""

from __future__ import annotations

import asyncio

import httpx

from proxy.bench.harness import exact
from proxy.bench.harness.client import COMPLETION, PassCounter, complete, judgeable, open_client
from proxy.bench.harness.servers import Server
from tests.harness.bench_clients import Leave, Left, fresh_tokens, send_and_leave
from tests.harness.counters import samples_of
from tests.harness.engines import SharedServers
from tests.harness.gateways import metric
from tests.harness.waiting import until

GROUPS, SIZE = 2, 4

SHARED, OWN = 2000, 30  # tokens of a prompt, of which a whole match unit is found

IDEAL = GROUPS * (SHARED + SIZE * OWN)  # prompt tokens that have to be computed

MOST = 1.05  # of that: a request that generates meanwhile is counted, too

HINT = {"seamark_boundaries": [SHARED]}


def prompts(seed: str) -> list[list[int]]:
    """A request of each group in turn."""
    heads = [fresh_tokens(SHARED, seed, group) for group in range(GROUPS)]
    return [
        [*head, *fresh_tokens(OWN, seed, group, member)] for member in range(SIZE) for group, head in enumerate(heads)
    ]


async def run_wave(client: httpx.AsyncClient, engine: Server, seed: str, leave: Leave | None = None):
    """Results of a wave nobody has seen, and the prompt tokens computed; `leave`: of the first of each group."""
    busy = asyncio.create_task(complete(client, engine.url, fresh_tokens(100, seed, "busy"), max_tokens=2000))
    await until(lambda: metric(engine, "vllm:num_requests_running") == 1)
    passes = PassCounter(engine.log)
    results = await asyncio.gather(
        *(
            send_and_leave(client, engine.url, COMPLETION, judgeable(prompt, vllm_xargs=HINT, stream=True), leaves)
            for prompt, leaves in zip(prompts(seed), [leave] * GROUPS + [None] * (SIZE - 1) * GROUPS, strict=True)
        )
    )
    busy.cancel()
    await until(lambda: not metric(engine, "vllm:num_requests_running"))
    return results, passes.so_far().prompt_tokens


async def fates(client: httpx.AsyncClient, engine: Server) -> tuple[int, int]:
    samples = await samples_of(client, engine)
    held, alone = (samples.get(f'seamark_followers_total{{fate="{fate}"}}', 0) for fate in ("held", "not_worth_it"))
    return int(held), int(alone)


async def test_a_cold_wave_computes_each_prefix_once_and_goes_on_when_its_leaders_leave(servers: SharedServers):
    engine = servers.tight
    async with open_client(300) as client:
        held, alone = await fates(client, engine)
        cold, computed = await run_wave(client, engine, "cold")
        held_cold, alone_cold = (
            now - before for now, before in zip(await fates(client, engine), (held, alone), strict=True)
        )
        # In the midst of its prefix, or, where that comes first on a busy machine, at the first token.
        leave = Leave(seconds=min(answer.ttft for answer in cold) / 2, events=1)
        left, computed_left = await run_wave(client, engine, "left", leave)
        alone_left = (await fates(client, engine))[1] - alone - alone_cold
        for seed, results in (("cold", cold), ("left", left)):
            for prompt, result in zip(prompts(seed), results, strict=True):
                if not isinstance(result, Left):
                    right = await complete(client, servers.reference.url, prompt, vllm_xargs=HINT, stream=True)
                    assert exact.compare(result, right).exact and len(result.steps) == len(right.steps)
    # Requests reach the engine one by one, and the first of those that follow is not held where steps are so fast that
    # it alone saves too little. It then computes the prefix itself, and is counted.
    assert computed <= MOST * IDEAL + alone_cold * SHARED
    assert GROUPS <= sum(not answer.cached_tokens for answer in cold) <= GROUPS + alone_cold
    assert [isinstance(result, Left) for result in left] == [True] * GROUPS + [False] * (SIZE - 1) * GROUPS
    assert computed_left <= MOST * IDEAL + (GROUPS + alone_left) * SHARED  # what the leaders had computed is lost
    assert held_cold + alone_cold >= GROUPS and held_cold
