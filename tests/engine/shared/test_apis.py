"""Every API on a real engine: by its SDK a prompt hits all it can, and behind the gateway the engine is itself."""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest

from proxy.bench.harness.client import prose
from proxy.bench.harness.servers import MODEL_NAME, Server
from proxy.boundaries.divergence import common_prefix
from proxy.pipeline.forward import HOW_STORED
from tests.harness.engines import SharedServers

UNIT = 16

# So long that a state of it is worth a pass on any machine.
LONG = "The tide turns at noon, and the pilots go out to the ships that wait. " * 70

GREEDY = {"model": MODEL_NAME, "temperature": 0, "extra_body": {"ignore_eos": True, "top_k": 1}}

TOOL = {"name": "tide", "description": "Tide table", "input_schema": {"type": "object", "properties": {}}}

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


@pytest.fixture
def new() -> str:
    """A text that nobody sent before."""
    return f"{uuid.uuid4().hex} {LONG}"


def openai_sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120)


def anthropic_sdk(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=120)


def by_sdk(server: Server, path: str, body: dict[str, Any]) -> tuple[int, object]:
    """Tokens from the cache, and what is said."""
    if path == MESSAGES:
        options = {"model": MODEL_NAME, "max_tokens": 32, "extra_body": {"temperature": 0, "top_k": 1}}
        answer = anthropic_sdk(server).messages.create(**options, **body)
        return answer.usage.cache_read_input_tokens or 0, answer.content
    sdk = openai_sdk(server)
    if path == RESPONSES:
        answer = sdk.responses.create(**{**GREEDY, "extra_body": {"top_k": 1}}, max_output_tokens=32, **body)
        return answer.usage.input_tokens_details.cached_tokens, answer.output_text
    create = sdk.completions.create if path == COMPLETIONS else sdk.chat.completions.create
    answer = create(**GREEDY, max_tokens=32, **body)
    (choice,) = answer.choices
    said = choice.text if path == COMPLETIONS else choice.message.content
    return answer.usage.prompt_tokens_details.cached_tokens, said


def prompt_of(worker: Server, path: str, body: dict) -> list[int]:
    """The prompt as the engine tokenises it."""
    answer = httpx.post(f"{worker.url}{path}/render", json={"model": MODEL_NAME, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    rendered = answer.json()
    return (rendered[0] if isinstance(rendered, list) else rendered)["token_ids"]


def oracle(worker: Server, path: str, *bodies: dict) -> int:
    """What the last of these requests can hit of those before it."""
    *before, last = (prompt_of(worker, path, body) for body in bodies)
    shared = max(common_prefix(last, other) for other in before)
    return min(shared, len(last) - 1) // UNIT * UNIT


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def cached_block(new: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": new, "cache_control": {"type": "ephemeral"}}]


class Row(NamedTuple):
    path: str
    body: Callable[[str, str], dict[str, Any]]  # of a new text and a question
    short_by: int = 0  # tokens that may be missed: a place inside a text is found less exactly


ROWS = {
    "chat": Row(CHAT, lambda new, asked: {"messages": [{"role": "system", "content": new}, *user(asked)]}),
    "a document inside a message": Row(CHAT, lambda new, asked: {"messages": user(new + asked)}, 8 * UNIT),
    "responses": Row(RESPONSES, lambda new, asked: {"instructions": new, "input": asked}),
    "messages": Row(
        MESSAGES, lambda new, asked: {"system": cached_block(new), "tools": [TOOL], "messages": user(asked)}
    ),
    "text": Row(COMPLETIONS, lambda new, asked: {"prompt": f"{new}{asked}"}),
    "token ids": Row(
        COMPLETIONS,
        lambda new, asked: {"prompt": [*random.Random(new).choices(range(100, 4000), k=600), len(asked), 200]},
    ),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_third_request_hits_all_it_can_and_is_answered_as_without_a_cache(servers: SharedServers, new, row: Row):
    bodies = [row.body(new, question) for question in ("When is high tide?", "and low tide?", "Is there ice?")]
    for body in bodies:
        cached, said = by_sdk(servers.gateway, row.path, body)
    wanted = oracle(servers.seamark, row.path, *({**body, "max_tokens": 32} for body in bodies))
    assert wanted - row.short_by <= cached <= wanted and cached > 500
    assert said == by_sdk(servers.reference, row.path, bodies[2])[1]


def test_a_response_that_continues_a_streamed_one_hits_what_both_share(servers: SharedServers, new):
    sdk = openai_sdk(servers.gateway)
    options = {"model": MODEL_NAME, "max_output_tokens": 8, "temperature": 0}
    with sdk.responses.stream(input=f"{new} When is high tide?", **options) as stream:
        first = stream.get_final_response()
    second = sdk.responses.create(input="And low tide?", previous_response_id=first.id, **options)
    asked = user(f"{new} When is high tide?")
    chats = [asked, [*asked, {"role": "assistant", "content": first.output_text}, *user("And low tide?")]]
    wanted = oracle(servers.seamark, CHAT, *({"messages": chat} for chat in chats))
    cached = second.usage.input_tokens_details.cached_tokens
    # The end of a turn lies before the words that ask for an answer: a unit less at most.
    assert wanted - UNIT <= cached <= wanted and cached > 500
    third = sdk.responses.create(input="And the wind?", previous_response_id=second.id, **options)
    assert third.usage.input_tokens_details.cached_tokens > cached


TRIES = 50

TIDE = [{"role": "user", "content": "Tide?"}]

# The same answer each time, in the words of each API.
SEEDED = {"model": MODEL_NAME, "temperature": 0, "seed": 1}

BODIES = {
    CHAT: {**SEEDED, "messages": TIDE, "max_tokens": 12, "logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {**SEEDED, "prompt": "Tide?", "max_tokens": 12},
    RESPONSES: {"model": MODEL_NAME, "temperature": 0, "input": "Tide?", "max_output_tokens": 12},
    MESSAGES: {"model": MODEL_NAME, "temperature": 0, "messages": TIDE, "max_tokens": 12},
}

# What differs from one answer to the next, whoever gives it.
_CHANCE = re.compile(
    rb'"(?:id|item_id)":"[^"]*"|"(?:created|created_at|completed_at)":[0-9.]+|"[a-z_]*cached?_[a-z_]*tokens":[0-9]+'
)


def masked(answer: bytes) -> bytes:
    """An answer without what is not its own: identifiers, times, and what a cache held at that moment."""
    return _CHANCE.sub(b"?", answer)


def post(server: Server, path: str, body: dict) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


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
    (CHAT, {"model": "made-up", "messages": TIDE}),
    (CHAT, {**SEEDED, "messages": TIDE, "temperature": -1}),
    (CHAT, {**SEEDED, "messages": [{"role": "user", "content": prose(9000, 1)}]}),
    (RESPONSES, {"model": MODEL_NAME, "input": "x", "previous_response_id": "resp_unknown"}),
    (MESSAGES, {"model": MODEL_NAME, "messages": TIDE}),
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
    assert masked(behind.content.replace(HOW_STORED, b"")) == masked(direct.content)
    assert (HOW_STORED in behind.content) == ("previous_response_id" in body)
    assert behind.headers["content-type"] == direct.headers["content-type"]


@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
def test_the_usage_of_a_stream_reaches_who_asked_for_it(servers: SharedServers, options):
    body = {**BODIES[CHAT], "stream": True} | ({} if options is None else {"stream_options": options})
    direct, behind = twice(servers, CHAT, body)
    assert masked(behind.content) == masked(direct.content)
    usages = [json.loads(line[6:]).get("usage") for line in behind.text.splitlines() if line.startswith("data: {")]
    assert bool(usages[-1]) == bool(options and options["include_usage"]) and not any(usages[:-1])


def test_fields_of_vllm_pass_and_a_request_id_is_kept_and_nothing_cached_is_told_as_zero(servers: SharedServers):
    # A salt of its own: nobody can have put anything there.
    fields = {"made_up": {"deep": [1, None, "é"]}, "top_k": 1, "return_token_ids": True, "cache_salt": "fidelity"}
    headers = {"x-request-id": "mine-1"}
    answer = openai_sdk(servers.gateway).chat.completions.create(
        model=MODEL_NAME, messages=TIDE, max_tokens=4, extra_body=fields, extra_headers=headers
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
