"""Pinned prompts on a real engine whose cache is too small for its traffic: found in full, whatever else comes."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from proxy.bench.harness.client import prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT, metric, start_gateway
from tests.harness.waiting import wait_for

PREFIXES = "/seamark/prefixes"

PINNED = 4

BLOCKS = 64  # of the cache


def opening_of(number: int) -> dict[str, Any]:
    """How a chat begins: a document, to which any question may come."""
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": f"{number} {prose(120, number)}"}]}


def body_of(number: int, question: str, **fields: Any) -> dict[str, Any]:
    opening = opening_of(number)
    # From its first word on an answer is its question's: other questions leave nothing deeper behind to be evicted.
    more = [{"role": "assistant", "content": f"{question} Let me see."}, {"role": "user", "content": question}]
    return {**opening, "messages": opening["messages"] + more, "max_tokens": 8, "temperature": 0, **fields}


def post(gateway: Server, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    return httpx.post(gateway.url + path, json=body, timeout=300)


def evict(gateway: Server, first: int) -> None:
    """Other prompts take the whole rest of the cache; every one of them is answered."""

    async def send_all() -> None:
        async with httpx.AsyncClient(timeout=600) as client:
            bodies = [body_of(number, "Which?") for number in range(first, first + BLOCKS)]
            answers = await asyncio.gather(*(client.post(gateway.url + CHAT, json=body) for body in bodies))
        assert {answer.status_code for answer in answers} == {200}

    asyncio.run(send_all())


def assert_found_in_full(gateway: Server, question: str) -> None:
    """A request with each pinned prompt hits up to its last shared boundary, and is answered as without a cache."""
    for number in range(PINNED):
        answer = post(gateway, body_of(number, f"{number} {question}"))
        cached, predicted = (int(answer.headers[f"x-seamark-{name}"]) for name in ("cached", "predicted"))
        assert answer.headers["x-seamark-reason"] == "hit" and cached == predicted // 16 * 16 > 100, number
        alone = post(gateway, body_of(number, f"{number} {question}", cache_salt=f"{question} {number}"))
        assert int(alone.headers["x-seamark-cached"]) == 0
        assert alone.json()["choices"][0]["message"] == answer.json()["choices"][0]["message"], number


def test_pinned_prompts_are_found_in_full_under_traffic_and_after_a_reset_and_no_more_than_their_share_is_held(
    servers: SharedServers, fleet: Servers
):
    engine = servers.tight
    gateway = start_gateway(fleet, engine, flags=("--health-interval", "0.5"))

    def pin(number: int) -> httpx.Response:
        return post(gateway, {"name": f"prompt {number}", "body": opening_of(number)}, PREFIXES)

    def all_are_pinned() -> bool:
        listed = httpx.get(gateway.url + PREFIXES, timeout=60).json()["prefixes"]
        return {state for prompt in listed for state in prompt["workers"].values()} == {"pinned"}

    assert [pin(number).status_code for number in range(PINNED)] == [200] * PINNED
    held = metric(engine, "seamark_pinned_blocks")
    control = body_of(500, "Where to?")
    assert held > 0 and int(post(gateway, control).headers["x-seamark-cached"]) == 0
    evict(gateway, 1000)
    assert_found_in_full(gateway, "Is it true?")
    assert int(post(gateway, control).headers["x-seamark-cached"]) == 0  # what is not pinned has gone
    assert metric(engine, "seamark_pinned_blocks") == held

    httpx.post(engine.url + "/reset_prefix_cache", timeout=60).raise_for_status()
    post(gateway, body_of(700, "Anybody?"))  # an engine that has nothing to do reports nothing
    wait_for(lambda: metric(engine, "seamark_pinned_blocks") == held and all_are_pinned(), seconds=300)
    evict(gateway, 2000)
    assert_found_in_full(gateway, "After the storm?")

    pinned = PINNED
    while (answer := pin(pinned)).status_code == 200:
        pinned += 1
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "no_room"
    assert metric(engine, "seamark_pinned_blocks") <= BLOCKS / 2
    for number in range(pinned):
        assert httpx.delete(f"{gateway.url}{PREFIXES}/prompt {number}", timeout=60).status_code == 200
    assert metric(engine, "seamark_pinned_blocks") == 0
