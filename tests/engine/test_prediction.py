"""What the gateway predicts is what the engine delivers, while a cache too small for its traffic evicts all along."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from proxy.bench.harness.client import open_client
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers

REQUESTS = 500

PROMPTS = 16  # system prompts, drawn like words: the second half as often as the first, and so on

TIGHT = ("--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "320")

WORDS = (
    "tide",
    "berth",
    "pilot",
    "anchor",
    "harbour",
    "lantern",
    "signal",
    "ledger",
    "captain",
    "cargo",
    "rope",
    "quay",
)


class Pair(NamedTuple):
    """An engine with a small cache, and the gateway before it; nobody else uses them."""

    engine: Server
    gateway: Server


class Answer(NamedTuple):
    """What a request got. Tokens; times in seconds."""

    ids: list[int]  # of its prompt
    sent: float
    answered: float
    predicted: int
    cached: int
    reason: str


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Servers(tmp_path_factory.mktemp("prediction")) as fleet:
        engine = fleet.engine("tight", model, flags=TIGHT)
        engine.wait_until_ready()
        gateway = fleet.gateway(engine)
        gateway.wait_until_ready("/ready", seconds=30)
        yield Pair(engine, gateway)


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(words))


def evictions(engine: Server) -> int:
    """Requests of which the engine says that their prefix was there once."""
    told = httpx.get(engine.url + "/metrics").text
    found = re.search(r'^seamark_engine_requests_total\{reason="evicted"\} (\S+)', told, re.M)
    return int(float(found[1])) if found else 0


async def send_all(pair: Pair, tokenizer) -> list[Answer]:
    draw = random.Random(11)
    systems = [f"{number} {text(draw, draw.randrange(20, 160))}" for number in range(PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(PROMPTS)]
    answers: list[Answer] = []
    async with open_client(120) as client:

        async def send(number: int) -> None:
            (system,) = draw.choices(systems, weights)
            # Its first word is its own, so that no two share more than what the gateway knows of.
            user = f"{draw.randrange(10**6)} {text(draw, draw.randrange(5, 30))}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}
            sent = time.monotonic()
            answer = await client.post(pair.gateway.url + "/v1/chat/completions", json=body)
            answer.raise_for_status()
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            predicted, cached, reason = (
                answer.headers[f"x-seamark-{name}"] for name in ("predicted", "cached", "reason")
            )
            answers.append(Answer(ids, sent, time.monotonic(), int(predicted), int(cached), reason))

        number = 0
        while number < REQUESTS:
            together = min(draw.choice((1, 1, 2, 3)), REQUESTS - number)
            await asyncio.gather(*(send(number + index) for index in range(together)))
            number += together
    return answers


@pytest.fixture(scope="module")
def answers(pair: Pair, tokenizer) -> list[Answer]:
    return asyncio.run(send_all(pair, tokenizer))


@pytest.mark.thorough
def test_what_is_predicted_is_delivered(pair: Pair, answers, capsys):
    wrong = [answer for answer in answers if answer.predicted != answer.cached]
    share = 1 - len(wrong) / len(answers)
    reasons = Counter(answer.reason for answer in answers)
    with capsys.disabled():
        hits = sum(answer.cached > 0 for answer in answers)
        print(f"\npredicted is delivered: {share:.1%} of {len(answers)} requests, {hits} hits; {dict(reasons)}")
        print(f"wrong (predicted, delivered, reason): {Counter((a.predicted, a.cached, a.reason) for a in wrong)}")
    assert evictions(pair.engine) >= REQUESTS // 50
    assert sum(answer.cached > 0 for answer in answers) >= REQUESTS // 4
    assert share >= 0.95


@pytest.mark.thorough
def test_no_hit_is_longer_than_what_is_shared(answers):
    for answer in answers:
        prefix = answer.ids[: answer.cached]
        others = (other.ids for other in answers if other is not answer and other.sent < answer.answered)
        assert not prefix or any(ids[: answer.cached] == prefix for ids in others)
