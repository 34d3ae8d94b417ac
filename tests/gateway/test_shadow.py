"""Shadow mode: nothing is changed, nobody waits, and what workers without the plugin lose is told by reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.observability.shadow import MATCH_UNIT
from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import SYSTEM, SYSTEM_END, chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until


@pytest.fixture
def worker() -> RecordingWorker:
    return RecordingWorker(patched=False, cached=0)


async def judged(gateway: InMemoryGateway, requests: int) -> dict[str, Any]:
    """The shadow's status once it has judged so many."""
    await gateway.shows(lambda status: sum(status["shadow"]["requests"].values()) >= requests)
    shadow: dict[str, Any] = (await gateway.status())["shadow"]
    return shadow


@pytest.mark.parametrize(
    ("plugin", "reason", "warned"),
    [
        ({"patched": True, "refused": "a layer slides"}, "hint_ignored", "no hints: a layer slides"),
        ({"more_metrics": "vllm:spec_decode_num_drafts_total 0.0\n"}, "unpatched", "have stood a trial"),
    ],
)
async def test_nothing_is_promised_of_a_plugin_that_would_refuse_the_hints(in_memory, worker, plugin, reason, warned):
    for name, value in plugin.items():
        setattr(worker, name, value)
    gateway = await in_memory(worker, shadow=True)
    for number, question in enumerate(("one", "two"), 1):
        answer = await gateway.post(chat(question))
        told = await judged(gateway, number)
    assert answer.headers["x-seamark-reason"] == reason
    assert told["lost"][reason]["tokens"] == SYSTEM_END // MATCH_UNIT * MATCH_UNIT
    assert told["plugin_would_save"]["tokens"] == (told["lost"][reason]["tokens"] if reason == "unpatched" else 0)
    assert warned in " ".join((await gateway.get("/seamark/live")).json()["warnings"])


async def test_no_client_learns_of_anothers_prompts_by_what_its_own_lost(in_memory, worker, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("alice") + entry("bob") + entry("root", admin=True))
    gateway = await in_memory(worker, api_keys=keys)
    asked = [await gateway.post(chat("one"), **bearer(name)) for name in ("alice", "bob", "bob")]
    lost: list[Any] = []

    async def is_judged() -> bool:
        ids = [answer.headers["x-request-id"] for answer in asked]
        told = [await gateway.get(f"/seamark/requests/{each}", **bearer("root")) for each in ids]
        lost[:] = [each.json()["lost"] for each in told]
        return bool(lost[2])

    await until(is_judged)
    assert lost[:2] == [{}, {}] and lost[2].keys() == {"unpatched"}


async def test_in_shadow_mode_text_that_changes_has_its_headline_too(in_memory, worker):
    gateway = await in_memory(worker, health_interval=0.1, shadow=True)
    question = {"role": "user", "content": "How high is the tide tonight? " * 5}
    for clock in ("9:41", "9:42"):
        system = {"role": "system", "content": f"It is {clock}. " + SYSTEM["content"]}
        await gateway.post({"model": "m", "messages": [system, question]})
    lost = (await judged(gateway, 2))["lost"]["prefix_changed"]["tokens"]
    live = (await gateway.get("/seamark/live")).json()
    assert live["sums"]["hour"]["changed"] == live["changing"]["lost"] == lost


@pytest.mark.parametrize("patched", [False, True])
async def test_in_shadow_no_byte_of_a_request_or_an_answer_is_changed(in_memory, worker, patched):
    worker.patched = patched
    gateway = await in_memory(worker, shadow=True)
    billing = "x-anthropic-billing-header: cc_version=1; cch=0;"
    for stream in (False, True):
        body = chat("Tide?", stream=stream, seed=7)
        body["messages"] = [{"role": "system", "content": billing}, *body["messages"]]
        raw = json.dumps(body, indent=3).encode()
        for _ in range(2):
            answer = await gateway.post(raw)
            assert worker.requests[-1].body == raw
            assert "x-seamark-boundary" not in answer.headers
            if stream:
                assert answer.content == worker.answers[-1]
    assert (await judged(gateway, 4))["requests"] == {"judged": 4}
    assert gateway.metric("seamark_engine_patched") == patched
