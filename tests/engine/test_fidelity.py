"""What clients rely on, by the SDKs that they use: a real engine behind the gateway is the engine itself."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers
from tests.harness.engines import SharedServers
from tests.harness.recording_worker import EVENTS, RecordingWorker, recording_worker

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

TRIES = 6

ASK = [{"role": "user", "content": "Tide?"}]

# The same answer each time, in the words of each API.
GREEDY = {"model": MODEL_NAME, "temperature": 0, "seed": 1}

BODIES = {
    CHAT: {**GREEDY, "messages": ASK, "max_tokens": 24, "logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {**GREEDY, "prompt": "Tide?", "max_tokens": 24},
    RESPONSES: {"model": MODEL_NAME, "temperature": 0, "input": "Tide?", "max_output_tokens": 24},
    MESSAGES: {"model": MODEL_NAME, "temperature": 0, "messages": ASK, "max_tokens": 24},
}

# What differs from one answer to the next, whoever gives it.
_CHANCE = re.compile(
    rb'"(?:id|item_id)":"[^"]*"|"(?:created|created_at|completed_at)":[0-9.]+|"[a-z_]*cached?_[a-z_]*tokens":[0-9]+'
)


def masked(answer: bytes) -> bytes:
    """An answer without what is not its own: identifiers, times, and what a cache held at that moment."""
    return _CHANCE.sub(b"?", answer)


def post(server: Server, path: str, body: dict, **options) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60, **options)


def twice(servers: SharedServers, path: str, body: dict) -> tuple[httpx.Response, httpx.Response]:
    """The answer of the engine alone, and that from behind the gateway.

    An engine that is ahead of its reader puts two tokens into one event, so some more pairs are asked for where the
    first differ.
    """
    for _ in range(TRIES):
        direct, behind = post(servers.seamark, path, body), post(servers.gateway, path, body)
        if masked(direct.content) == masked(behind.content):
            break
    return direct, behind


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_is_the_engines_byte_for_byte(servers: SharedServers, path, stream):
    body = {**BODIES[path], "stream": stream}
    direct, behind = twice(servers, path, body)
    assert (direct.status_code, behind.status_code) == (200, 200)
    assert masked(behind.content) == masked(direct.content)
    assert behind.headers["content-type"] == direct.headers["content-type"]
    if stream:
        assert behind.content.count(b"\n\n") == direct.content.count(b"\n\n") > 5
        assert behind.content.endswith(b"data: [DONE]\n\n") == direct.content.endswith(b"data: [DONE]\n\n")
        assert behind.content.endswith(b"data: [DONE]\n\n") == (path in (CHAT, COMPLETIONS))


WRONG = [
    (CHAT, {"model": "made-up", "messages": ASK}),
    (CHAT, {**GREEDY, "messages": ASK, "temperature": -1}),
    (CHAT, {**GREEDY, "messages": "text"}),
    (CHAT, {**GREEDY, "messages": [{"role": "user", "content": prose(9000, 1)}]}),
    (CHAT, {**GREEDY, "messages": ASK, "max_tokens": "many"}),
    (COMPLETIONS, {**GREEDY, "prompt": "x", "max_tokens": -1}),
    (RESPONSES, {"model": "made-up", "input": "x"}),
    (RESPONSES, {"model": MODEL_NAME, "input": "x", "previous_response_id": "resp_unknown"}),
    (MESSAGES, {"model": "made-up", "messages": ASK, "max_tokens": 3}),
    (MESSAGES, {"model": MODEL_NAME, "messages": ASK}),
    ("/v1/embeddings", {"model": MODEL_NAME, "input": "x"}),
    ("/v1/nothing", {"model": MODEL_NAME}),
]


@pytest.mark.parametrize(("path", "body"), WRONG)
@pytest.mark.parametrize("stream", [True, False])
def test_an_error_is_the_engines_with_its_status(servers: SharedServers, path, body, stream):
    body = {**body, "stream": stream}
    direct, behind = twice(servers, path, body)
    assert behind.status_code == direct.status_code >= 400
    assert masked(behind.content) == masked(direct.content)
    assert behind.headers["content-type"] == direct.headers["content-type"]


def test_fields_that_nobody_knows_pass(servers: SharedServers, worker, gateway):
    sdk = openai.OpenAI(base_url=servers.gateway.url + "/v1", api_key="unused", max_retries=0)
    fields = {"made_up": {"deep": [1, None, "é"]}, "top_k": 1, "return_token_ids": True}
    answer = sdk.chat.completions.create(model=MODEL_NAME, messages=ASK, max_tokens=4, extra_body=fields)
    assert len(answer.choices[0].token_ids) == 4  # a field that only vLLM knows, in the request and in the answer
    sdk = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)
    sdk.chat.completions.create(model="m", messages=ASK, extra_body=fields)
    sent = json.loads(worker.requests[-1].body)
    assert {name: sent[name] for name in fields} == fields and sent["messages"] == ASK


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": True}])
def test_the_usage_of_a_stream_reaches_who_asked_for_it(servers: SharedServers, path, options):
    body = {**BODIES[path], "stream": True} | ({} if options is None else {"stream_options": options})
    direct, behind = twice(servers, path, body)
    assert masked(behind.content) == masked(direct.content)
    usages = [json.loads(line[6:]).get("usage") for line in behind.text.splitlines() if line.startswith("data: {")]
    assert bool(usages[-1]) == bool(options and options["include_usage"]) and not any(usages[:-1])


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_cached_is_reported_as_zero(servers: SharedServers, stream):
    sdk = openai.OpenAI(base_url=servers.gateway.url + "/v1", api_key="unused", max_retries=0)
    fields = {"stream_options": {"include_usage": True}} if stream else {}
    # A salt of its own: nobody can have put anything there.
    body = {"extra_body": {"cache_salt": f"fidelity-{stream}"}, "max_tokens": 3, "stream": stream, **fields}
    answer = sdk.chat.completions.create(model=MODEL_NAME, messages=ASK, **body)
    usage = list(answer)[-1].usage if stream else answer.usage
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens == 0


def test_a_request_id_is_kept_and_told_to_the_worker(servers: SharedServers, worker, gateway):
    sdk = openai.OpenAI(base_url=servers.gateway.url + "/v1", api_key="unused", max_retries=0)
    headers = {"x-request-id": "mine-1"}
    answer = sdk.chat.completions.create(model=MODEL_NAME, messages=ASK, max_tokens=2, extra_headers=headers)
    assert answer._request_id == "mine-1"
    claude = anthropic.Anthropic(base_url=servers.gateway.url, api_key="unused", max_retries=0)
    answer = claude.messages.with_raw_response.create(
        model=MODEL_NAME, messages=ASK, max_tokens=2, extra_headers=headers
    )
    assert answer.headers["x-request-id"] == "mine-1"
    post(gateway, CHAT, {"model": "m", "messages": ASK}, headers=headers)
    assert (b"x-request-id", b"mine-1") in worker.requests[-1].headers


def test_models_are_the_engines(servers: SharedServers):
    direct, behind = (httpx.get(server.url + "/v1/models").json() for server in (servers.seamark, servers.gateway))
    assert behind["data"][0]["max_model_len"] == 8192
    for entry in (*direct["data"], *behind["data"]):
        entry.pop("created")
        for permission in entry.get("permission", ()):
            permission.pop("id"), permission.pop("created")
    assert behind == direct


# --- what no real engine can show ---


@pytest.fixture
def worker() -> Iterator[RecordingWorker]:
    with recording_worker(streams={CHAT: EVENTS, MESSAGES: events("messages"), RESPONSES: events("responses")}) as made:
        yield made


@pytest.fixture
def gateway(worker: RecordingWorker, tmp_path: Path) -> Iterator[Server]:
    with Servers(tmp_path) as fleet:
        server = fleet.gateway(worker)
        server.wait_until_ready("/ready", seconds=30)
        yield server


WITH_USAGE = {"stream_options": {"include_usage": True}}  # the recorded chat has the usage at its end


def events(name: str) -> list[bytes]:
    """A stream of vLLM 0.32's for three tokens, as it came."""
    text = (Path(__file__).parents[1] / "streams" / f"{name}.sse").read_bytes()
    return [event + b"\n\n" for event in text.split(b"\n\n") if event]


def test_a_body_of_32_mib_arrives_whole(tmp_path):
    """Before a worker that renders nothing: this one would take minutes for it."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x" * 32 * 2**20}]}).encode()
    with recording_worker(patched=False) as plain, Servers(tmp_path) as fleet:
        server = fleet.gateway(plain)
        server.wait_until_ready("/ready", seconds=30)
        assert httpx.post(server.url + CHAT, content=body, timeout=120).status_code == 200
        assert plain.requests[-1].body == body


@pytest.mark.parametrize("accepted", ["gzip, deflate, br, zstd", "identity", None])
def test_nothing_is_compressed_on_the_way_and_the_worker_learns_what_is_accepted(worker, gateway, accepted):
    body = {"model": "m", "messages": ASK * 200, "stream": True, **WITH_USAGE}
    request = httpx.Request("POST", gateway.url + CHAT, json=body)
    if accepted is not None:
        request.headers["accept-encoding"] = accepted
    with httpx.Client(timeout=30) as client:
        answer = client.send(request)
    assert "content-encoding" not in answer.headers and answer.content == b"".join(EVENTS)
    seen = dict(worker.requests[-1].headers)
    assert seen.get(b"accept-encoding") == (None if accepted is None else accepted.encode())


def test_connections_are_kept_on_both_sides(worker, gateway):
    with socket.create_connection(("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))) as raw:
        answers = raw.makefile("rb")
        for number in range(20):
            body = json.dumps({"model": "m", "messages": ASK, "stream": number % 3 == 1}).encode()
            raw.sendall(
                b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
            )
            answer = head_of_response(answers)
            assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" not in answer.lower()
    # Those that the gateway's own questions to the worker have opened may be used too, and no others are made.
    peers = [request.peer for request in worker.requests]
    assert len(peers) == 20 and set(peers[10:]) <= set(peers[:10])


def head_of_response(answers) -> bytes:
    """The head of a response; its body is read past."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += answers.readline()
    if length := re.search(rb"content-length: (\d+)", head.lower()):
        answers.read(int(length[1]))
        return head
    while size := int(answers.readline(), 16):
        answers.read(size + 2)
    answers.readline()
    return head


@pytest.mark.parametrize("cut_after", [1, 2])
def test_openais_sdk_raises_where_a_chat_breaks_off(worker, gateway, cut_after):
    worker.cut_stream, worker.cut_after = True, cut_after
    sdk = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)
    got = []
    with pytest.raises(openai.APIError, match="broke off") as raised:
        got.extend(sdk.chat.completions.create(model="m", messages=ASK, stream=True))
    assert got and got[0].choices[0].delta.content == "é"
    assert raised.value.code == "worker_failed" and raised.value.body["type"] == "upstream_error"


@pytest.mark.parametrize("cut_after", [1, 3, 6])
def test_anthropics_sdk_raises_where_a_message_breaks_off(worker, gateway, cut_after):
    worker.cut_stream, worker.cut_after = True, cut_after
    claude = anthropic.Anthropic(base_url=gateway.url, api_key="unused", max_retries=0)
    got = []
    with pytest.raises(anthropic.APIStatusError) as raised:
        got.extend(claude.messages.create(model="m", messages=ASK, max_tokens=3, stream=True))
    assert len(got) == cut_after and got[0].type == "message_start"
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "api_error" and "broke off" in raised.value.body["error"]["message"]


@pytest.mark.parametrize("cut_after", [1, 5, 9])
def test_a_response_that_breaks_off_has_failed_for_openais_sdk(worker, gateway, cut_after):
    worker.cut_stream, worker.cut_after = True, cut_after
    sdk = openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)
    got = list(sdk.responses.create(model="m", input="Tide?", stream=True))
    assert [event.type for event in got[:1]] == ["response.created"] and len(got) == cut_after + 1
    failed = got[-1]
    assert failed.type == "response.failed" and failed.sequence_number == cut_after
    assert failed.response.id == got[0].response.id and failed.response.status == "failed"
    assert failed.response.error.code == "server_error" and "broke off" in failed.response.error.message


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_stream_that_ends_well_gets_nothing_added(worker, gateway, path):
    body = {"model": "m", "messages": ASK, "input": "Tide?", "max_tokens": 3, "stream": True}
    answer = post(gateway, path, body | (WITH_USAGE if path == CHAT else {}))
    assert answer.content == b"".join(worker.streams[path])
