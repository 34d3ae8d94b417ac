"""`seamark bench fan-out` with a shorter shared part, on one engine of its own: the others run a prompt in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.bench.fan_out import (
    SHORT_TOKENS,
    WARM_UP,
    WavePlan,
    judged,
    leaving_time,
    right_answers,
    run_wave,
)
from proxy.bench.harness.client import Leave, Left, open_client
from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.servers import Server, Servers
from tests.harness.engines import SharedServers

MOST = 1.05  # of what has to be computed: a short request that has not answered yet is not counted

PLAN = WavePlan(shared=2000, own=30, size=4, decoders=2, decoded=6000)

FLAGS = ("--max-num-seqs", "16", "--max-num-batched-tokens", "512", "--long-prefill-token-threshold", "128")


@pytest.fixture(scope="module")
def engine(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Servers(tmp_path_factory.mktemp("fan-out")) as fleet:
        started = fleet.engine("fan-out", model, flags=FLAGS)
        started.wait_until_ready()
        yield started


@pytest.fixture
async def client():
    async with open_client(300) as opened:
        yield opened


async def not_held(client, engine: Server) -> float:
    return (await samples_of(client, engine)).get('seamark_followers_total{fate="not_worth_it"}', 0)


async def test_a_cold_wave_computes_each_prefix_once_and_goes_on_when_its_leaders_leave(
    client, engine: Server, servers: SharedServers
):
    await run_wave(client, engine, replace(WARM_UP, decoded=PLAN.decoded), "warm up")
    before = await not_held(client, engine)
    cold = await run_wave(client, engine, PLAN, "cold", short=True)
    alone = await not_held(client, engine) - before
    leave = Leave(seconds=leaving_time(cold))
    left = await run_wave(client, engine, PLAN, "left", leave=leave)
    left_alone = await not_held(client, engine) - before - alone
    held = (await samples_of(client, engine))['seamark_followers_total{fate="held"}']
    right = await right_answers(client, servers.reference, PLAN, [cold, left])
    cold_line, left_line = (judged("", PLAN, wave, right) for wave in (cold, left))
    print(cold_line, left_line, leave, f"{held:.0f} held, {alone:.0f} and {left_alone:.0f} not", sep="\n")
    shorts = SHORT_TOKENS * len(cold.short_ttfts)
    # Requests reach the engine one by one, and the first of those that follow is not held where steps are so fast that
    # it alone saves too little. It then computes the prefix itself, and is counted.
    assert cold_line.computed - shorts <= MOST * PLAN.ideal + alone * PLAN.shared
    assert len(cold.answers) == 8
    assert 2 <= sum(not answer.cached_tokens for answer in cold.answers) <= 2 + alone
    assert [result for result in left.results[:2] if result != Left(0)] == []
    assert (left_line.left_early, left_line.answered) == (2, 6)
    assert left_line.computed <= MOST * PLAN.ideal + (PLAN.groups + left_alone) * PLAN.shared
    assert cold_line.differing == left_line.differing == 0
    assert held >= 6
