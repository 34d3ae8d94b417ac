"""Keys and pages of other sites: what each may ask and see, whose prefixes are whose, and what a form may carry."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware

from tests.harness.api_keys import bearer, entry, secret
from tests.harness.gateways import CHAT, chat, start_gateway
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import COMPLETION, EVENTS, RecordingWorker, recorded
from tests.harness.waiting import until, wait_for

ENDING = b'data: {"id":"chatcmpl-1","choices":[{"index":%d,"delta":{},"finish_reason":"stop"}]}\n\n'


@pytest.fixture
async def gateway(in_memory, worker, keys):
    return await in_memory(worker, api_keys=keys)


def test_a_gateway_with_keys(fleet, worker, keys, tmp_path):
    (tmp_path / "secret").write_text("salt secret\n")
    (tmp_path / "worker-key").write_text("sk-of-the-worker\n")
    flags = ("--salt-secret-file", str(tmp_path / "secret"), "--worker-api-key-file", str(tmp_path / "worker-key"))
    gateway = start_gateway(fleet, worker, flags=("--api-keys", str(keys), *flags))

    def post(name: str, **fields) -> httpx.Response:
        return httpx.post(gateway.url + CHAT, json=chat("Tide?", **fields), headers=bearer(name), timeout=30)

    def get(path: str, name: str) -> httpx.Response:
        return httpx.get(gateway.url + path, headers=bearer(name))

    def salt() -> str:
        return json.loads(worker.requests[-1].body)["cache_salt"]

    # Whoever has no key learns nothing.
    for path in (CHAT, "/v1/messages"):
        refused = httpx.post(gateway.url + path, json=chat("Tide?"), timeout=30)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert set(refused.json()["error"]) >= {"message", "type", "param", "code"}
    assert refused.json()["error"]["type"] == "authentication_error" and not worker.requests
    statuses = [httpx.get(gateway.url + path).status_code for path in ("/v1/models", "/metrics", "/health")]
    assert statuses == [401, 401, 200]

    # Salts are the gateway's; a client's own, and transfer parameters, reach no worker. Nor do keys.
    answer = post("ann", cache_salt="guess", kv_transfer_params={"remote_host": "evil"}, vllm_xargs={"a": 1})
    assert answer.status_code == 200
    sent, anns = worker.requests[-1], salt()
    assert b"guess" not in sent.body and b"evil" not in sent.body and json.loads(sent.body)["vllm_xargs"]["a"] == 1
    assert [value for name, value in sent.headers if name == b"authorization"] == [b"Bearer sk-of-the-worker"]
    assert post("bob").headers["x-seamark-predicted"] == "0"  # another's prefix is no prefix
    bobs = salt()
    assert int(post("cleo").headers["x-seamark-predicted"]) > 0 and salt() == bobs != anns
    embedded = httpx.post(gateway.url + "/v1/embeddings", json={"model": "m", "input": "x"}, headers=bearer("bob"))
    assert salt() == bobs

    # Pages for operators; a client sees its own requests.
    for path in ("/metrics", "/seamark/status"):
        assert [get(path, name).status_code for name in ("ann", "root")] == [403, 200]
    own = f"/seamark/requests/{answer.headers['x-request-id']}"
    assert [get(own, name).status_code for name in ("ann", "bob", "root")] == [200, 404, 200]

    # What each has used, by its name; a request that was refused has used nothing.
    usage = answer.json()["usage"]
    used = {key["name"]: key for key in get("/seamark/status", "root").json()["keys"]}
    assert used.keys() == {"ann", "bob", "cleo"} and used["bob"]["requests"] == 2
    both = used["cleo"]["prompt_tokens"] + embedded.json()["usage"]["prompt_tokens"]
    assert used["bob"]["prompt_tokens"] == both  # of every API
    assert used["ann"] == {
        "name": "ann",
        "requests": 1,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "output_tokens": usage["completion_tokens"],
    }
    metrics = get("/metrics", "root").text
    assert 'seamark_key_requests_total{key="ann"} 1.0' in metrics
    assert f'seamark_key_tokens_total{{key="ann",kind="prompt"}} {float(usage["prompt_tokens"])}' in metrics

    # A key that is taken out is refused without a restart.
    keys.write_text(entry("bob"))
    wait_for(lambda: post("ann").status_code == 401)
    for hidden in (secret("ann"), anns, "salt secret", "sk-of-the-worker", "Tide?"):
        assert hidden not in gateway.log.read_text() + metrics


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("Tide?", stream=True, n=2)),
        (CHAT, chat("Tide?", stream="true", n="2", stream_options={"include_usage": "false"})),
        ("/v1/completions", {"model": "m", "stream": True, "prompt": ["a", "b"]}),
    ],
    ids=["n", "words", "prompts"],
)
async def test_the_tokens_of_every_stream_are_its_keys(gateway, worker, path, body):
    worker.streams = {path: [ENDING % 0, ENDING % 1, *EVENTS[1:]]}
    answer = await gateway.post(body, path, **bearer("ann"))
    assert answer.content == ENDING % 0 + ENDING % 1 + EVENTS[2]  # as if nobody had asked for usage

    assert (await gateway.get("/seamark/status", **bearer("root"))).json()["keys"][0]["prompt_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/v1/embeddings", CHAT])
async def test_no_body_gets_past_what_the_gateway_answers_for(gateway, worker, path):
    deep = "[" * 200 + "]" * 200
    for raw in (
        f'{{"model":"m","cache_salt":"mine","kv_transfer_params":{{}},"x":{deep}}}'.encode(),
        b'{"model":"m","cache_salt":"mine","x":NaN,}',
    ):
        headers = {**bearer("ann"), "content-type": "Application/JSON"}
        assert (await gateway.post(raw, path, **headers)).status_code == 400
    assert not worker.requests
    raw = json.dumps({**chat("Tide?"), "cache_salt": "mine", "ec_transfer_params": {"a": 1}}).encode("utf-16")
    assert (await gateway.post(raw, path, **bearer("ann"))).status_code == 200
    sent = json.loads(worker.requests[-1].body)
    assert sent["cache_salt"] != "mine" and "ec_transfer_params" not in sent


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
async def test_no_prediction_tells_one_key_what_another_asked(gateway, worker, path):
    asked = {"model": "m", "input": "Tide? " * 100} if path == "/v1/responses" else chat("Tide? " * 100)

    async def predicted(name: str) -> int:
        answer = await gateway.post(asked, path, **bearer(name))
        return int(answer.headers["x-seamark-predicted"])

    for name in ("ann", "bob"):
        assert await predicted(name) == 0 < await predicted(name)


async def test_a_path_where_salts_are_not_read_is_closed_and_others_outside_v1_are_salted(gateway, worker):
    for path, status in (("/v2/embed", 404), ("/v2/embed/", 404), ("/pooling", 200), ("/inference/v1/generate", 200)):
        asked = {"model": "m", "cache_salt": "mine", "ec_transfer_params": {"a": 1}}
        assert (await gateway.post(asked, path)).status_code == 401
        assert (await gateway.post(asked, path, **bearer("ann"))).status_code == status
    sent = [(request.target, json.loads(request.body)) for request in worker.requests]
    assert [target for target, _ in sent] == ["/pooling", "/inference/v1/generate"]
    assert all(body.keys() == {"model", "cache_salt"} and body["cache_salt"] != "mine" for _, body in sent)


@pytest.mark.parametrize("limits", [{}, {"max_collected_bytes": 10}, {"max_boundary_values": 1}])
async def test_a_stored_response_is_its_owners(in_memory, worker, keys, limits):
    """However large the answer, and whatever was sought in the request."""
    gateway = await in_memory(worker, api_keys=keys, **limits)
    responses = "/v1/responses"

    async def ask(name: str, **fields) -> int:
        asked = {"model": "m", "input": "Tide?", **fields}
        return (await gateway.post(asked, responses, **bearer(name))).status_code

    assert await ask("ann") == 200
    stored = COMPLETION["id"]
    for name, status in (("ann", 200), ("bob", 404)):
        assert await ask(name, previous_response_id=stored) == status
        spelled = stored.replace("-", "%2D")
        for path in (f"/{stored}", f"/{stored}/cancel", f"/{stored}?stream=true", f"/{spelled}"):
            assert (await gateway.get(responses + path, **bearer(name))).status_code == status
            assert (await gateway.post(b"", responses + path, **bearer(name))).status_code == status


async def test_a_streamed_response_is_its_owners_too(gateway, worker):
    worker.streams = {"/v1/responses": (events := recorded("responses"))}
    stored = json.loads(events[0].splitlines()[1].removeprefix(b"data: "))["response"]["id"]
    body = {"model": "m", "input": "Tide?", "stream": True, "request_id": "mine"}
    answer = await gateway.post(body, "/v1/responses", **bearer("ann"))
    assert (
        answer.content == b"".join(recorded("responses"))
        and json.loads(worker.requests[-1].body)["request_id"] != "mine"
    )
    assert (await gateway.get("/seamark/requests/mine", **bearer("ann"))).json()["status"] == 200
    assert (await gateway.get("/seamark/requests/mine", **bearer("bob"))).status_code == 404
    for name, status in (("ann", 200), ("bob", 404)):
        assert (await gateway.get(f"/v1/responses/{stored}", **bearer(name))).status_code == status


async def test_what_tells_the_salt_or_changes_adapters_is_for_operators(gateway, worker):
    adapter = {"lora_name": "a", "lora_path": "/etc"}
    load = "/v1/load_lora_adapter"
    for body, path in ((chat("x"), CHAT + "/render"), (chat("x"), "/v1/completions/rend%65r"), (adapter, load)):
        assert (await gateway.post(body, path, **bearer("ann"))).status_code == 403
    assert not worker.requests
    assert (await gateway.post(adapter, load, **bearer("root"))).status_code == 200


def test_the_credentials_of_a_worker_reach_it_and_nobody_else(fleet, worker, keys):
    url = worker.url.replace("http://", "http://user:p%40ss@")
    for flags in ((), ("--api-keys", str(keys))):
        gateway = start_gateway(fleet, flags=("--worker", url, *flags))
        worker.requests.clear()
        answer = httpx.post(gateway.url + CHAT, json=chat("Tide?"), headers=bearer("root"), timeout=30)
        assert answer.status_code == 200
        sent = [value for name, value in worker.requests[-1].headers if name == b"authorization"]
        assert sent == [b"Basic " + b64encode(b"user:p@ss")]
        asked = (
            "/ready",
            "/metrics",
            "/seamark/status",
            "/seamark/live",
            f"/seamark/requests/{answer.headers['x-request-id']}",
        )
        pages = [httpx.get(gateway.url + path, headers=bearer("root")) for path in asked]
        assert {page.status_code for page in pages} == {200}
        said = [gateway.log.read_text(), str(answer.headers), *(page.text for page in pages)]
        assert answer.headers["x-seamark-worker"] == worker.url.removeprefix("http://")
        assert not any("p%40ss" in text or "p@ss" in text or "user:" in text for text in said)


async def test_a_request_is_explained_to_its_key_whatever_others_call_theirs(gateway, worker):
    headers = {name: {**bearer(name), "x-request-id": "same"} for name in ("ann", "bob")}
    await gateway.post(chat("Tide?"), **headers["ann"])
    await gateway.post({"model": "m", "prompt": "x"}, "/v1/completions", **headers["bob"])
    explained = [(await gateway.get("/seamark/requests/same", **bearer(name))).json() for name in headers]
    assert [each["endpoint"] for each in explained] == [CHAT, "/v1/completions"]
    assert (await gateway.get("/seamark/requests/same", **bearer("cleo"))).status_code == 404


ORIGIN = {"origin": "https://elsewhere.example"}

ASKS = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}

ALLOWED = "access-control-allow-origin"


def with_cors(gateway: InMemoryGateway, worker: RecordingWorker) -> CORSMiddleware:
    """The worker behind what vLLM's server puts before its application."""
    app = CORSMiddleware(worker, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    gateway.upstream.workers[worker.url] = app
    return app


async def test_the_worker_answers_a_browsers_question_without_a_key_and_without_a_slot(in_memory, worker, keys):
    gateway = await in_memory(worker, api_keys=keys, max_inflight=1, max_queue=0)
    for headers in ({}, ORIGIN, {"access-control-request-method": "POST"}):  # what is no such question
        assert (await gateway.client.options(CHAT, headers=headers)).status_code == 401
    worker.hold.set()
    under_way = asyncio.create_task(gateway.post(chat("x"), **bearer("ann")))
    await until(lambda: worker.requests)
    assert (await gateway.post(chat("y"), **bearer("ann"))).status_code == 503
    app = with_cors(gateway, worker)
    theirs = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker")
    for path in (CHAT, "/v1/models", "/v1/models/", "/v1/audio/transcriptions", "/tokenize"):
        answer, own = await gateway.client.options(path, headers=ASKS), await theirs.options(path, headers=ASKS)
        assert (answer.status_code, answer.content) == (200, own.content)
        for name in (ALLOWED, "access-control-allow-methods", "access-control-allow-headers", "access-control-max-age"):
            assert answer.headers[name] == own.headers[name]
    worker.hold.clear()
    assert (await under_way).status_code == 200


async def test_pages_may_read_the_models_and_errors_as_with_vllm(gateway, worker):
    with_cors(gateway, worker)
    for answer in (
        await gateway.get("/v1/models", **ORIGIN, **bearer("ann")),
        await gateway.post(chat("x"), **ORIGIN, **bearer("ann")),
        await gateway.post(b"{", **ORIGIN, **bearer("ann")),
    ):
        assert answer.headers.get_list(ALLOWED) == ["*"]
    assert ALLOWED not in (await gateway.post(chat("x"), **ORIGIN)).headers  # no key: vLLM's own 401 is not for pages


async def test_the_gateways_own_pages_are_for_no_other_site(gateway):
    for path in ("/metrics", "/ui", "/seamark/status", "/seamark/live", "/health", "/ready", "/nothing"):
        for method in ("GET", "OPTIONS"):
            answer = await gateway.client.request(method, path, headers={**ASKS, **bearer("root")})
            assert ALLOWED not in answer.headers
            assert method == "GET" or answer.status_code >= 400


TRANSCRIPTIONS = "/v1/audio/transcriptions"

MULTIPART = "multipart/form-data; boundary=B"

AUDIO = {"file": ("a.wav", b"RIFF....", "audio/wav")}


async def test_a_form_carries_no_hint(gateway, worker):
    for kind, raw in (
        (MULTIPART, b"--B\r\nContent-Disposition: form-data; name*=utf-8''vllm%5Fxargs\r\n\r\n{}\r\n--B--\r\n"),
        ("application/x-www-form-urlencoded", b"file=x&vllm%5Fxargs={}"),
    ):
        assert (await gateway.post(raw, TRANSCRIPTIONS, content_type=kind, **bearer("ann"))).status_code == 400

    async def ask(**data: str) -> httpx.Response:
        form = {"model": "m", **data}
        return await gateway.client.post(TRANSCRIPTIONS, files=AUDIO, data=form, headers=bearer("ann"))

    for xargs in (
        '{"seamark_boundaries": [5]}',
        '{"seamark_boundarie\\u0073": [5]}',
        '{"kv_transfer_params": {"remote_host": "evil"}}',
        '{"ec_transfer_params": {}}',
    ):
        refused = await ask(vllm_xargs=xargs)
        assert refused.status_code == 400 and "vllm_xargs" in refused.json()["error"]["message"]
    assert not worker.requests
    assert (await ask()).status_code == (await ask(vllm_xargs='{"a": 1}')).status_code == 200
    assert b'{"a": 1}' in worker.requests[-1].body
