"""What clients can make the gateway ask of a worker beside their requests: little at once, and nothing if refused."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import httpx
import pytest

from proxy.boundaries.facts_learner import TEMPLATES_PER_KEY
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import CHAT, start_gateway, wait_for

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
def test_a_request_that_is_refused_has_nothing_rendered(fleet, worker, tmp_path, make):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("eve", max_inflight=1, max_queued=0) + entry("root", admin=True))
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))

    def templates() -> Any:
        status = httpx.get(gateway.url + "/seamark/status", headers=bearer("root")).json()
        return status["workers"][0]["templates"]["m"]["learnt"]

    def ask(body: dict[str, Any]) -> int:
        return httpx.post(gateway.url + CHAT, json=body, headers=bearer("eve"), timeout=30).status_code

    wait_for(templates)
    wait_for(lambda: is_still(lambda: worker.renders))  # what is learnt in advance
    with ThreadPoolExecutor(AT_ONCE) as pool:
        worker.hold.set()
        first = pool.submit(ask, {"model": "m", "messages": [TIDE]})
        wait_for(lambda: len(worker.requests) == 1)
        before = worker.renders, worker.tokenized
        assert set(pool.map(ask, map(make, range(AT_ONCE)))) == {429}
        assert is_still(lambda: worker.renders) and (worker.renders, worker.tokenized) == before
        worker.hold.clear()
        assert first.result() == 200


def test_many_templates_of_one_key_are_learnt_one_by_one_and_few_of_them(fleet, worker, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("eve") + entry("root", admin=True))
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys)))
    wait_for(lambda: worker.renders and is_still(lambda: worker.renders))
    of_one = worker.renders  # the default setting, and those learnt in advance
    worker.renders = worker.most_rendering = 0
    for number in range(5 * TEMPLATES_PER_KEY):
        answer = httpx.post(gateway.url + CHAT, json=templated(number), headers=bearer("eve"), timeout=30)
        assert answer.status_code == 200
    wait_for(lambda: is_still(lambda: worker.renders))
    assert worker.most_rendering == 1 and worker.renders <= TEMPLATES_PER_KEY * of_one


def is_still(value: Any) -> bool:
    """Whether the value stands still for a while."""
    known = value()
    for _ in range(30):
        time.sleep(0.02)
        if value() != known:
            return False
    return True
