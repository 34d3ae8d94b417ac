"""Every API through its SDK, on a real engine: a prompt hits all it can, and its answer is exact."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest

from proxy.bench.harness.servers import MODEL_NAME, Server
from proxy.boundaries.token_ids import common_prefix
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


def test_streams_and_errors_are_the_sdks_own(servers: SharedServers, new):
    body = {"model": MODEL_NAME, "system": new, "max_tokens": 4, "messages": user("Tide?")}
    with anthropic_sdk(servers.gateway).messages.stream(**body) as stream:
        assert stream.get_final_message().usage.output_tokens == 4
    create = openai_sdk(servers.gateway).chat.completions.create
    with pytest.raises(openai.NotFoundError, match="made-up"):
        create(model="made-up", messages=user("Tide?"))
    with pytest.raises(openai.BadRequestError):
        create(model=MODEL_NAME, messages=user("Tide?"), temperature=-1)
