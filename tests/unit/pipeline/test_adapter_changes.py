"""An adapter is loaded or unloaded at all workers that it belongs to; what is said of those it did not reach."""

from __future__ import annotations

import httpx
import pytest

from proxy.http.client import Answer, Stale
from tests.harness.gateways import SYSTEM, chat
from tests.harness.in_memory_gateway import InMemoryGateway, learnt, told
from tests.harness.recording_worker import RecordingWorker

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADAPTER = {"lora_name": "tide-lora", "lora_path": "/x"}


async def ask(own: InMemoryGateway, model: str, question: str) -> httpx.Response:
    return await own.post({**chat(question), "model": model})


def loaded(*workers) -> list[dict[str, str]]:
    return [worker.adapters for worker in workers]


def with_adapters(**state) -> RecordingWorker:
    return RecordingWorker(checks_names=True, adapters={}, **state)


async def test_an_adapter_is_loaded_and_unloaded_at_all_workers_and_known_at_once(in_memory):
    one = with_adapters()
    other = with_adapters()
    own = await in_memory(one, other, health_interval=3600)
    await learnt(own)
    answer = await own.post(ADAPTER, LOAD)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'tide-lora' added successfully.")
    assert loaded(one, other) == [{"tide-lora": "/x"}] * 2
    for number in range(12):
        asked = await own.post({"model": "tide-lora", "messages": [SYSTEM, {"role": "user", "content": f"{number}"}]})
        assert asked.status_code == 200 and asked.headers["x-seamark-boundary"]
        assert asked.headers["x-seamark-reason"] != "unpatched"
    assert (await own.get("/v1/models/tide-lora")).json()["parent"] == "m"
    again = await own.post(ADAPTER, LOAD)
    assert again.status_code == 400 and "already been loaded" in again.text
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 200 and loaded(one, other) == [{}, {}]
    assert (await ask(own, "tide-lora", "x")).status_code == 404
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 404


async def test_an_adapter_is_loaded_though_its_worker_has_closed_the_connections_that_were_kept(in_memory, monkeypatch):
    worker = with_adapters()
    own = await in_memory(worker)
    await learnt(own)
    send = own.gateway.upstream.send

    async def on_a_new_one(method: str, url: str, *request: object, fresh: bool = False, **more: object) -> Answer:
        if not fresh:
            raise Stale("closed while it was idle")
        return await send(method, url, *request, fresh=fresh, **more)

    monkeypatch.setattr(own.gateway.upstream, "send", on_a_new_one)
    answer = await own.post(ADAPTER, LOAD)
    assert answer.status_code == 200 and loaded(worker) == [{"tide-lora": "/x"}]


async def test_an_adapter_shares_nothing_with_its_base_model(in_memory):
    worker = with_adapters()
    own = await in_memory(worker)
    await learnt(own)
    await own.post(ADAPTER, LOAD)
    for question in "ab":
        await ask(own, "m", question)
        await told(worker)
    assert int((await ask(own, "m", "c")).headers["x-seamark-predicted"])
    assert not int((await ask(own, "tide-lora", "c")).headers["x-seamark-predicted"])


@pytest.mark.parametrize("failure", ["error", "down", "another path"])
async def test_the_answer_says_which_workers_an_adapter_did_not_reach(in_memory, failure):
    one = with_adapters()
    other = with_adapters()
    own = await in_memory(one, other)
    pool = own.gateway.pool
    if failure == "error":
        other.status = 500
    elif failure == "down":
        pool.check_health = pool.ask_models  # nothing finds it well again
        pool.mark_down(pool.workers[1], "connection refused")
    else:
        other.adapters = {"tide-lora": "/elsewhere"}
    answer = await own.post(ADAPTER, LOAD)
    names = [worker.name for worker in pool.workers]
    message = answer.json()["error"]["message"]
    assert answer.status_code == 502 and f"is loaded at {names[0]}, and not at {names[1]} (" in message
    assert one.adapters == {"tide-lora": "/x"}
    if failure == "error":
        assert {(await ask(own, "tide-lora", f"{number}")).status_code for number in range(4)} == {200}
        other.status = 200
        assert (await own.post(ADAPTER, LOAD)).status_code == 200 and loaded(one, other) == [{"tide-lora": "/x"}] * 2


async def test_a_worker_without_adapters_is_passed_over_and_named(in_memory):
    one = with_adapters()
    without = RecordingWorker(status=404)
    own = await in_memory(one, without)
    answer = await own.post(ADAPTER, LOAD)
    assert answer.status_code == 200 and own.gateway.pool.workers[1].name in answer.text
    assert one.adapters == {"tide-lora": "/x"}


async def test_where_several_models_take_adapters_the_request_says_whose_it_is(in_memory):
    one = with_adapters(models=("coder",))
    other = with_adapters(models=("writer",))
    own = await in_memory(one, other)
    answer = await own.post(ADAPTER, LOAD)
    assert answer.status_code == 400 and "coder, writer" in answer.text and loaded(one, other) == [{}, {}]
    assert (await own.post({**ADAPTER, "base_model_name": "writer"}, LOAD)).status_code == 200
    assert loaded(one, other) == [{}, {"tide-lora": "/x"}]
    assert (await own.post({**ADAPTER, "base_model_name": "reader"}, LOAD)).status_code == 400
    assert (await own.post({"lora_name": "tide-lora"}, UNLOAD)).status_code == 200 and loaded(one, other) == [{}, {}]
