"""What the gateway does to requests and answers over real connections; what it decides: `tests/unit/pipeline/`."""

from __future__ import annotations

import socket
from urllib.parse import unquote

import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers
from proxy.chat.chat import OUTSIDE_V1
from tests.harness.gateways import chat, post, start_gateway
from tests.harness.recording_worker import RecordingWorker


@pytest.fixture
def gateway(fleet: Servers, worker: RecordingWorker) -> Server:
    return start_gateway(fleet, worker)


def test_headers_travel_byte_for_byte_except_those_of_the_connection(gateway, worker):
    headers = [
        (b"authorization", b"Bearer key"),
        (b"x-mine", b"1"),
        (b"x-mine", b"2"),
        (b"connection", b"x-hop"),
        (b"x-hop", b"1"),
        (b"te", b"trailers"),
        (b"x-request-id", b"my-request"),
        (b"x-latin", b"caf\xe9"),
        (b"x-utf8", "café 潮".encode()),
        (b"x-neither", b"\xe9 \xc3\xa9\xff"),
    ]
    answer = post(gateway, chat("Tide?"), headers=headers)
    assert answer.content == worker.answers[-1]
    seen = worker.requests[-1].headers
    assert b", ".join(value for name, value in seen if name == b"x-mine") == b"1, 2"  # equal by RFC 9110, 5.3
    assert {*headers[:1], *headers[6:]} <= set(seen)
    assert not {b"x-hop", b"te", b"accept-charset"} & {name for name, _ in seen}
    assert sum(name == b"content-length" for name, _ in seen) == 1
    assert answer.headers["x-request-id"] == "my-request"
    assert answer.headers.get_list("x-twice") == ["1", "2"]


def test_any_other_v1_path_and_method_passes_through(gateway, worker):
    target = "/v1/some/thing%20odd%2F?a=1&b=%20%2B&c"
    for method, body in (("GET", b""), *((each, b"not json \x00\xff") for each in ("POST", "PUT", "DELETE", "PATCH"))):
        answer = httpx.request(method, gateway.url + target, content=body)
        seen = worker.requests[-1]
        assert (seen.method, unquote(seen.target), seen.body) == (method, unquote(target), body)
        assert answer.status_code == 200


def test_what_vllm_serves_for_clients_outside_v1_reaches_it_and_nothing_else_does(gateway, worker):
    body = {"model": "m", "prompt": "x"}
    for path in (*sorted(OUTSIDE_V1 - {"/tokenize", "/detokenize"}), "/rerank/", "/%72erank"):
        answer = post(gateway, body, path)
        assert answer.status_code == 200 and answer.headers["x-seamark-worker"], path
        assert unquote(worker.requests[-1].target) == unquote(path).rstrip("/")
    worker.requests.clear()
    closed = ("/sleep", "/reset_prefix_cache", "/collective_rpc", "/server_info", "/update_weights", "/invocations")
    near = ("/inference/v1/abort_requests", "/inference/v1/generate/x", "/rerank/..;/sleep", "/score//sleep", "/RERANK")
    for path in (*closed, *near, "/%73leep", "/rerank%2F..%2Fsleep"):
        for answer in (post(gateway, body, path), httpx.get(gateway.url + path)):
            assert answer.status_code == 404 and "at the worker itself" in answer.json()["error"]["message"], path
    assert not worker.requests


def test_no_path_leads_out_of_v1(gateway, worker):
    port = int(gateway.url.rsplit(":", 1)[1])
    for path in ("/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/a%2F..%2F..%2Fmetrics", "/v1/./models"):
        with socket.create_connection(("127.0.0.1", port)) as raw:  # HTTP clients would tidy the path up
            raw.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] == b"404"
    assert not worker.requests


def test_logs_and_metrics_hold_no_prompt_text(gateway, worker):
    post(gateway, chat("a very secret tide"))
    worker.render_status = 500
    post(gateway, chat("another secret", tools=[]))
    seen = gateway.log.read_text() + httpx.get(gateway.url + "/metrics").text
    assert "secret" not in seen and "harbour" not in seen
