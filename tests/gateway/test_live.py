"""The figures behind the live page, and who may read them; its alarms: `tests/unit/server/test_status.py`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy.observability import reasons
from proxy.observability.reasons import REASON_TEXT
from proxy.server import live_page
from tests.harness.api_keys import bearer, entry
from tests.harness.fake_engine import template
from tests.harness.gateways import SYSTEM, chat
from tests.harness.in_memory_gateway import InMemoryGateway, told

GATEWAY = (Path(__file__).parents[2] / "proxy" / "README.md").read_text()


async def live(gateway: InMemoryGateway, **headers: str) -> dict:
    answer = await gateway.get("/seamark/live", **headers)
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    return answer.json()


async def test_requests_are_told_newest_first_with_what_they_got(in_memory, worker):
    gateway = await in_memory(worker)
    assert (await live(gateway))["efficiency"] == {"now": None, "hour": None, "minutes": [None] * 60}
    worker.cached = 0
    await gateway.post(chat("one"), x_request_id="first")
    await told(worker)
    worker.cached = 160
    await gateway.post(chat("two"), x_request_id="second")
    figures = await live(gateway)
    second, first = figures["requests"]
    assert (second["request_id"], first["request_id"]) == ("second", "first")
    shareable = len(f"<system>{SYSTEM['content']}<user>") // 16 * 16
    prompt = len(template(chat("one")))
    assert (first["prompt"], first["shareable"], first["delivered"], first["reason"]) == (prompt, 0, 0, "cold")
    assert (second["prompt"], second["shareable"], second["delivered"]) == (prompt, shareable, 160)
    assert second["status"] == 200 and figures["since"] < first["began"] <= second["began"] <= figures["now"]
    assert figures["efficiency"]["now"] == figures["efficiency"]["hour"] == figures["efficiency"]["minutes"][-1]
    assert figures["efficiency"]["now"] == pytest.approx(160 / shareable)
    sums = {"requests": 2, "prompt": 2 * prompt, "shareable": shareable, "came": 160, "delivered": 160, "changed": 0}
    assert figures["sums"]["whole"] == sums and figures["changing"] is None


async def test_no_prompt_text_is_told_and_halves_of_characters_break_nothing(in_memory, worker):
    gateway = await in_memory(worker)
    for question in ("secret tide", "secret ebb"):
        messages = [
            {"role": "system", "content": f"{question} \ud83d " + "harbour " * 100},
            *({"role": role, "content": "long speech " * 30} for role in ("user", "assistant", "user")),
        ]
        assert (await gateway.post({"model": "m", "messages": messages}, x_request_id="x")).status_code == 200
    answer = await gateway.get("/seamark/live")
    assert answer.json()["requests"][0]["request_id"] == "x"
    assert not re.search("secret|tide|ebb|harbour|speech", answer.text)


def test_every_reason_has_words_and_every_word_a_reason():
    table = GATEWAY.split("| reason in `seamark_miss_total`")[1].partition("\n\n")[0]
    assert set(REASON_TEXT) == {*re.findall(r"^\| `(\w+)` \|", table, re.M), "hit"}
    assert set(REASON_TEXT) >= reasons.ENGINE_CAUSES


async def test_the_page_needs_no_key_and_its_figures_need_an_operators(in_memory, worker, tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(entry("ann") + entry("root", admin=True))
    gateway = await in_memory(worker, api_keys=file)
    for path in ("/ui", "/ui/"):
        answer = await gateway.client.get(path, follow_redirects=True)
        assert answer.status_code == 200 and answer.content == live_page.HTML
    assert [(await gateway.get(path)).status_code for path in ("/ui/more", "/seamark/live")] == [401, 401]
    assert (await gateway.get("/seamark/live", **bearer("ann"))).status_code == 403
    assert (await live(gateway, **bearer("root")))["workers"]
