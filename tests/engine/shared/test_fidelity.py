"""What clients rely on, by the SDKs that they use: a real engine behind the gateway is the engine itself."""

from __future__ import annotations

import json
import re

import httpx
import openai
import pytest

from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import MODEL_NAME, Server
from tests.harness.engines import SharedServers

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"

TRIES = 50

ASK = [{"role": "user", "content": "Tide?"}]

# The same answer each time, in the words of each API.
GREEDY = {"model": MODEL_NAME, "temperature": 0, "seed": 1}

BODIES = {
    CHAT: {**GREEDY, "messages": ASK, "max_tokens": 12, "logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {**GREEDY, "prompt": "Tide?", "max_tokens": 12},
    RESPONSES: {"model": MODEL_NAME, "temperature": 0, "input": "Tide?", "max_output_tokens": 12},
    MESSAGES: {"model": MODEL_NAME, "temperature": 0, "messages": ASK, "max_tokens": 12},
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

    An engine that is ahead of its reader puts two tokens into one event, so more are asked for until the one has given
    a stream that the other has given, too.
    """
    given: tuple[dict[bytes, httpx.Response], ...] = ({}, {})
    for _ in range(TRIES):
        for server, answers in zip((servers.seamark, servers.gateway), given, strict=True):
            answer = post(server, path, body)
            answers[masked(answer.content)] = answer
        if alike := given[0].keys() & given[1].keys():
            return given[0][min(alike)], given[1][min(alike)]
    return next(iter(given[0].values())), next(iter(given[1].values()))


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
    behind = post(servers.gateway, path, body)
    if "x-seamark-boundary" in behind.headers:  # vLLM quotes the body, and so the hint
        entries = behind.headers["x-seamark-boundary"].split(";")
        hint = [int(entry) if entry.lstrip("-").isdigit() else entry for entry in entries]
        body = {**body, "vllm_xargs": {"seamark_boundaries": hint}}
    direct = post(servers.seamark, path, body)
    assert behind.status_code == direct.status_code >= 400
    assert masked(behind.content) == masked(direct.content)
    assert behind.headers["content-type"] == direct.headers["content-type"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_the_usage_of_a_stream_reaches_who_asked_for_it(servers: SharedServers, path, options):
    body = {**BODIES[path], "stream": True} | ({} if options is None else {"stream_options": options})
    direct, behind = twice(servers, path, body)
    assert masked(behind.content) == masked(direct.content)
    usages = [json.loads(line[6:]).get("usage") for line in behind.text.splitlines() if line.startswith("data: {")]
    assert bool(usages[-1]) == bool(options and options["include_usage"]) and not any(usages[:-1])


def test_fields_of_vllm_pass_and_a_request_id_is_kept_and_nothing_cached_is_told_as_zero(servers: SharedServers):
    sdk = openai.OpenAI(base_url=servers.gateway.url + "/v1", api_key="unused", max_retries=0)
    # A salt of its own: nobody can have put anything there.
    fields = {"made_up": {"deep": [1, None, "é"]}, "top_k": 1, "return_token_ids": True, "cache_salt": "fidelity"}
    headers = {"x-request-id": "mine-1"}
    answer = sdk.chat.completions.create(
        model=MODEL_NAME, messages=ASK, max_tokens=4, extra_body=fields, extra_headers=headers
    )
    assert len(answer.choices[0].token_ids) == 4 and answer._request_id == "mine-1"
    assert answer.usage.prompt_tokens_details is not None and answer.usage.prompt_tokens_details.cached_tokens == 0


def test_models_are_the_engines(servers: SharedServers):
    direct, behind = (httpx.get(server.url + "/v1/models").json() for server in (servers.seamark, servers.gateway))
    assert behind["data"][0]["max_model_len"] == 8192
    for entry in (*direct["data"], *behind["data"]):
        entry.pop("created")
        for permission in entry.get("permission", ()):
            permission.pop("id"), permission.pop("created")
    assert behind == direct
