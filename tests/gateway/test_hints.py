"""What a request's hint and model lead to: entries for each worker's engine, no render that it waits for, a worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from proxy.boundaries.facts_learner import TEMPLATES_PER_KEY
from tests.harness.api_keys import bearer, entry
from tests.harness.fake_engine import template
from tests.harness.gateways import CHAT, LAST_USER, SYSTEM, TURN_END, chat, hint_at
from tests.harness.in_memory_gateway import InMemoryGateway, learnt, settled, told
from tests.harness.recording_worker import EVENTS, RecordingWorker
from tests.harness.waiting import until

COMPLETIONS, MESSAGES, RESPONSES = "/v1/completions", "/v1/messages", "/v1/responses"


def with_brackets(body: Mapping[str, Any]) -> str:
    """Another template: other markers, other words that ask for an answer."""
    text = "".join(f"[[{message['role']}]] {message.get('content') or ''}\n" for message in body["messages"])
    return text + ("[[assistant]] " if body.get("add_generation_prompt", True) else "")


def body_for(path: str, size: int) -> dict[str, Any]:
    question = "How high is the tide? " * (size // 22 + 1)
    if path == CHAT:
        return chat(question)
    if path == MESSAGES:
        question_alone = [{"role": "user", "content": question}]
        return {"model": "m", "max_tokens": 3, "system": SYSTEM["content"], "messages": question_alone}
    if path == RESPONSES:
        return {"model": "m", "instructions": SYSTEM["content"], "input": question}
    return {"model": "m", "prompt": SYSTEM["content"] + question}


async def test_no_request_is_rendered_however_long_it_is(in_memory):
    paths = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
    worker = RecordingWorker(streams=dict.fromkeys(paths, EVENTS))
    gateway = await in_memory(worker)
    await learnt(gateway)
    renders = await settled(worker)
    for path in paths:
        for size in (1, 1, 200_000):
            for stream in (False, True):
                answer = await gateway.post({**body_for(path, size), "stream": stream}, path)
                assert answer.status_code == 200
                assert ("x-seamark-boundary" in answer.headers) == (path != COMPLETIONS)
    assert await settled(worker) == renders == gateway.metric("seamark_renders_total") > 0
    assert not any(seen.target.endswith("/render") for seen in worker.requests)


@pytest.mark.parametrize("has_facts", [True, False])
async def test_what_a_client_says_of_hints_and_outcomes_reaches_no_worker(in_memory, worker, has_facts):
    worker.render_status = 200 if has_facts else 500
    gateway = await in_memory(worker)
    own = {"seamark_boundaries": [16, "last:1"], "a": 1}
    answer = await gateway.post(chat("Tide?", vllm_xargs=own), x_seamark_outcome="client")
    sent = worker.requests[-1]
    xargs = json.loads(sent.body)["vllm_xargs"]
    xargs.pop("seamark_load", None)
    assert xargs == {"seamark_boundaries": [LAST_USER, TURN_END] if has_facts else [], "a": 1}
    assert [value for name, value in sent.headers if name == b"x-seamark-outcome"] == [b"1"]
    assert "x-seamark-outcome" not in answer.headers and answer.headers["x-seamark-reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_facts_change_no_answer(in_memory, worker, caplog, stream):
    """The worker computes something else than what it renders."""
    worker.rendered, worker.cached = with_brackets, 0
    gateway = await in_memory(worker)
    for question in ("one", "two", "one"):
        body = chat(question, stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
        raw = json.dumps(body).encode()
        answer = await gateway.post(raw, x_request_id=question)
        assert answer.status_code == 200 and answer.content == worker.answers[-1]
        sent = json.loads(worker.requests[-1].body)
        assert sent.pop("vllm_xargs")["seamark_boundaries"] and sent == json.loads(raw)
        await told(worker)
    opener, _ = (await gateway.explained("two"))["positions"]
    assert opener == 0  # it is not in the prompt
    assert " failed: " not in caplog.text and "ERROR" not in caplog.text


def thinking(body: Mapping[str, Any]) -> str:
    """A template with a switch that moves the end."""
    on = (body.get("chat_template_kwargs") or {}).get("style") == "long"
    asks = body.get("add_generation_prompt", True)
    return template(body) + ("<think>" if on and asks else "")


async def test_a_setting_is_learnt_beside_the_first_request_that_has_it(in_memory):
    worker = RecordingWorker(template=thinking)
    gateway = await in_memory(worker)
    renders = await settled(worker)
    body = chat("Tide?", chat_template_kwargs={"style": "long"})
    await gateway.post(body)
    assert hint_at(worker)[0] == LAST_USER  # the opener is no setting's
    assert await settled(worker) > renders
    await gateway.post(body)
    assert hint_at(worker) == [LAST_USER, TURN_END - len("<think>")]


TIDE = {"role": "user", "content": "Tide?"}

AT_ONCE = 40


def templated(number: int) -> dict[str, Any]:
    return {"model": "m", "chat_template": f"{{# {number} #}}", "messages": [TIDE]}


def marked(number: int) -> dict[str, Any]:
    """Each head twice: the second time it would be rendered."""
    part = {"type": "text", "text": f"{number // 2} " + "word " * 100, "cache_control": {"type": "ephemeral"}}
    return {"model": "m", "messages": [{"role": "system", "content": [part] * 4}, TIDE]}


@pytest.mark.parametrize("make", [templated, marked])
async def test_a_request_that_is_refused_has_nothing_rendered(in_memory, worker, keys, make):
    keys.write_text(entry("eve", max_inflight=1, max_queued=0) + entry("root", admin=True))
    gateway = await in_memory(worker, api_keys=keys)

    async def ask(body: dict[str, Any]) -> int:
        return (await gateway.post(body, **bearer("eve"))).status_code

    await settled(worker)  # what is learnt in advance
    worker.hold.set()
    first = asyncio.create_task(ask({"model": "m", "messages": [TIDE]}))
    await until(lambda: len(worker.requests) == 1)
    before = worker.renders
    assert set(await asyncio.gather(*map(ask, map(make, range(AT_ONCE))))) == {429}
    assert await settled(worker) == before
    worker.hold.clear()
    assert await first == 200


async def test_many_templates_of_one_key_are_learnt_one_by_one_and_few_of_them(in_memory, worker, keys):
    gateway = await in_memory(worker, api_keys=keys)
    await settled(worker)
    of_one = worker.renders  # the default setting, and those learnt in advance
    worker.renders = worker.most_rendering = 0
    for number in range(5 * TEMPLATES_PER_KEY):
        answer = await gateway.post(templated(number), **bearer("ann"))
        assert answer.status_code == 200
    await settled(worker)
    assert worker.most_rendering == 1 and worker.renders <= TEMPLATES_PER_KEY * of_one


RULES = SYSTEM["content"]

FORM = {"content-type": 'multipart/form-data; boundary="B B"'}

WHISPER = "openai/whisper-small"


def form(**fields: str) -> bytes:
    parts = [b'--B B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n\r\n--B C']
    parts += [
        f"--B B\r\ncontent-disposition:form-data; name={name}\r\n\r\n{value}".encode() for name, value in fields.items()
    ]
    return b"\r\n".join([*parts, b"--B B--\r\n"])


ASKED = [SYSTEM, {"role": "user", "content": "Tide?"}]

LEFT_TO_THE_WORKER = {
    "a chat without one": ({"messages": ASKED}, CHAT),
    "a response with null": ({"instructions": RULES, "input": "Tide?", "model": None}, "/v1/responses"),
    "a message with an empty one": (
        {"system": RULES, "messages": ASKED[1:], "max_tokens": 8, "model": ""},
        "/v1/messages",
    ),
}


async def ask(own: InMemoryGateway, model: str, question: str, **fields) -> httpx.Response:
    return await own.post({**chat(question, **fields), "model": model})


def answered(*workers) -> list[int]:
    return [len(worker.requests) for worker in workers]


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_the_model_that_a_form_names_has_its_worker(in_memory, path):
    chats = RecordingWorker(models=("chat",), checks_names=True)
    audio = RecordingWorker(models=(WHISPER,), checks_names=True)
    own = await in_memory(chats, audio)
    answers = [(await own.post(form(model=WHISPER, language=f"{n}"), path, **FORM)).status_code for n in range(6)]
    answers.append((await own.post(form(prompt="chat", model="chat"), path, **FORM)).status_code)
    answers.append((await own.post({"model": WHISPER, "input": "x"}, "/v1/rerank")).status_code)
    assert set(answers) == {200} and answered(chats, audio) == [1, 7]


@pytest.mark.parametrize(("body", "path"), LEFT_TO_THE_WORKER.values(), ids=LEFT_TO_THE_WORKER.keys())
async def test_a_body_without_a_model_is_for_the_only_one(in_memory, body, path):
    worker = RecordingWorker()
    own = await in_memory(worker)
    await learnt(own)
    first = await own.post({**body, "model": "m"}, path)
    await told(worker)
    hint = hint_at(worker)
    second = await own.post(body, path)
    assert (first.status_code, second.status_code) == (200, 200)
    assert json.loads(worker.requests[-1].body).get("model") in (None, "")
    assert hint and hint_at(worker) == hint
    assert int(second.headers["x-seamark-predicted"]) >= int(first.headers["x-seamark-predicted"])
    assert second.headers["x-seamark-reason"] != "unpatched"
    assert own.metric("seamark_requests_total", code="200") == own.metric("seamark_requests_total") == 2
    assert 'model="unknown"' not in (await own.get("/metrics")).text


async def test_before_several_models_a_body_without_one_is_told_which_there_are(in_memory):
    one = RecordingWorker(models=("coder", "gpt-4o"))
    other = RecordingWorker(models=("embedder-8b",))
    own = await in_memory(one, other)
    answers = [await own.post(body, path) for body, path in LEFT_TO_THE_WORKER.values()]
    answers += [
        await own.post({"input": "x"}, "/v1/embeddings"),
        await own.post(form(language="en"), "/v1/audio/translations", **FORM),
    ]
    for answer in answers:
        error = answer.json()["error"]
        assert answer.status_code == 400 and "coder, embedder-8b" in error["message"]
    assert answers[0].json()["error"]["param"] == "model" and answered(one, other) == [0, 0]
    pool = own.gateway.pool
    pool.mark_down(pool.workers[1])  # it will be there again
    assert (await own.post(*LEFT_TO_THE_WORKER["a chat without one"])).status_code == 400


@pytest.mark.parametrize("patched", [True, False])
async def test_a_name_in_no_list_always_goes_to_one_model(in_memory, patched):
    one = RecordingWorker(models=("coder",), patched=patched)
    other = RecordingWorker(models=("writer",), patched=patched)
    own = await in_memory(one, other)
    for name in ("claude-haiku-4-5", "gpt-4o", "gpt-4o-mini", "claude-opus-4-8"):
        one.requests.clear()
        other.requests.clear()
        for number in range(4):
            await own.post({"model": name, "messages": [{"role": "user", "content": f"{number}"}]})
            await own.post({"model": name, "input": f"{number}"}, "/v1/embeddings")
        assert sorted(answered(one, other)) == [0, 8]


async def test_a_worker_that_is_known_to_take_any_name_gets_those_that_no_worker_lists(in_memory):
    strict = RecordingWorker(models=("m",), checks_names=True)
    lax = RecordingWorker(models=("m",))
    own = await in_memory(strict, lax)
    await learnt(own)
    pool = own.gateway.pool
    for number in range(3):  # the one that refuses it is asked once at most
        last = await ask(own, "claude", f"{number}")
    await until(lambda: pool.workers[1].takes_any_name)
    assert pool.workers[0].takes_any_name is not True and last.status_code == 200
    assert {(await ask(own, f"claude-{number}", f"{number}")).status_code for number in range(6)} == {200}
    lax.boot = "1.8e+09"
    await until(lambda: pool.workers[1].takes_any_name is None)
