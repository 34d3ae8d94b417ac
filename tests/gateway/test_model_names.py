"""A model's name, wherever it stands and whatever it is, resolves to a served model: with its hints, on its worker."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.harness.gateways import CHAT, SYSTEM, chat, hint_at
from tests.harness.in_memory_gateway import InMemoryGateway, learnt, told
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

RULES = SYSTEM["content"]

FORM = {"content-type": 'multipart/form-data; boundary="B B"'}

WHISPER = "openai/whisper-small"


def form(**fields: str) -> bytes:
    parts = [b'--B B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n\r\n--B C']
    parts += [
        f"--B B\r\ncontent-disposition:form-data; name={name}\r\n\r\n{value}".encode() for name, value in fields.items()
    ]
    return b"\r\n".join([*parts, b"--B B--\r\n"])


MESSAGES = [SYSTEM, {"role": "user", "content": "Tide?"}]

LEFT_TO_THE_WORKER = {
    "a chat without one": ({"messages": MESSAGES}, CHAT),
    "a response with null": ({"instructions": RULES, "input": "Tide?", "model": None}, "/v1/responses"),
    "a message with an empty one": (
        {"system": RULES, "messages": MESSAGES[1:], "max_tokens": 8, "model": ""},
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
