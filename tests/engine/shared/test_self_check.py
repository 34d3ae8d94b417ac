"""The self-check before real engines: planted defects are found, honest answers left alone."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext, suppress
from typing import Any

import httpx
import pytest

from proxy.bench.harness import planted
from proxy.bench.harness.client import CHAT, QUESTIONS, TimedAnswer, ask, complete, open_client, prose, tokens_of
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from proxy.bench.stories import UNIT, floored
from proxy.boundaries.divergence import common_prefix
from tests.harness.engines import SharedServers
from tests.harness.waiting import until, wait_for

PATIENCE = 300.0  # seconds; a quiet machine takes a tenth

CHECKS = 4  # of honest answers

SYSTEM_WORDS = (60, 150, 400, 700)


def checked(gateway: Server) -> dict[str, Any]:
    return httpx.get(gateway.url + "/seamark/status").json()["self_check"]


@pytest.fixture
def watched(servers: SharedServers, fleet: Servers) -> Server:
    """A gateway that checks, before the engine in which defects can be planted."""
    gateway = fleet.gateway(servers.seamark, flags=("--self-check-interval", "1"))
    gateway.wait_until_ready("/ready", seconds=30)
    return gateway


def sampled(seed: int, system: int, number: int) -> dict[str, Any]:
    """A request on one of a few system prompts, which nobody else sends."""
    question = f"{QUESTIONS[number % len(QUESTIONS)]} {prose(5 + number % 40, number)}"
    text = prose(SYSTEM_WORDS[system], 1000 * seed + system)
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    return {"model": MODEL_NAME, "messages": messages, "max_tokens": 8, "temperature": 1.0}


@pytest.mark.parametrize(
    "defect",
    [planted.DEFECTS[0], *(pytest.param(each, marks=pytest.mark.thorough) for each in ("none", *planted.DEFECTS[1:]))],
)
async def test_a_planted_defect_is_found_and_turns_hints_off_and_an_honest_engine_keeps_them(
    servers: SharedServers, watched: Server, defect
):
    seed, systems = time.time_ns() % 10**6, range(len(SYSTEM_WORDS))
    async with open_client() as client:

        async def burst(number: int) -> None:
            bodies = [sampled(seed, which % 4, 100 * number + which) for which in range(8)]
            answers = await asyncio.gather(*(client.post(watched.url + CHAT, json=body) for body in bodies))
            assert {answer.status_code for answer in answers} == {200}

        # A defect takes states one unit before the one where each system prompt ends.
        for system in systems:
            chats = [sampled(seed, system, number)["messages"] for number in (0, 1)]
            one, other = [await tokens_of(client, servers.seamark.url, chat) for chat in chats]
            early = floored(common_prefix(one, other)) - UNIT
            hint = {"seamark_boundaries": [early]}
            await complete(client, servers.seamark.url, one[: early + 1], vllm_xargs=hint)
        await burst(0)
        with planted.planted(servers.planted, defect) if defect != "none" else nullcontext():
            deadline, number = time.monotonic() + PATIENCE, 1
            while not (now := checked(watched))["hints_off"] and (defect != "none" or now["checked"] < CHECKS):
                assert time.monotonic() < deadline, now
                await burst(number)
                number += 1
                with suppress(TimeoutError):  # then more traffic is wanted
                    await until(lambda seen=now["checked"]: checked(watched)["checked"] != seen, 40.0, pause=0.1)
        after = await client.post(watched.url + CHAT, json=sampled(seed, 0, 10**6))
        now = checked(watched)
        reset = await client.post(watched.url + "/seamark/self-check/reset")
    if defect == "none":
        assert now["checked"] >= CHECKS and not now["differs"] and "x-seamark-boundary" in after.headers
        assert after.headers["x-seamark-reason"] == "hit"
        return
    assert now["differs"] == 1 and "x-seamark-boundary" not in after.headers
    assert after.headers["x-seamark-reason"] == "hint_ignored"
    log = watched.log.read_text()
    assert "from its cache, prompt" in log
    assert not any(word in log for word in ("harbour", "editor", "figures"))  # what the prompts are made of
    assert reset.json() == {"hints_off": False} and not checked(watched)["hints_off"]


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
