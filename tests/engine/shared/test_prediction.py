"""What the gateway predicts is what the engine delivers, while a cache too small for its traffic evicts all along."""

from __future__ import annotations

import asyncio
import random
import time
from typing import NamedTuple

import pytest

from proxy.bench.harness.client import open_client, prose
from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.engines import SharedServers
from tests.harness.gateways import CHAT, metric

REQUESTS = 500

PROMPTS = 16  # system prompts, drawn like words: the second half as often as the first, and so on

EVICTED = 'seamark_engine_requests_total{reason="evicted"}'  # requests whose prefix was there once


class Answer(NamedTuple):
    """What a request got. Tokens; times in seconds."""

    ids: list[int]  # of its prompt
    sent: float
    answered: float
    predicted: int
    cached: int


async def answers_of(servers: SharedServers, tokenizer) -> list[Answer]:
    draw = random.Random(11)
    systems = [f"{number} {prose(draw.randrange(20, 160), 11_000 + number)}" for number in range(PROMPTS)]
    weights = [1 / (rank + 1) for rank in range(PROMPTS)]
    answers: list[Answer] = []
    async with open_client(120) as client:

        async def send() -> None:
            (system,) = draw.choices(systems, weights)
            # Its first word is its own, so that no two share more than what the gateway knows of.
            user = f"{draw.randrange(10**6)} {prose(draw.randrange(5, 30), draw.randrange(10**6))}"
            messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
            body = {"model": MODEL_NAME, "messages": messages, "max_tokens": 1}
            sent = time.monotonic()
            answer = await client.post(servers.tight_gateway.url + CHAT, json=body)
            answer.raise_for_status()
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            told = [int(answer.headers[f"x-seamark-{name}"]) for name in ("predicted", "cached")]
            answers.append(Answer(ids, sent, time.monotonic(), *told))

        while len(answers) < REQUESTS:
            await asyncio.gather(*(send() for _ in range(draw.choice((1, 1, 2, 3)))))
    return answers


@pytest.mark.thorough
async def test_what_is_predicted_is_delivered_and_no_hit_is_longer_than_what_is_shared(
    servers: SharedServers, tokenizer
):
    evicted = metric(servers.tight, EVICTED)
    answers = await answers_of(servers, tokenizer)
    right = sum(answer.predicted == answer.cached for answer in answers)
    print(f"predicted is delivered: {right} of {len(answers)}, {sum(answer.cached > 0 for answer in answers)} hits")
    assert metric(servers.tight, EVICTED) >= evicted + REQUESTS // 50
    assert sum(answer.cached > 0 for answer in answers) >= REQUESTS // 4
    assert right >= 0.95 * len(answers)
    for answer in answers:
        prefix = answer.ids[: answer.cached]
        others = (other.ids for other in answers if other is not answer and other.sent < answer.answered)
        assert not prefix or any(ids[: answer.cached] == prefix for ids in others)
