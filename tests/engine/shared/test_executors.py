"""Engines in configurations of their own, every answer compared with a reference engine's.

Workers in processes of their own, each with half of the heads or with some of the layers; and several API servers with
asynchronous scheduling, which plans the next step before the last one's tokens are known. That is the default wherever
there is a GPU; vLLM's CPU platform switches it off, and a plugin of the tests back on.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from proxy.bench.harness import exact
from proxy.bench.harness.client import CHAT, COMPLETION, complete, judgeable, open_client, prose, tokens_of
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import MODEL_NAME, QWEN3_NEXT, Server, Servers
from tests.harness.bench_clients import Leave, send_and_leave
from tests.harness.counters import samples_of
from tests.harness.engine_plugins import PLANS_AHEAD
from tests.harness.engines import EAGER_STAGES, SharedServers
from tests.harness.gateways import start_gateway
from tests.harness.waiting import until

# With two stages, the first one computes the next step while the second computes the last one.
WAYS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "half of the heads": ("--tensor-parallel-size", {}),
    "some of the layers": ("--pipeline-parallel-size", EAGER_STAGES),
    "two API servers": ("--api-server-count", {"seamark_async": "tests.harness.engine_plugins:async_scheduling"}),
}

# Steps of 320 tokens and 64 blocks: chunked prefill, fan-outs over several steps, eviction.
TIGHT = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")

PARALLEL = 8

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module", params=WAYS)
def engine(
    request: pytest.FixtureRequest, model: Path, family: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flag, plugins = WAYS[request.param]
    if plugins is EAGER_STAGES and family == QWEN3_NEXT:
        pytest.skip("the generated model has experts in one layer, and vLLM wants some in each stage")
    folder = tmp_path_factory.mktemp("engine")
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    environment |= plugin_environment(folder / "plugins", plugins)
    ahead = ("--async-scheduling",) if request.param == "two API servers" else ()
    with Servers(folder) as fleet:
        started = fleet.engine("engine", model, "1", (flag, "2", *ahead, *TIGHT), environment)
        started.wait_until_ready()
        yield started
        assert not ahead or PLANS_AHEAD in started.log.read_text(errors="replace")


async def found_by(engine: Server, reference: Server, prompts: list[list[int]], hint: list[int]) -> list[int]:
    """Tokens that each prompt found in the cache; all are asked at once, and each answer is exact."""
    fields = {"vllm_xargs": {"seamark_boundaries": hint}}
    async with open_client() as client:
        answers = await asyncio.gather(*(complete(client, engine.url, prompt, **fields) for prompt in prompts))
        right = await asyncio.gather(*(complete(client, reference.url, prompt) for prompt in prompts))
    found = [exact.compare(answer, wanted) for answer, wanted in zip(answers, right, strict=True)]
    assert not [(number, each) for number, each in enumerate(found) if not each.exact]
    return [answer.cached_tokens or 0 for answer in answers]


async def head_of(reference: Server, words: int, seed: int) -> list[int]:
    async with open_client() as client:
        return await tokens_of(client, reference.url, [{"role": "user", "content": prose(words, seed)}])


async def test_random_prompts_hit_where_they_share_a_beginning(engine: Server, servers: SharedServers):
    draw = random.Random(11)
    heads = [await head_of(servers.reference, words, 300 + words) for words in (80, 200, 500)]
    prompts, shared = [], 0
    for _ in range(40):
        head = draw.choice(heads)
        own = [draw.randrange(100, 4000) for _ in range(draw.randint(3, 200))]
        prompts.append([*head[: draw.choice((50, 96, 160, len(head) - 9))], *own])
    for begin in range(0, len(prompts), PARALLEL):
        shared += sum(await found_by(engine, servers.reference, prompts[begin : begin + PARALLEL], [50, 96, 160]))
    assert shared > 0.2 * sum(map(len, prompts))
    async with open_client() as client:
        assert (await samples_of(client, engine))["seamark_checkpoint_hits_total"] > len(prompts) // 4


async def test_a_cold_fan_out_over_several_steps_shares_one_prefill(engine: Server, servers: SharedServers):
    found: list[int] = []
    for seed in (401, 403, 404):  # on a busy machine an engine may think once that waiting does not pay
        head = (await head_of(servers.reference, 2000, seed))[:1600]
        prompts = [[*head, *(1000 + number * 50 + index for index in range(20))] for number in range(4)]
        if (found := sorted(await found_by(engine, servers.reference, prompts, [1600]))) == [0, 1600, 1600, 1600]:
            return
    raise AssertionError(found)


async def test_clients_that_leave_at_any_token_cost_nobody_a_state(engine: Server, servers: SharedServers):
    head = (await head_of(servers.reference, 900, 402))[:700]
    ends = [300 + 80 * number for number in range(6)]
    async with open_client() as client:
        for number, end in enumerate(ends):
            hint = {"seamark_boundaries": [end]}
            body = judgeable([*head[:end], 7, 8, 9], max_tokens=400, stream=True, vllm_xargs=hint)
            # While tokens come, and else while the prompt is computed.
            leave = Leave(events=1) if number % 2 else Leave(seconds=0.05)
            await send_and_leave(client, engine.url, COMPLETION, body, leave)
        await found_by(engine, servers.reference, [[*head[:end], *range(500, 520)] for end in ends], ends)

        async def is_idle() -> bool:
            samples = await samples_of(client, engine)
            return not samples["vllm:num_requests_running"] and not samples["vllm:num_requests_waiting"]

        await until(is_idle)


@pytest.mark.parametrize("engine", ["two API servers"], indirect=True)
def test_whichever_server_is_asked_there_is_one_feed_with_every_outcome_and_every_state(engine, fleet):
    def fresh(path: str) -> httpx.Response:
        """On a connection of its own, so that any of the API servers may answer."""
        return httpx.get(engine.url + path, headers={"connection": "close"}, timeout=60)

    gateway, names = start_gateway(fleet, engine), [f"of-any-{number}" for number in range(10)]
    for number, name in enumerate(names):
        head = {"role": "system", "content": prose(200, 7400 + number)}
        body = {"model": MODEL_NAME, "messages": [head, {"role": "user", "content": "?"}], "max_tokens": 1}
        httpx.post(gateway.url + CHAT, json=body, headers={"x-request-id": name}, timeout=120).raise_for_status()
    feeds = [fresh("/seamark/outcomes").json() for _ in range(12)]
    assert len({feed["boot"] for feed in feeds}) == 1
    for feed in feeds:
        assert set(names) <= {event[1] for event in feed["events"] if event[0] == "admitted"}
        came = {event[1]: event[3] for event in feed["events"] if event[0] == "came"}
        assert all(states and all(name for _, name in states) for states in map(came.get, names))
    metrics = [fresh(path).text for path in ("/seamark/metrics", "/metrics") for _ in range(6)]
    counted = {re.search(r'seamark_engine_requests_total\{reason="cold"\} (\S+)', text)[1] for text in metrics}
    assert len(counted) == 1 and float(counted.pop()) >= len(names)
    assert all(re.search(r"^vllm:num_requests_running\{.*\} 0.0$", text, re.M) for text in metrics)
    # A busy machine may lose a report, which is said, and is no harm: its reader forgets what it cannot be sure of.
    warned = [line for line in gateway.log.read_text().splitlines() if "WARNING" in line and "were lost" not in line]
    assert not warned
