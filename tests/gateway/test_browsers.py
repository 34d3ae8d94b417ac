"""Pages of other sites: which requests a browser lets them make, and which answers they may read. Forms, too."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.middleware.cors import CORSMiddleware

from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import CHAT, chat
from tests.harness.in_memory_gateway import InMemoryGateway
from tests.harness.recording_worker import RecordingWorker
from tests.harness.waiting import until

ORIGIN = {"origin": "https://elsewhere.example"}

ASKS = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}

ALLOWED = "access-control-allow-origin"


def with_cors(gateway: InMemoryGateway, worker: RecordingWorker) -> CORSMiddleware:
    """The worker behind what vLLM's server puts before its application."""
    origins = worker.allowed_origins
    app = CORSMiddleware(worker, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    gateway.upstream.workers[worker.url] = app
    return app


@pytest.fixture
async def gateway(in_memory, worker, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("ann") + entry("root", admin=True))
    return await in_memory(worker, api_keys=keys, max_inflight=1, max_queue=0)


async def test_the_worker_answers_a_browsers_question_without_a_key_and_without_a_slot(gateway, worker):
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


async def test_a_question_takes_no_key_and_no_way_up_to_the_worker(in_memory):
    strict = RecordingWorker(allowed_origins=())
    gateway = await in_memory(strict)
    with_cors(gateway, strict)
    answer = await gateway.client.options(CHAT, headers={**ASKS, **bearer("ann")})
    assert answer.status_code == 400 and ALLOWED not in answer.headers  # its own way to say no
    assert (await gateway.client.options("/v1/%2e%2e/pause", headers=ASKS)).status_code == 404
    assert not strict.requests


async def test_pages_may_read_the_models_and_errors_as_with_vllm(gateway, worker):
    with_cors(gateway, worker)
    for answer in (
        await gateway.get("/v1/models", **ORIGIN, **bearer("ann")),
        await gateway.post(chat("x"), **ORIGIN, **bearer("ann")),
        await gateway.post(b"{", **ORIGIN, **bearer("ann")),
    ):
        assert answer.headers.get_list(ALLOWED) == ["*"]
    for answer in (
        await gateway.post(chat("x"), **ORIGIN),  # no key: vLLM's own 401 is not for pages
        await gateway.get("/v1/models", **ORIGIN),
        await gateway.get("/v1/models", **bearer("ann")),
    ):
        assert ALLOWED not in answer.headers


async def test_the_gateways_own_pages_are_for_no_other_site(gateway):
    for path in ("/metrics", "/ui", "/seamark/status", "/seamark/live", "/health", "/ready", "/nothing"):
        for method in ("GET", "OPTIONS"):
            answer = await gateway.client.request(method, path, headers={**ASKS, **bearer("root")})
            assert ALLOWED not in answer.headers
            assert method == "GET" or answer.status_code >= 400


TRANSCRIPTIONS = "/v1/audio/transcriptions"

AUDIO = {"file": ("a.wav", b"RIFF....", "audio/wav")}


async def test_a_form_carries_no_hint(gateway, worker):
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


MULTIPART = "multipart/form-data; boundary=B"


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (MULTIPART, b"--B\r\nContent-Disposition: form-data; name*=utf-8''vllm%5Fxargs\r\n\r\n"),
        (MULTIPART, b'--B\r\nContent-Disposition: form-data; name*0="vllm_"; name*1="xargs"\r\n\r\n'),
        ("application/x-www-form-urlencoded", b"file=x&vllm%5Fxargs="),
    ],
)
async def test_no_form_that_two_readers_may_take_differently_reaches_a_worker(gateway, worker, kind, raw):
    xargs = b'{"seamark_boundaries":[16],"seamark_pin":1,"kv_transfer_params":"x"}\r\n--B--\r\n'
    refused = await gateway.post(raw + xargs, TRANSCRIPTIONS, content_type=kind, **bearer("ann"))
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    assert not worker.requests
