"""What clients can make the gateway ask of a worker beside their requests: little at once, and nothing if refused."""

from __future__ import annotations

import asyncio
from datetime import date
from typing import Any

import pytest

from proxy.boundaries.facts_learner import TEMPLATES_PER_KEY
from tests.harness.api_keys import bearer, entry
from tests.harness.in_memory_gateway import settled
from tests.harness.waiting import until

TIDE = {"role": "user", "content": "Tide?"}

AT_ONCE = 40


def dated(number: int) -> dict[str, Any]:
    text = f"You are pilot {number}. " + "Mind the tide. " * 60 + f"\nToday is {date.today():%Y}-03-01."
    return {"model": "m", "messages": [{"role": "system", "content": text}, TIDE]}


def templated(number: int) -> dict[str, Any]:
    return {"model": "m", "chat_template": f"{{# {number} #}}", "messages": [TIDE]}


def switched(number: int) -> dict[str, Any]:
    return {"model": "m", "chat_template_kwargs": {"number": number}, "messages": [TIDE]}


def marked(number: int) -> dict[str, Any]:
    """Each head twice: the second time it would be rendered."""
    part = {"type": "text", "text": f"{number // 2} " + "word " * 100, "cache_control": {"type": "ephemeral"}}
    return {"model": "m", "messages": [{"role": "system", "content": [part] * 4}, TIDE]}


@pytest.mark.parametrize("make", [dated, templated, switched, marked])
async def test_a_request_that_is_refused_has_nothing_rendered(in_memory, worker, tmp_path, make):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("eve", max_inflight=1, max_queued=0) + entry("root", admin=True))
    gateway = await in_memory(worker, api_keys=keys)

    async def ask(body: dict[str, Any]) -> int:
        return (await gateway.post(body, **bearer("eve"))).status_code

    await settled(worker)  # what is learnt in advance
    worker.hold.set()
    first = asyncio.create_task(ask({"model": "m", "messages": [TIDE]}))
    await until(lambda: len(worker.requests) == 1)
    before = worker.renders, worker.tokenized
    assert set(await asyncio.gather(*map(ask, map(make, range(AT_ONCE))))) == {429}
    assert (await settled(worker), worker.tokenized) == before
    worker.hold.clear()
    assert await first == 200


async def test_many_templates_of_one_key_are_learnt_one_by_one_and_few_of_them(in_memory, worker, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("eve") + entry("root", admin=True))
    gateway = await in_memory(worker, api_keys=keys)
    await settled(worker)
    of_one = worker.renders  # the default setting, and those learnt in advance
    worker.renders = worker.most_rendering = 0
    for number in range(5 * TEMPLATES_PER_KEY):
        answer = await gateway.post(templated(number), **bearer("eve"))
        assert answer.status_code == 200
    await settled(worker)
    assert worker.most_rendering == 1 and worker.renders <= TEMPLATES_PER_KEY * of_one
