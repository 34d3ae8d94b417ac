"""What the gateway does to requests and answers over real connections, and what clients' SDKs make of them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from urllib.parse import unquote

import anthropic
import httpx
import openai
import pytest

from proxy.bench.harness.servers import Server, Servers
from proxy.chat.chat import CHAT, MESSAGES, OUTSIDE_V1, RESPONSES
from tests.harness.gateways import GatewayForks, chat, post, start_gateway
from tests.harness.recording_worker import EVENTS, RecordingWorker, recorded, recording_worker
from tests.harness.waiting import until


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


ASK = [{"role": "user", "content": "Tide?"}]


@pytest.fixture
def worker() -> Iterator[RecordingWorker]:
    with recording_worker(
        streams={CHAT: EVENTS, MESSAGES: recorded("messages"), RESPONSES: recorded("responses")}
    ) as made:
        yield made


def test_a_body_of_32_mib_arrives_whole(tmp_path):
    """Before a worker without an engine, which would make a list of 32 million tokens of it."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 32 * 2**20}]}).encode()
    with recording_worker(patched=False) as plain, GatewayForks(tmp_path) as fleet:
        server = start_gateway(fleet, plain)
        assert httpx.post(server.url + CHAT, content=body, timeout=120).status_code == 200
        assert plain.requests[-1].body == body


async def test_a_stream_that_is_compressed_passes_as_it_comes_and_nothing_is_put_into_it(in_memory):
    """No comment either, although a stream beside it that is as silent gets some."""
    packed, plain = RecordingWorker(more_headers=[(b"content-encoding", b"gzip")]), RecordingWorker(models=("plain",))
    gateway = await in_memory(packed, plain, heartbeat=0.05)
    for each in (packed, plain):
        each.pause.set()
    beside = asyncio.create_task(gateway.post(chat("Tide?", model="plain", stream=True)))
    answer = gateway.opened(chat("Tide?", stream=True), accept_encoding="gzip, identity;q=0")
    await answer.message()
    pieces = answer.body()
    came = await anext(pieces)
    await until(lambda: gateway.metric("seamark_heartbeats_total") >= 3)
    for each in (packed, plain):
        each.pause.clear()
    came += b"".join([piece async for piece in pieces])
    assert came == packed.answers[-1] and b": keep-alive" in (await beside).content


def test_openais_sdk_raises_where_a_chat_breaks_off(worker, gateway):
    worker.cut_after = 1
    sdk = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)
    got = []
    with pytest.raises(openai.APIError, match="broke off") as raised:
        got.extend(sdk.chat.completions.create(model="m", messages=ASK, stream=True))
    assert got and got[0].choices[0].delta.content == "é"
    assert raised.value.code == "worker_failed" and raised.value.body["type"] == "upstream_error"


def test_anthropics_sdk_raises_where_a_message_breaks_off(worker, gateway):
    worker.cut_after = 6
    claude = anthropic.Anthropic(base_url=gateway.url, api_key="unused", max_retries=0)
    got = []
    with pytest.raises(anthropic.APIStatusError) as raised:
        got.extend(claude.messages.create(model="m", messages=ASK, max_tokens=3, stream=True))
    assert len(got) == worker.cut_after and got[0].type == "message_start"
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "api_error" and "broke off" in raised.value.body["error"]["message"]


def test_a_response_that_breaks_off_has_failed_for_openais_sdk(worker, gateway):
    worker.cut_after = 9
    sdk = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)
    got = list(sdk.responses.create(model="m", input="Tide?", stream=True))
    assert [event.type for event in got[:1]] == ["response.created"] and len(got) == worker.cut_after + 1
    failed = got[-1]
    assert failed.type == "response.failed" and failed.sequence_number == worker.cut_after
    assert failed.response.id == got[0].response.id and failed.response.status == "failed"
    assert failed.response.error.code == "server_error" and "broke off" in failed.response.error.message
