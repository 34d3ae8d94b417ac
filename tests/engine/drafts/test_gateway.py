"""Through the gateway, before an engine that drafts tokens: what it predicts, what comes, and why."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from proxy.bench.harness.client import open_client
from proxy.bench.harness.planted import plugin_environment
from proxy.bench.harness.servers import (
    ENGINE_ENVIRONMENT,
    ENGINE_FLAGS,
    MODEL_NAME,
    Server,
    Servers,
    generated_model,
)
from proxy.boundaries.token_ids import common_prefix
from proxy.commands.render_server import free_port
from tests.harness.cells import chat_cells, token_cells
from tests.harness.draft_engines import MTP, STARTED_ALL_THE_SAME

pytestmark = pytest.mark.thorough

CHAT = "/v1/chat/completions"

UNIT, AHEAD = 16, 16  # tokens

STAND_INS = {"seamark_draft_kernels": "tests.harness.draft_kernels:register"}


class Trio(NamedTuple):
    """An engine with drafts and the gateway before it; an engine with neither drafts nor a cache."""

    engine: Server
    gateway: Server
    reference: Server


class Answer(NamedTuple):
    """What a request got; lengths in tokens."""

    predicted: int
    cached: int
    reason: str
    text: str
    right: str
    owed: int


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    folder = tmp_path_factory.mktemp("drafts")
    model = generated_model(print, mtp=True)
    environment = {**plugin_environment(folder / "plugins", STAND_INS), "SEAMARK_DRAFTS": "1"}
    with Servers(folder) as fleet:
        port = free_port()
        command = ["-c", STARTED_ALL_THE_SAME, str(model), "--port", str(port), *ENGINE_FLAGS]
        command += ["--speculative-config", json.dumps(MTP)]
        engine = fleet.start("drafts", port, [sys.executable, *command], {**ENGINE_ENVIRONMENT, **environment})
        reference = fleet.engine("reference", model, "reference", ("--no-enable-prefix-caching",))
        for server in (engine, reference):
            server.wait_until_ready()
        gateway = fleet.gateway(engine)
        gateway.wait_until_ready("/ready", seconds=30)
        yield Trio(engine, gateway, reference)


def chats() -> Iterator[list[dict[str, str]]]:
    """Questions behind a few system prompts in turn, and a conversation."""
    draw = random.Random(3)

    def words(count: int) -> str:
        return " ".join(draw.choice(("tide", "berth", "pilot", "anchor", "harbour", "lantern")) for _ in range(count))

    heads = [f"{draw.random()} {words(count)}" for count in (60, 120, 200, 400)]
    for _ in range(3):
        for head in heads:
            yield [{"role": "system", "content": head}, {"role": "user", "content": words(12)}]
    conversation = [{"role": "system", "content": f"{draw.random()} {words(150)}"}]
    for _ in range(6):
        conversation.append({"role": "user", "content": words(40)})
        yield list(conversation)
        conversation.append({"role": "assistant", "content": words(25)})


def ids(engine: Server, body: dict[str, Any]) -> list[int]:
    answer = httpx.post(f"{engine.url}{CHAT}/render", json=body, timeout=60)
    return list(answer.json()["token_ids"])


@pytest.fixture(scope="module")
def answers(trio: Trio) -> list[Answer]:
    found: list[Answer] = []
    before: list[list[int]] = []
    with httpx.Client(timeout=300) as client:
        for messages in chats():
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            prompt = ids(trio.reference, body)
            shared = max((common_prefix(prompt, other) for other in before), default=0)
            before.append(prompt)
            told = client.post(trio.gateway.url + CHAT, json=body)
            right = client.post(trio.reference.url + CHAT, json=body)
            texts = [answer.json()["choices"][0]["message"]["content"] for answer in (told, right)]
            heads = told.headers
            owed = max(min(shared, len(prompt)) - AHEAD, 0) // UNIT * UNIT
            numbers = (int(heads[name]) for name in ("x-seamark-predicted", "x-seamark-cached"))
            found.append(Answer(*numbers, heads["x-seamark-reason"], *texts, owed))
    return found


def test_answers_are_those_of_an_engine_without_drafts_and_cache(answers):
    assert [answer.text for answer in answers] == [answer.right for answer in answers]


def test_all_that_an_engine_owes_is_delivered_and_says_hit(answers):
    delivered, owed = sum(answer.cached for answer in answers), sum(answer.owed for answer in answers)
    # Random answers of the model are no part of the next turn's prompt, so nothing is lost between turns.
    assert owed > 3000 and delivered >= 0.99 * owed
    full = [answer for answer in answers if answer.owed and answer.cached >= answer.owed]
    assert len(full) >= 13 and {answer.reason for answer in full} == {"hit"}


def test_what_is_predicted_is_what_comes(answers):
    predicted = [answer for answer in answers if answer.predicted]
    equal = sum(answer.predicted == answer.cached for answer in predicted)
    assert len(predicted) >= 13 and equal >= 0.97 * len(predicted)


def test_the_engine_says_how_far_past_a_state_a_prefix_has_to_be_shared(trio, answers):
    metrics = httpx.get(trio.engine.url + "/metrics").text
    (line,) = (line for line in metrics.split("\n") if line.startswith("seamark_engine_info{"))
    assert 'ahead="16"' in line and 'match_unit="16"' in line
    assert 'seamark_hints_ignored_total{reason="speculative"}' not in metrics
    assert Path(trio.engine.log).read_text(errors="replace").count("hints are refused") == 0


async def test_the_grid_with_drafts_delivers_what_they_leave(trio):
    async with open_client(300) as client:
        chats = await chat_cells(client, trio.gateway.url, trio.engine.url)
        hinted = await token_cells(client, trio.engine.url, hinted=True)
    for cells in (chats, hinted):
        assert [cell.delivered for cell in cells] == [(cell.shared - AHEAD) // UNIT * UNIT for cell in cells]
