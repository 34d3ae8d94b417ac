"""Pinned prompts on a real engine whose cache is too small for its traffic: found in full, after a restart, too.

The engine's model has its recurrent layers in one cache group, so that a pinned prompt takes two blocks: one of its
state, one of the attention rows before it. With one group more, 20 of them would leave a cache of 64 no room.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from transformers import NemotronHConfig

from engine_patches.commands.model import FAMILIES, nemotron_h_config, write_model
from proxy.bench.harness.servers import MODEL_NAME, NEMOTRON_H, Server, Servers
from proxy.commands.render_server import free_port
from tests.harness.waiting import wait_for

PINNED, BLOCKS, SHARE = 20, 64, 0.65

LONGEST = 1024  # tokens

FLAGS = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-batched-tokens", "320", "--max-model-len", str(LONGEST))

ENVIRONMENT = {"SEAMARK_PIN_SHARE": str(SHARE), "VLLM_SERVER_DEV_MODE": "1"}  # the latter for /reset_prefix_cache

CHAT = "/v1/chat/completions"

WORDS = ("tide", "berth", "pilot", "anchor", "harbour", "lantern", "signal", "ledger", "captain", "cargo", "quay")


class Harbour(NamedTuple):
    """An engine, and the gateway before it; nobody else uses them."""

    servers: Servers
    model: Path
    port: int
    engines: list[Server]  # the last one runs
    gateway: Server

    def restart(self) -> None:
        """The engine, at its address."""
        self.engines[-1].stop()
        self.engines.append(start(self.servers, self.model, self.port))


def start(servers: Servers, model: Path, port: int) -> Server:
    return servers.engine("pinned", model, flags=FLAGS, environment=ENVIRONMENT, port=port)


def config_with_one_recurrent_layer() -> Any:
    config = nemotron_h_config().to_dict()
    return NemotronHConfig(**config | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]})


@pytest.fixture(scope="module")
def harbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    folder = tmp_path_factory.mktemp("pinned")
    with pytest.MonkeyPatch.context() as patch:
        recipe = FAMILIES[NEMOTRON_H]._replace(config=config_with_one_recurrent_layer)
        patch.setitem(FAMILIES, NEMOTRON_H, recipe)
        model = write_model(folder / "model", NEMOTRON_H)
    path = folder / "prefixes.json"
    path.write_text(json.dumps([{"name": f"prompt {n}", "body": opening_of(n)} for n in range(PINNED)]))
    with Servers(folder) as servers:
        port = free_port()
        engine = start(servers, model, port)
        engine.wait_until_ready()
        gateway = servers.gateway(engine, flags=("--prefixes-file", str(path), "--health-interval", "0.5"))
        gateway.wait_until_ready("/ready", seconds=60)
        yield Harbour(servers, model, port, [engine], gateway)


def opening_of(number: int) -> dict[str, Any]:
    """How a chat begins: a document, to which any question may come."""
    draw = random.Random(number)
    document = f"{number} " + " ".join(draw.choice(WORDS) for _ in range(120))
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": document}]}


def body_of(number: int, question: str, **fields: Any) -> dict[str, Any]:
    opening = opening_of(number)
    # From its first word on an answer is its question's: other questions leave nothing deeper behind to be evicted.
    more = [{"role": "assistant", "content": f"{question} Let me see."}, {"role": "user", "content": question}]
    return {**opening, "messages": opening["messages"] + more, "max_tokens": 8, "temperature": 0, **fields}


def post(harbour: Harbour, body: dict[str, Any], path: str = CHAT) -> httpx.Response:
    return httpx.post(harbour.gateway.url + path, json=body, timeout=300)


def states(harbour: Harbour) -> list[str]:
    """What became of each pinned prompt."""
    listed = httpx.get(harbour.gateway.url + "/seamark/prefixes").json()["prefixes"]
    return [state for prompt in listed for state in prompt["workers"].values()]


def metric(harbour: Harbour, name: str) -> float:
    lines = httpx.get(harbour.engines[-1].url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and not line.startswith("#"))


def evict(harbour: Harbour) -> None:
    """Other prompts take the whole rest of the cache, several times over; every one of them is answered."""

    async def send_all() -> None:
        turns = asyncio.Semaphore(4)
        async with httpx.AsyncClient(timeout=600) as client:

            async def send(number: int) -> None:
                async with turns:
                    answer = await client.post(harbour.gateway.url + CHAT, json=body_of(1000 + number, "Which?"))
                    assert answer.status_code == 200, answer.text

            await asyncio.gather(*(send(number) for number in range(2 * BLOCKS)))

    asyncio.run(send_all())


def assert_found_in_full(harbour: Harbour, question: str) -> None:
    """A request with each pinned prompt hits up to its last shared boundary, and is answered as without a cache."""
    for number in range(PINNED):
        answer = post(harbour, body_of(number, f"{number} {question}"))
        cached, predicted = (int(answer.headers[f"x-seamark-{name}"]) for name in ("cached", "predicted"))
        assert answer.headers["x-seamark-reason"] == "hit" and cached == predicted // 16 * 16 > 100, number
        alone = post(harbour, body_of(number, f"{number} {question}", cache_salt=f"{question} {number}"))
        assert int(alone.headers["x-seamark-cached"]) == 0
        assert alone.json()["choices"][0]["message"] == answer.json()["choices"][0]["message"], number


def test_pinned_prompts_are_found_in_full_whatever_else_comes(harbour):
    wait_for(lambda: states(harbour) == ["pinned"] * PINNED, seconds=300)
    held = metric(harbour, "seamark_pinned_blocks")
    print(f"{PINNED} pinned prompts hold {held:.0f} of {BLOCKS} blocks")
    assert 0 < held <= SHARE * BLOCKS and metric(harbour, "seamark_pins_total") == PINNED
    control = body_of(500, "Where to?")
    assert int(post(harbour, control).headers["x-seamark-cached"]) == 0
    evict(harbour)
    assert_found_in_full(harbour, "Is it true?")
    assert int(post(harbour, control).headers["x-seamark-cached"]) == 0  # what is not pinned has gone
    assert metric(harbour, "seamark_pinned_blocks") == held


def test_more_than_the_share_is_refused_and_nobody_is_the_worse_for_it(harbour):
    added = []
    for number in range(600, 600 + BLOCKS):
        answer = post(harbour, {"name": f"more {number}", "body": opening_of(number)}, "/seamark/prefixes")
        if answer.status_code != 200:
            break
        added.append(f"more {number}")
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "no_room"
    assert metric(harbour, "seamark_pinned_blocks") <= SHARE * BLOCKS
    longest = post(harbour, {"model": MODEL_NAME, "prompt": [7] * (LONGEST - 8), "max_tokens": 8}, "/v1/completions")
    assert longest.status_code == 200, longest.text
    for name in added:
        assert httpx.delete(f"{harbour.gateway.url}/seamark/prefixes/{name}", timeout=60).status_code == 200
    assert states(harbour) == ["pinned"] * PINNED


def test_a_cache_that_was_emptied_holds_them_again(harbour):
    assert httpx.post(harbour.engines[-1].url + "/reset_prefix_cache", timeout=60).status_code == 200
    post(harbour, body_of(700, "Anybody?"))  # an engine that has nothing to do reports nothing
    wait_for(lambda: metric(harbour, "seamark_pinned_blocks") > 0 and set(states(harbour)) == {"pinned"}, seconds=300)
    evict(harbour)
    assert_found_in_full(harbour, "After the storm?")


@pytest.mark.thorough
def test_a_restarted_engine_has_them_ready(harbour):
    harbour.restart()
    harbour.engines[-1].wait_until_ready()
    wait_for(lambda: states(harbour) == ["pinned"] * PINNED, seconds=300)
    evict(harbour)
    assert_found_in_full(harbour, "Once more?")
