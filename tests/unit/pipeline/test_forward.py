"""What becomes of requests and answers on their way, seen from both sides; HTTP itself is in `tests/gateway/`."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from urllib.parse import quote

import pytest

from tests.harness.gateways import (
    CHAT,
    LAST_USER,
    SYSTEM,
    SYSTEM_END,
    TURN_END,
    chat,
    hint_at,
)
from tests.harness.in_memory_gateway import InMemoryGateway, told
from tests.harness.recording_worker import EVENTS, RecordingWorker
from tests.harness.waiting import until


@pytest.fixture
async def gateway(in_memory, worker: RecordingWorker) -> InMemoryGateway:
    return await in_memory(worker)


def without_load(sent: bytes) -> bytes:
    """A body as it was sent on, but for what the gateway says of its load."""
    return re.sub(rb',?("vllm_xargs":\{)?"seamark_load":"[0-9a-f]+,\d+,\d+"(?(1)\})', b"", sent)


async def test_the_hint_is_spliced_into_the_clients_bytes(gateway, worker):
    raw = json.dumps(chat("Tide?"), indent=3).encode().replace(b"Tide", b"T\\u0069de")
    answer = await gateway.post(raw)
    assert answer.status_code == 200 and answer.content == worker.answers[-1]
    sent = without_load(worker.requests[-1].body)
    hint = hint_at(worker)
    spliced = json.dumps({"seamark_boundaries": hint}, separators=(",", ":")).encode()
    assert sent == raw[:-1] + b',"vllm_xargs":' + spliced + b"}"
    assert hint == [LAST_USER, TURN_END]
    assert answer.headers["x-seamark-boundary"] == f"{LAST_USER};{TURN_END}"
    assert answer.headers["x-seamark-worker"] == worker.url.removeprefix("http://")
    assert answer.headers["x-seamark-cached"] == "160"
    assert answer.headers["x-seamark-predicted"] == "0"


async def test_a_known_prefix_is_predicted(gateway, worker):
    await gateway.post(chat("one"))
    await told(worker)
    answer = await gateway.post(chat("two"))
    assert answer.headers["x-seamark-predicted"] == str(SYSTEM_END // 16 * 16)
    assert gateway.metric("seamark_boundary_lookups_total", result="learnt") == 2


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
async def test_usage_that_only_the_gateway_asked_for_is_taken_out_again(gateway, worker, options):
    answer = await gateway.post(chat("Tide?", stream=True, **options))
    assert json.loads(worker.requests[-1].body)["stream_options"] == {"include_usage": True}
    assert answer.content == EVENTS[0] + EVENTS[2]
    assert gateway.metric("seamark_cached_tokens_total") == 160


@pytest.mark.parametrize("name", ["one", "/a/b?c=%2F#d e"])
@pytest.mark.parametrize(("path", "in_body"), [(CHAT, False), (CHAT, True), ("/v1/responses", True)])
async def test_two_requests_of_one_name_at_once_are_told_apart_at_the_worker(gateway, worker, name, in_body, path):
    """Their name is that of their answers, and of an explanation."""
    asked = chat("Tide?") if path == CHAT else {"model": "m", "input": "Tide?"}
    asked, headers = ({**asked, "request_id": name}, {}) if in_body else (asked, {"x-request-id": name})
    worker.hold.set()
    answers = [asyncio.create_task(gateway.post(asked, path, **headers)) for _ in range(2)]
    await until(lambda: len(worker.requests) == 2)
    worker.hold.clear()
    assert [(await answer).headers["x-request-id"] for answer in answers] == [name, name]
    names = sorted(dict(request.headers)[b"x-request-id"].decode() for request in worker.requests)
    assert names[0] == name and names[1].startswith(name + ".")
    if in_body:  # by which vLLM stores a response
        assert sorted(json.loads(request.body)["request_id"] for request in worker.requests) == names
    explained = (await gateway.get(f"/seamark/requests/{quote(name, safe='')}")).json()
    assert (explained["request_id"], explained["endpoint"], explained["status"]) == (name, path, 200)


@pytest.mark.parametrize("name", ["", 7, "x" * 257, "é", "a\r\nx-evil: 1"])
async def test_what_cannot_be_a_requests_name_is_left_to_the_worker(gateway, worker, name):
    answer = await gateway.post(chat("Tide?", request_id=name))
    (sent,) = worker.requests
    assert answer.status_code == 200 and len(answer.headers["x-request-id"]) == 32
    assert dict(sent.headers)[b"x-request-id"].decode() == answer.headers["x-request-id"]
    assert json.loads(sent.body)["request_id"] == name and b"x-evil" not in dict(sent.headers)


async def test_a_header_names_a_request_before_its_body(gateway, worker):
    answer = await gateway.post(chat("Tide?", request_id="body's"), x_request_id="header's")
    assert answer.headers["x-request-id"] == "header's"


async def test_a_request_without_an_id_gets_one(gateway, worker):
    answer = await gateway.post(chat("Tide?"))
    assert dict(worker.requests[-1].headers)[b"x-request-id"].decode() == answer.headers["x-request-id"] != ""


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"nonsense", b"\xff\xfe"])
async def test_what_is_not_a_json_object_is_refused_in_openais_envelope(gateway, worker, raw):
    answer = await gateway.post(raw)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and not worker.requests


@pytest.mark.parametrize("messages", ["text", 7, [], [5], [{"role": "assistant", "content": "x"}]])
async def test_a_chat_without_a_boundary_goes_on_unchanged(gateway, worker, messages):
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    assert (await gateway.post(raw)).status_code == 200
    assert without_load(worker.requests[-1].body) == raw
    assert gateway.metric("seamark_boundary_lookups_total", result="none") == 1


async def test_renders_that_fail_cost_the_hint_and_that_is_counted(in_memory, worker):
    worker.render_status, worker.cached = 500, 0
    gateway = await in_memory(worker)
    raw = json.dumps(chat("Tide?")).encode()
    answer = await gateway.post(raw)
    assert answer.status_code == 200 and without_load(worker.requests[-1].body) == raw
    assert "x-seamark-boundary" not in answer.headers
    assert gateway.metric("seamark_miss_total", model="m", reason="no_facts") == 1


async def test_a_worker_without_the_plugin_is_served_without_hints(in_memory):
    plain = RecordingWorker(patched=False)
    gateway = await in_memory(plain)
    raw = json.dumps(chat("Tide?")).encode()
    assert (await gateway.post(raw)).status_code == 200
    assert plain.requests[-1].body == raw
    assert gateway.metric("seamark_engine_patched") == 0 and gateway.metric("seamark_worker_up") == 1
    assert gateway.metric("seamark_miss_total", model="m", reason="unpatched") == 1


async def test_requests_with_one_prefix_go_to_one_worker(in_memory):
    one = RecordingWorker()
    two = RecordingWorker()
    gateway = await in_memory(one, two)
    for number in range(6):
        await gateway.post(chat(f"{number}"))
    assert sorted((len(one.requests), len(two.requests))) == [0, 6]


async def test_equal_cold_prefixes_that_arrive_together_go_together(in_memory):
    one = RecordingWorker()
    other = RecordingWorker()
    gateway = await in_memory(one, other)
    await asyncio.gather(*(gateway.post(chat(f"{number}")) for number in range(6)))
    assert sorted(len(worker.requests) for worker in (one, other)) == [0, 6]


async def test_a_worker_that_serves_the_model_is_chosen(in_memory):
    one = RecordingWorker()
    two = RecordingWorker(models=("n",))
    gateway = await in_memory(one, two)
    for _ in range(3):
        await gateway.post({**chat("x"), "model": "n"})
        await gateway.post({"model": "n", "input": "x"}, "/v1/embeddings")
    assert (len(one.requests), len(two.requests)) == (0, 6)
    listed = (await gateway.get("/v1/models")).json()
    assert [(entry["id"], entry["max_model_len"]) for entry in listed["data"]] == [("m", 8192), ("n", 8192)]


async def test_a_mistyped_model_changes_nothing_for_the_others(gateway, worker):
    await gateway.post({**chat("x"), "model": "made-up"})
    await gateway.post(chat("x"))
    assert hint_at(worker) == [LAST_USER, TURN_END]


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        ("{worker}/v1/some/thing?a=1", "/v1/some/thing?a=1"),
        ("//{host}/v1/some/thing", "/v1/some/thing"),
        ("{worker}//elsewhere/x", "/elsewhere/x"),
        ("/v1/some/thing", "/v1/some/thing"),
        ("http://inside.cluster:8000/v1/some/thing", None),
        ("http://[broken/v1", None),
    ],
)
async def test_a_redirect_of_a_worker_does_not_show_its_address(gateway, worker, location, seen):
    host = worker.url.removeprefix("http://")
    worker.status = 307
    worker.more_headers = [(b"location", location.format(worker=worker.url, host=host).encode())]
    answer = await gateway.get("/v1/some/thing/")
    assert answer.status_code == 307 and answer.headers.get("location") == seen
    shown = {name: value for name, value in answer.headers.items() if name != "x-seamark-worker"}
    assert host not in str(shown) and "inside" not in str(shown)


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/audio/transcriptions", "/tokenize"])
async def test_a_compressed_body_is_refused_since_vllm_reads_none(gateway, worker, path):
    raw = json.dumps(chat("Tide?")).encode()
    for coding in ("gzip", "zstd", "identity, GZIP"):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = await gateway.post(gzip.compress(raw), path, **headers)
        assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
        assert coding.lower().removeprefix("identity, ") in answer.json()["error"]["message"]
    assert not worker.requests
    assert (await gateway.post(raw, CHAT, content_encoding="identity")).status_code == 200


async def test_an_unknown_path_is_refused_in_openais_envelope(gateway):
    answer = await gateway.get("/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


async def test_a_model_name_from_a_client_never_becomes_a_label(gateway, worker):
    for checks_names, code, label in ((False, 200, "m"), (True, 404, "unknown")):
        worker.checks_names = checks_names
        await gateway.post({**chat("x"), "model": "made-up"})
        assert gateway.metric("seamark_requests_total", code=str(code), endpoint=CHAT, model=label) == 1


ODD = [
    {"prompt_cache_key": "session \ud800"},
    {"prompt_cache_key": 7, "cache_salt": "x"},
    {"chat_template_kwargs": 3},
    {"tools": [7], "tool_choice": {"type": []}},
    {"messages": [{"role": ["user"], "content": "x" * 600}, 7, {"role": "user", "content": "?"}]},
    {"messages": [7, {"role": "user", "content": "?"}, {"role": {}, "content": [{"text": 7, "cache_control": 7}]}]},
    {"stream_options": 7, "vllm_xargs": 7, "truncate_prompt_tokens": -1},
]


@pytest.mark.parametrize("fields", ODD)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
async def test_odd_bodies_reach_the_worker_and_log_no_error(gateway, worker, caplog, path, fields):
    for _ in range(2):
        body = {**chat("Tide?"), "input": [SYSTEM, *fields.get("messages", [])], "prompt": "Tide?", **fields}
        assert (await gateway.post(body, path)).status_code == 200
    assert sum(not request.target.endswith("/render") for request in worker.requests) == 2
    assert " failed: " not in caplog.text and "boundary of request" not in caplog.text


async def test_an_answer_is_not_lost_for_its_explanation(in_memory, worker):
    """Tools that differ deep inside: looking for what changed must not cost what was answered."""
    gateway = await in_memory(worker, max_json_depth=900)
    nested = "[" * 600 + "]" * 600
    for name in ("tide", "wind"):
        function = f'{{"name": "{name}", "parameters": {{"x": {nested}}}}}'
        raw = json.dumps(chat("Tide?"))[:-1] + f', "tools": [{{"type": "function", "function": {function}}}]}}'
        assert (await gateway.post(raw.encode())).status_code == 200


@pytest.mark.parametrize("nonsense", [{"prompt_tokens": -5}, {"prompt_tokens": 10**400}, {"cached": -3}])
async def test_an_answer_is_not_lost_for_nonsense_in_its_usage(gateway, worker, nonsense):
    for name, value in nonsense.items():
        setattr(worker, name, value)
    answer = await gateway.post(chat("Tide?"))
    assert answer.status_code == 200 and answer.content == worker.answers[-1]


async def test_a_very_long_request_id_is_replaced(gateway, worker):
    answer = await gateway.post(chat("Tide?"), x_request_id="x" * 5000)
    assert len(answer.headers["x-request-id"]) == 32


async def test_the_status_page_tells_of_workers(gateway, worker):
    status = (await gateway.get("/seamark/status")).json()
    assert status["workers"][0]["engine"]["match_unit"] == 16
    assert status["workers"][0]["up"] is True and status["workers"][0]["models"] == ["m"]


async def test_a_request_that_the_worker_refused_left_nothing_to_predict(worker, gateway):
    worker.status = 400
    assert (await gateway.post(chat("Tide?"))).status_code == 400
    worker.status = 200
    assert (await gateway.post(chat("Tide?"))).headers["x-seamark-predicted"] == "0"
    await told(worker)
    assert int((await gateway.post(chat("Tide?"))).headers["x-seamark-predicted"]) > 400


async def test_a_worker_is_told_whose_a_request_is_and_what_there_is_to_compute(in_memory, worker):
    gateway = await in_memory(worker)
    for _ in range(2):
        await gateway.post(chat("Tide?", vllm_xargs={"seamark_load": "aa,1,1"}))
    told = [json.loads(request.body)["vllm_xargs"]["seamark_load"].split(",") for request in worker.requests[-2:]]
    identity = (await gateway.get("/health")).json()["gateway"]
    assert [name for name, _, _ in told] == [identity, identity]
    (first, again) = ((int(prompt), int(left)) for _, prompt, left in told)
    assert 0 <= again[1] < first[1] <= first[0] and again[1] <= again[0]


@pytest.mark.parametrize("status", [502, 503])
async def test_a_request_that_a_worker_did_not_take_goes_to_another_one_and_to_no_third(in_memory, status):
    closed, open_ = RecordingWorker(status=status), RecordingWorker()
    gateway = await in_memory(closed, open_)
    assert {(await gateway.post(chat(f"{number}"))).status_code for number in range(8)} == {200}
    refused = gateway.metric("seamark_resent_total", reason="refused")
    assert len(closed.requests) == refused >= 1
    assert len(open_.requests) == 8 and gateway.metric("seamark_inflight") == 0
    all_closed = [RecordingWorker(status=status) for _ in range(3)]
    gateway = await in_memory(*all_closed)
    answer = await gateway.post(chat("Tide?"))
    assert answer.status_code == status and answer.content in [each for one in all_closed for each in one.answers]
    assert sorted(len(worker.requests) for worker in all_closed) == [0, 1, 1]


@pytest.mark.parametrize("status", [600, 999, 99, 101])
@pytest.mark.parametrize("path", [CHAT, "/v1/other"])
async def test_a_status_that_is_none_becomes_a_502(in_memory, worker, caplog, status, path):
    answers = iter([status])
    worker.status_by = lambda body: next(answers, 200)
    gateway = await in_memory(worker)
    answer = await gateway.post(chat("Tide?"), path)
    assert answer.status_code == 502 and answer.json()["error"]["code"] == "worker_failed"
    assert gateway.metric("seamark_worker_up") == 1
    assert (await gateway.post(chat("Tide?"), path)).status_code == 200
    assert "Error" not in caplog.text
