"""The self-check before real engines: planted defects are found, honest answers left alone."""

from __future__ import annotations

import asyncio
import time
from math import inf

import httpx
import pytest

from proxy.bench.harness import planted
from proxy.bench.harness.client import TimedAnswer, ask, open_client
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import Server, Servers
from tests.harness.engines import SharedServers
from tests.harness.sampled_traffic import FLAGS, watch
from tests.harness.waiting import wait_for

PATIENCE = 300.0  # seconds; a quiet machine takes a tenth

CHECKS = 4  # of honest answers


def checked(gateway: Server) -> dict:
    return httpx.get(gateway.url + "/seamark/status").json()["self_check"]


@pytest.fixture
def watched(servers: SharedServers, fleet: Servers) -> Server:
    """A gateway that checks, before the engine in which defects can be planted."""
    gateway = fleet.gateway(servers.seamark, flags=FLAGS)
    gateway.wait_until_ready("/ready", seconds=30)
    return gateway


@pytest.mark.parametrize(
    "defect",
    [planted.DEFECTS[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in ("none", *planted.DEFECTS[1:]))],
)
def test_a_planted_defect_is_found_and_turns_hints_off_and_an_honest_engine_keeps_them(
    servers: SharedServers, watched: Server, defect
):
    enough = CHECKS if defect == "none" else inf
    phase = asyncio.run(watch(servers.seamark, watched, servers.planted, defect, PATIENCE, enough))
    assert phase.held, phase
    if defect == "none":
        assert phase.hints_sent and phase.reason == "hit"
        return
    log = watched.log.read_text()
    assert "from its cache, prompt" in log
    assert not any(word in log for word in ("harbour", "editor", "figures"))  # what the prompts are made of
    assert httpx.post(watched.url + "/seamark/self-check/reset").json() == {"hints_off": False}
    assert not checked(watched)["hints_off"]


def told(url: str, messages: list[dict], **fields) -> tuple[int, list[float]]:
    """Tokens that came from the cache, and the logprobs of a greedy answer."""

    async def asked() -> TimedAnswer:
        async with open_client() as client:
            return await ask(client, url, messages, 8, **fields)

    answer = asyncio.run(asked())
    return answer.cached_tokens, [step.top[step.token] for step in answer.steps]


@pytest.mark.thorough
def test_once_a_defect_is_found_clients_get_right_answers_whatever_the_engine_does(
    servers: SharedServers, watched: Server
):
    seed = time.time_ns() % 10**6
    system = {"role": "system", "content": prose(300, seed)}
    first = [system, {"role": "user", "content": prose(20, seed + 1)}]
    longer = [*first, {"role": "assistant", "content": prose(200, seed + 2)}, {"role": "user", "content": "Go on."}]
    engine = servers.seamark.url

    def anew(messages: list[dict]) -> list[float]:
        cached, logprobs = told(engine, messages, cache_salt=f"{time.time_ns()}")
        assert not cached
        return logprobs

    told(watched.url, [{"role": "user", "content": prose(40, seed + 3)}])  # whose state the defect takes
    for question in ("one", "two"):
        told(watched.url, [system, {"role": "user", "content": question}])
    with planted.planted(servers.planted, planted.OTHER_STATE):
        told(watched.url, longer)
        wait_for(lambda: checked(watched)["hints_off"], PATIENCE)

        # What it held is spoiled, and found by whoever asks past the gateway; not by those behind it.
        cached, logprobs = told(engine, longer)
        assert cached and logprobs != pytest.approx(anew(longer), abs=1e-3)
        assert told(watched.url, longer) == (0, pytest.approx(anew(longer), abs=1e-3))

        # Nor what vLLM caches by itself, once that was found to be wrong, too.
        wait_for(lambda: checked(watched)["cache_off"], PATIENCE)
        for _ in range(2):
            assert told(watched.url, longer) == (0, pytest.approx(anew(longer), abs=1e-3))
    assert httpx.post(watched.url + "/seamark/self-check/reset").json() == {"hints_off": False}
    assert not checked(watched)["cache_off"]

    # Restored, it caches anew; what was spoiled stays where it is.
    assert told(watched.url, longer)[0] == 0
    cached, logprobs = told(watched.url, longer)
    assert cached and logprobs == pytest.approx(anew(longer), abs=1e-3)
