"""`seamark worker --checkpoint-dir`: a killed engine goes on from what it stored.

Damaged files, full and slow disks, two workers on one directory: the audits on vLLM's scheduler.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from proxy.bench.harness.client import TimedAnswer, complete, open_client
from proxy.bench.harness.exact import compare
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import Server, Servers
from tests.harness.counters import samples_of
from tests.harness.engines import SharedServers
from tests.harness.two_round_chats import prompts_of, two_round_chats

# However slow this machine's disk is.
LOADS_PAY = {"seamark_disk": "tests.harness.engine_plugins:loads_always_pay"}

HITS = 13_456  # tokens of the second turns that their first ones have left


@pytest.mark.thorough
async def test_a_killed_engine_goes_on_from_what_it_stored_as_if_it_had_not_been(
    servers: SharedServers, fleet: Servers, model: Path, tokenizer, tmp_path: Path
):
    states, loads = tmp_path / "states", plugin_environment(tmp_path / "plugins", LOADS_PAY)
    rounds = [prompts_of(tokenizer, chats) for chats in two_round_chats()]

    async def asked(server: Server, prompts: list[tuple[list[int], list[int]]]) -> list[TimedAnswer]:
        answers = [
            await complete(client, server.url, ids, vllm_xargs={"seamark_boundaries": hint}) for ids, hint in prompts
        ]
        right = [await complete(client, servers.reference.url, ids) for ids, _ in prompts]
        assert all(compare(mine, theirs).exact for mine, theirs in zip(answers, right, strict=True))
        return answers

    def started(name: str) -> Server:
        flags = ("--checkpoint-dir", str(states), "--checkpoint-keep", "all")
        server = fleet.engine(name, model, flags=flags, environment=loads)
        server.wait_until_ready()
        return server

    async with open_client(240) as client:
        first = started("first")
        await asked(first, rounds[0])
        wait_until_written(states)
        os.killpg(first.process.pid, signal.SIGKILL)
        first.process.wait()
        second = started("second")
        hits = [answer.cached_tokens or 0 for answer in await asked(second, rounds[1])]
        told = await samples_of(client, second)
    assert sum(hits) >= 0.99 * HITS
    assert told["seamark_checkpoint_hits_total"] == len(hits)
    assert told["seamark_checkpoint_hit_tokens_total"] == sum(hits)


def wait_until_written(folder: Path) -> None:
    """Until there are files, and no further one comes for five seconds: nobody tells of the last one."""
    known = -1
    while known <= 0 or len(list(folder.rglob("*.state"))) != known:
        known = len(list(folder.rglob("*.state")))
        time.sleep(5)
