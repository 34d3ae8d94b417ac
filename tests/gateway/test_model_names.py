"""A model's name, wherever it stands and whatever it is, resolves to a served model: with its hints, on its worker."""

from __future__ import annotations

import json
from collections import Counter

import httpx
import pytest

from tests.harness.gateways import CHAT, SYSTEM, chat, hint_at, metric, own_gateway, post, told, wait_for
from tests.harness.recording_worker import recording_worker

RULES = SYSTEM["content"]

FORM = {"content-type": 'multipart/form-data; boundary="B B"'}

WHISPER = "openai/whisper-small"

ALIASES = ("qwen", "claude-sonnet-4-6", "gpt-4o")


def form(**fields: str) -> bytes:
    parts = [b'--B B\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nRIFF\r\n\r\n--B C']
    parts += [
        f"--B B\r\ncontent-disposition:form-data; name={name}\r\n\r\n{value}".encode() for name, value in fields.items()
    ]
    return b"\r\n".join([*parts, b"--B B--\r\n"])


def without_model(body: dict, path: str, model: object = ...) -> tuple[bytes, str]:
    """A request that leaves the model to the worker; `model` is the value of the field, if it is there."""
    return json.dumps(body if model is ... else {**body, "model": model}).encode(), path


MESSAGES = [SYSTEM, {"role": "user", "content": "Tide?"}]

LEFT_TO_THE_WORKER = {
    "a chat without one": without_model({"messages": MESSAGES}, CHAT),
    "a chat with an empty one": without_model({"messages": MESSAGES}, CHAT, ""),
    "a response with null": without_model({"instructions": RULES, "input": "Tide?"}, "/v1/responses", None),
    "a completion with an empty one": without_model({"prompt": RULES}, "/v1/completions", ""),
    "a message with an empty one": without_model(
        {"system": RULES, "messages": MESSAGES[1:], "max_tokens": 8}, "/v1/messages", ""
    ),
}


def learnt(own) -> None:
    """Wait until the templates of all workers are known."""
    wait_for(lambda: all(worker.up and worker.renderer_ids for worker in own.gateway.pool.workers))
    pool, facts = own.gateway.pool, own.gateway.facts
    wait_for(lambda: all(facts.facts(worker.renderer_id("")) is not None for worker in pool.workers))


def ask(own, model: str, question: str, **fields) -> httpx.Response:
    return post(own, {**chat(question, **fields), "model": model})


def answered(*workers) -> list[int]:
    return [len(worker.requests) for worker in workers]


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
def test_the_model_that_a_form_names_has_its_worker(path):
    with (
        recording_worker(models=("chat",), checks_names=True) as chats,
        recording_worker(models=(WHISPER,), checks_names=True) as audio,
        own_gateway(chats, audio) as own,
    ):
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        answers = [post(own, form(model=WHISPER, language=f"{n}"), path, headers=FORM).status_code for n in range(6)]
        answers.append(post(own, form(prompt="chat", model="chat"), path, headers=FORM).status_code)
        answers.append(post(own, json.dumps({"model": WHISPER, "input": "x"}).encode(), "/v1/rerank").status_code)
        assert set(answers) == {200} and answered(chats, audio) == [1, 7]


@pytest.mark.parametrize(("body", "path"), LEFT_TO_THE_WORKER.values(), ids=LEFT_TO_THE_WORKER.keys())
def test_a_body_without_a_model_is_for_the_only_one(body, path):
    with recording_worker() as worker, own_gateway(worker) as own:
        learnt(own)
        named = json.dumps({**json.loads(body), "model": "m"}).encode()
        first = post(own, named, path)
        told(worker)
        hint = hint_at(worker)
        second = post(own, body, path)
        assert (first.status_code, second.status_code) == (200, 200)
        assert json.loads(worker.requests[-1].body).get("model") in (None, "")
        if path != "/v1/completions":
            assert hint and hint_at(worker) == hint
        assert int(second.headers["x-seamark-predicted"]) >= int(first.headers["x-seamark-predicted"])
        assert second.headers["x-seamark-reason"] != "unpatched"
        assert metric(own, 'seamark_requests_total{code="200"') == metric(own, "seamark_requests_total") == 2
        assert 'model="unknown"' not in httpx.get(own.url + "/metrics").text


def test_before_several_models_a_body_without_one_is_told_which_there_are():
    with (
        recording_worker(models=("coder", "gpt-4o")) as one,
        recording_worker(models=("embedder-8b",)) as other,
        own_gateway(one, other) as own,
    ):
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        answers = [post(own, body, path) for body, path in LEFT_TO_THE_WORKER.values()]
        answers += [
            post(own, {"input": "x"}, "/v1/embeddings"),
            post(own, form(language="en"), "/v1/audio/translations", headers=FORM),
        ]
        for answer in answers:
            error = answer.json()["error"]
            assert answer.status_code == 400 and "coder, embedder-8b" in error["message"]
        assert answers[0].json()["error"]["param"] == "model" and answered(one, other) == [0, 0]
        pool = own.gateway.pool
        pool.mark_down(pool.workers[1])  # it will be there again
        assert post(own, *LEFT_TO_THE_WORKER["a chat without one"]).status_code == 400


def test_all_names_of_a_model_have_one_prefix_and_one_worker():
    with (
        recording_worker(models=ALIASES) as one,
        recording_worker(models=ALIASES[::-1]) as other,
        own_gateway(one, other) as own,
    ):
        learnt(own)
        for question in "ab":
            last = ask(own, "qwen", question)
            told(one, other)
        predicted = last.headers["x-seamark-predicted"]
        holder = last.headers["x-seamark-worker"]
        assert int(predicted)
        for name in (*ALIASES, "", "claude-haiku-4-5"):
            answer = ask(own, name, f"{name}?")
            assert (answer.headers["x-seamark-worker"], answer.headers["x-seamark-predicted"]) == (holder, predicted)
            assert json.loads((one if one.url.endswith(holder) else other).requests[-1].body)["model"] == name
        (warm,) = own.gateway.warmup.hottest(frozenset(ALIASES))
        assert warm.model in ALIASES


def test_a_name_goes_only_to_workers_that_list_it():
    with (
        recording_worker(models=("qwen", "gpt-4o")) as one,
        recording_worker(models=("gpt-4o",)) as other,
        own_gateway(one, other) as own,
    ):
        learnt(own)
        for question in range(4):
            assert ask(own, "qwen", f"{question}").status_code == 200
        assert answered(one, other) == [4, 0]


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_worker_that_takes_any_name_gets_the_hint_of_its_model(path):
    with recording_worker() as one, recording_worker() as other, own_gateway(one, other) as own:
        learnt(own)
        for question in range(6):
            messages = [*([SYSTEM] if path == CHAT else []), {"role": "user", "content": f"{question}"}]
            system = {} if path == CHAT else {"system": RULES}
            answer = post(own, {"model": "claude-haiku-4-5", "max_tokens": 8, **system, "messages": messages}, path)
            told(one, other)
            assert answer.headers["x-seamark-boundary"] and answer.headers["x-seamark-reason"] != "unpatched"
        assert sorted(answered(one, other)) == [0, 6] and int(answer.headers["x-seamark-predicted"])
        assert metric(own, f'seamark_requests_total{{code="200",endpoint="{path}",model="m"') == 6


@pytest.mark.parametrize("patched", [True, False])
def test_a_name_in_no_list_always_goes_to_one_model(patched):
    with (
        recording_worker(models=("coder",), patched=patched) as one,
        recording_worker(models=("writer",), patched=patched) as other,
        own_gateway(one, other) as own,
    ):
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        for name in ("claude-haiku-4-5", "gpt-4o", "gpt-4o-mini", "claude-opus-4-8"):
            one.requests.clear()
            other.requests.clear()
            for number in range(4):
                post(own, {"model": name, "messages": [{"role": "user", "content": f"{number}"}]})
                post(own, {"model": name, "input": f"{number}"}, "/v1/embeddings")
            assert sorted(answered(one, other)) == [0, 8]


def test_a_worker_that_is_known_to_take_any_name_gets_those_that_no_worker_lists():
    with (
        recording_worker(models=("m",), checks_names=True) as strict,
        recording_worker(models=("m",)) as lax,
        own_gateway(strict, lax) as own,
    ):
        learnt(own)
        pool = own.gateway.pool
        for number in range(3):  # the one that refuses it is asked once at most
            last = ask(own, "claude", f"{number}")
        wait_for(lambda: pool.workers[1].takes_any_name)
        assert pool.workers[0].takes_any_name is not True and last.status_code == 200
        assert {ask(own, f"claude-{number}", f"{number}").status_code for number in range(6)} == {200}
        lax.boot = "1.8e+09"
        wait_for(lambda: pool.workers[1].takes_any_name is None)


def test_a_refused_name_is_no_label():
    with recording_worker(checks_names=True) as worker, own_gateway(worker) as own:
        learnt(own)
        answer = ask(own, "a name of a client's", "x")
        assert answer.status_code == 404 and "a name of" not in httpx.get(own.url + "/metrics").text
        explained = httpx.get(f"{own.url}/seamark/requests/{answer.headers['x-request-id']}").json()
        assert explained["model"] == "unknown" and explained["missing"] == "model"


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"

ADAPTER = {"lora_name": "tide-lora", "lora_path": "/x"}


def loaded(*workers) -> list[dict[str, str]]:
    return [worker.adapters for worker in workers]


def two_with_adapters(**state):
    return recording_worker(checks_names=True, adapters={}, **state)


def test_an_adapter_is_loaded_and_unloaded_at_all_workers_and_known_at_once():
    with two_with_adapters() as one, two_with_adapters() as other, own_gateway(one, other, health_interval=3600) as own:
        learnt(own)
        answer = post(own, ADAPTER, LOAD)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'tide-lora' added successfully.")
        assert loaded(one, other) == [{"tide-lora": "/x"}] * 2
        for number in range(12):
            asked = post(own, {"model": "tide-lora", "messages": [SYSTEM, {"role": "user", "content": f"{number}"}]})
            assert asked.status_code == 200 and asked.headers["x-seamark-boundary"]
            assert asked.headers["x-seamark-reason"] != "unpatched"
        assert httpx.get(own.url + "/v1/models/tide-lora").json()["parent"] == "m"
        again = post(own, ADAPTER, LOAD)
        assert again.status_code == 400 and "already been loaded" in again.text
        assert post(own, {"lora_name": "tide-lora"}, UNLOAD).status_code == 200 and loaded(one, other) == [{}, {}]
        assert ask(own, "tide-lora", "x").status_code == 404
        assert post(own, {"lora_name": "tide-lora"}, UNLOAD).status_code == 404


def test_an_adapter_shares_nothing_with_its_base_model():
    with two_with_adapters() as worker, own_gateway(worker) as own:
        learnt(own)
        post(own, ADAPTER, LOAD)
        for question in "ab":
            ask(own, "m", question)
            told(worker)
        assert int(ask(own, "m", "c").headers["x-seamark-predicted"])
        assert not int(ask(own, "tide-lora", "c").headers["x-seamark-predicted"])


@pytest.mark.parametrize("failure", ["error", "down", "another path"])
def test_the_answer_says_which_workers_an_adapter_did_not_reach(failure):
    with two_with_adapters() as one, two_with_adapters() as other, own_gateway(one, other) as own:
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        pool = own.gateway.pool
        if failure == "error":
            other.status = 500
        elif failure == "down":
            pool.check_health = pool.ask_models  # nothing finds it well again
            pool.mark_down(pool.workers[1], "connection refused")
        else:
            other.adapters = {"tide-lora": "/elsewhere"}
        answer = post(own, ADAPTER, LOAD)
        names = [worker.name for worker in pool.workers]
        message = answer.json()["error"]["message"]
        assert answer.status_code == 502 and f"is loaded at {names[0]}, and not at {names[1]} (" in message
        assert one.adapters == {"tide-lora": "/x"}
        if failure == "error":
            assert {ask(own, "tide-lora", f"{number}").status_code for number in range(4)} == {200}
            other.status = 200
            assert post(own, ADAPTER, LOAD).status_code == 200 and loaded(one, other) == [{"tide-lora": "/x"}] * 2


def test_a_worker_without_adapters_is_passed_over_and_named():
    with two_with_adapters() as one, recording_worker(status=404) as without, own_gateway(one, without) as own:
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        answer = post(own, ADAPTER, LOAD)
        assert answer.status_code == 200 and own.gateway.pool.workers[1].name in answer.text
        assert one.adapters == {"tide-lora": "/x"}


def test_where_several_models_take_adapters_the_request_says_whose_it_is():
    with (
        two_with_adapters(models=("coder",)) as one,
        two_with_adapters(models=("writer",)) as other,
        own_gateway(one, other) as own,
    ):
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        answer = post(own, ADAPTER, LOAD)
        assert answer.status_code == 400 and "coder, writer" in answer.text and loaded(one, other) == [{}, {}]
        assert post(own, {**ADAPTER, "base_model_name": "writer"}, LOAD).status_code == 200
        assert loaded(one, other) == [{}, {"tide-lora": "/x"}]
        assert post(own, {**ADAPTER, "base_model_name": "reader"}, LOAD).status_code == 400
        assert post(own, {"lora_name": "tide-lora"}, UNLOAD).status_code == 200 and loaded(one, other) == [{}, {}]


def test_an_adapter_loaded_at_a_worker_is_found_where_it_is():
    with two_with_adapters() as one, two_with_adapters() as other, own_gateway(one, other, health_interval=3600) as own:
        learnt(own)
        other.adapters["tide-lora"] = "/x"
        assert {ask(own, "tide-lora", f"{number}").status_code for number in range(4)} == {200}
        assert answered(one, other) == [0, 4]


def test_a_single_model_is_described_by_a_worker_that_has_it():
    with (
        recording_worker(models=("m",)) as one,
        recording_worker(models=(WHISPER,)) as other,
        own_gateway(one, other) as own,
    ):
        wait_for(lambda: len(own.gateway.pool.up) == 2)
        for path in (WHISPER, WHISPER.replace("/", "%2F")):
            answer = httpx.get(f"{own.url}/v1/models/{path}")
            assert (answer.status_code, answer.json()["id"]) == (200, WHISPER)
            assert answer.headers["x-seamark-worker"] == own.gateway.pool.workers[1].name
        unknown = httpx.get(own.url + "/v1/models/nobody's")
        assert unknown.status_code == 404 and Counter(answered(one, other)) == {0: 2}
