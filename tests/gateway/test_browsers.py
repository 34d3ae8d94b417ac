"""Pages of other sites: which requests a browser lets them make, and which answers they may read. Forms, too."""

from __future__ import annotations

import httpx
import pytest

from tests.harness.api_keys import bearer, entry
from tests.harness.gateways import CHAT, chat, start_gateway
from tests.harness.recording_worker import recording_worker

ORIGIN = {"origin": "https://elsewhere.example"}

ASKS = {**ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}

ALLOWED = "access-control-allow-origin"


@pytest.fixture
def gateway(fleet, worker, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(entry("ann") + entry("root", admin=True))
    return start_gateway(fleet, worker, flags=("--api-keys", str(keys), "--max-inflight", "1", "--max-queue", "0"))


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/models/", "/v1/audio/transcriptions", "/tokenize"])
def test_the_worker_answers_a_browsers_question_without_a_key(gateway, worker, path):
    answer = httpx.options(gateway.url + path, headers=ASKS)
    theirs = httpx.options(worker.url + path, headers=ASKS)
    assert (answer.status_code, answer.content) == (200, theirs.content)
    for name in (ALLOWED, "access-control-allow-methods", "access-control-allow-headers", "access-control-max-age"):
        assert answer.headers[name] == theirs.headers[name]


def test_a_question_waits_for_no_slot(gateway, worker):
    worker.pause.set()
    with httpx.stream("POST", gateway.url + CHAT, json=chat("x", stream=True), headers=bearer("ann")) as under_way:
        assert under_way.status_code == 200
        assert httpx.post(gateway.url + CHAT, json=chat("y"), headers=bearer("ann")).status_code == 503
        assert httpx.options(gateway.url + CHAT, headers=ASKS).status_code == 200


@pytest.mark.parametrize("headers", [{}, ORIGIN, {"access-control-request-method": "POST"}])
def test_what_is_no_such_question_needs_a_key(gateway, worker, headers):
    assert httpx.options(gateway.url + CHAT, headers=headers).status_code == 401
    assert not worker.requests


def test_a_question_takes_no_key_and_no_way_up_to_the_worker(fleet, worker):
    with recording_worker(allowed_origins=()) as strict:
        gateway = start_gateway(fleet, strict)
        answer = httpx.options(gateway.url + CHAT, headers={**ASKS, **bearer("ann")})
        assert answer.status_code == 400 and ALLOWED not in answer.headers  # its own way to say no
        assert httpx.options(gateway.url + "/v1/%2e%2e/pause", headers=ASKS).status_code == 404
        assert not strict.requests


def test_pages_may_read_the_models_and_errors_as_with_vllm(gateway, worker):
    assert httpx.get(gateway.url + "/v1/models", headers={**ORIGIN, **bearer("ann")}).headers[ALLOWED] == "*"
    assert httpx.post(gateway.url + CHAT, json=chat("x"), headers={**ORIGIN, **bearer("ann")}).headers[ALLOWED] == "*"
    refused = httpx.post(gateway.url + CHAT, content=b"{", headers={**ORIGIN, **bearer("ann")})
    assert refused.status_code == 400 and refused.headers.get_list(ALLOWED) == ["*"]
    for answer in (
        httpx.post(gateway.url + CHAT, json=chat("x"), headers=ORIGIN),  # no key: vLLM's own 401 is not for pages
        httpx.get(gateway.url + "/v1/models", headers=ORIGIN),
        httpx.get(gateway.url + "/v1/models", headers=bearer("ann")),
    ):
        assert ALLOWED not in answer.headers


@pytest.mark.parametrize(
    "path", ["/metrics", "/ui", "/seamark/status", "/seamark/live", "/health", "/ready", "/nothing"]
)
def test_the_gateways_own_pages_are_for_no_other_site(gateway, path):
    for method in ("GET", "OPTIONS"):
        answer = httpx.request(method, gateway.url + path, headers={**ASKS, **bearer("root")})
        assert ALLOWED not in answer.headers
        assert method == "GET" or answer.status_code >= 400


FORM = "multipart/form-data; boundary=B"

AUDIO = {"file": ("a.wav", b"RIFF....", "audio/wav")}


@pytest.mark.parametrize(
    "xargs",
    [
        '{"seamark_boundaries": [5]}',
        '{"seamark_boundarie\\u0073": [5]}',
        '{"kv_transfer_params": {"remote_host": "evil"}}',
        '{"ec_transfer_params": {}}',
    ],
)
def test_a_form_carries_no_hint(gateway, worker, xargs):
    url = gateway.url + "/v1/audio/transcriptions"
    refused = httpx.post(url, files=AUDIO, data={"model": "m", "vllm_xargs": xargs}, headers=bearer("ann"))
    assert refused.status_code == 400 and "vllm_xargs" in refused.json()["error"]["message"]
    assert not worker.requests
    for allowed in ({"model": "m"}, {"model": "m", "vllm_xargs": '{"a": 1}'}):
        assert httpx.post(url, files=AUDIO, data=allowed, headers=bearer("ann")).status_code == 200
    assert b'{"a": 1}' in worker.requests[-1].body


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (
            "multipart/form-data; boundary=B",
            b"--B\r\nContent-Disposition: form-data; name*=utf-8''vllm%5Fxargs\r\n\r\n",
        ),
        (
            "multipart/form-data; boundary=B",
            b'--B\r\nContent-Disposition: form-data; name*0="vllm_"; name*1="xargs"\r\n\r\n',
        ),
        ("application/x-www-form-urlencoded", b"file=x&vllm%5Fxargs="),
    ],
)
def test_no_form_that_two_readers_may_take_differently_reaches_a_worker(gateway, worker, kind, raw):
    xargs = b'{"seamark_boundaries":[16],"seamark_pin":1,"kv_transfer_params":"x"}'
    refused = httpx.post(
        gateway.url + "/v1/audio/transcriptions",
        content=raw + xargs + b"\r\n--B--\r\n",
        headers={"content-type": kind, **bearer("ann")},
    )
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    assert not worker.requests
