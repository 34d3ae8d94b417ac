"""Every API through its SDK, on a real engine: the second request hits all it can, and the answer is exact."""

from __future__ import annotations

import random
import uuid

import anthropic
import httpx
import openai
import pytest

from proxy.bench.harness.servers import MODEL_NAME, Server
from proxy.boundaries.token_ids import common_prefix
from tests.harness.engines import SharedServers

UNIT = 16

TOKENS = 32

# So long that a state of it is worth a pass on any machine.
LONG = "The tide turns at noon, and the pilots go out to the ships that wait. " * 70

GREEDY = {"ignore_eos": True, "top_k": 1}

TOOL = {"name": "tide", "description": "Tide table", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def new() -> str:
    """A system prompt nobody sent before."""
    return f"{uuid.uuid4().hex} {LONG}"


def openai_sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=120)


def anthropic_sdk(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=120)


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


def test_messages_by_the_anthropic_sdk(servers: SharedServers, new):
    system = [{"type": "text", "text": new, "cache_control": {"type": "ephemeral"}}]
    bodies = [
        {"system": system, "tools": [TOOL], "max_tokens": TOKENS, "messages": [{"role": "user", "content": question}]}
        for question in ("When is high tide?", "And low tide?")
    ]

    def ask(server, body):
        options = {"model": MODEL_NAME, "extra_body": {"temperature": 0, "top_k": 1}}
        return anthropic_sdk(server).messages.with_raw_response.create(**body, **options)

    ask(servers.gateway, bodies[0])
    second = ask(servers.gateway, bodies[1])
    message = second.parse()
    assert message.usage.cache_read_input_tokens == oracle(servers.seamark, "/v1/messages", *bodies) > 64
    assert second.headers["x-seamark-reason"] == "hit"
    assert message.content == ask(servers.reference, bodies[1]).parse().content


def test_a_stream_of_messages_by_the_anthropic_sdk(servers: SharedServers, new):
    body = {"model": MODEL_NAME, "system": new, "max_tokens": 4, "messages": [{"role": "user", "content": "Tide?"}]}
    for _ in range(2):
        with anthropic_sdk(servers.gateway).messages.stream(**body) as stream:
            final = stream.get_final_message()
    assert final.usage.output_tokens


def test_chats_by_the_openai_sdk(servers: SharedServers, new):
    def messages(question):
        return [{"role": "system", "content": new}, {"role": "user", "content": question}]

    def ask(server, question):
        options = {"max_tokens": TOKENS, "temperature": 0, "extra_body": GREEDY}
        return openai_sdk(server).chat.completions.create(model=MODEL_NAME, messages=messages(question), **options)

    ask(servers.gateway, "When is high tide?")
    second = ask(servers.gateway, "And low tide?")
    bodies = [{"messages": messages(question)} for question in ("When is high tide?", "And low tide?")]
    wanted = oracle(servers.seamark, "/v1/chat/completions", *bodies)
    assert second.usage.prompt_tokens_details.cached_tokens == wanted > 64
    assert second.choices[0].message.content == ask(servers.reference, "And low tide?").choices[0].message.content


def test_responses_by_the_openai_sdk(servers: SharedServers, new):
    def ask(server, question):
        options = {"max_output_tokens": TOKENS, "temperature": 0, "extra_body": {"top_k": 1}}
        return openai_sdk(server).responses.create(model=MODEL_NAME, instructions=new, input=question, **options)

    ask(servers.gateway, "When is high tide?")
    second = ask(servers.gateway, "And low tide?")
    bodies = [{"instructions": new, "input": question} for question in ("When is high tide?", "And low tide?")]
    assert second.usage.input_tokens_details.cached_tokens == oracle(servers.seamark, "/v1/responses", *bodies) > 64
    assert second.output_text == ask(servers.reference, "And low tide?").output_text


def test_a_response_that_continues_another(servers: SharedServers, new):
    sdk = openai_sdk(servers.gateway)
    new = f"{new} {LONG}"
    options = {"model": MODEL_NAME, "max_output_tokens": 8, "temperature": 0}
    first = sdk.responses.create(input=f"{new} When is high tide?", **options)
    second = sdk.responses.create(input="And low tide?", previous_response_id=first.id, **options)
    asked = {"role": "user", "content": f"{new} When is high tide?"}
    chats = [
        [asked],
        [asked, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And low tide?"}],
    ]
    wanted = oracle(servers.seamark, "/v1/chat/completions", *({"messages": chat} for chat in chats))
    cached = second.usage.input_tokens_details.cached_tokens
    # The end of a turn lies before the words that ask for an answer: a unit less at most.
    assert wanted - UNIT <= cached <= wanted and cached > 64
    third = sdk.responses.create(input="And the wind?", previous_response_id=second.id, **options)
    assert third.usage.input_tokens_details.cached_tokens > cached


def test_a_response_that_continues_a_streamed_one(servers: SharedServers, new):
    sdk = openai_sdk(servers.gateway)
    new = f"{new} {LONG}"
    options = {"model": MODEL_NAME, "max_output_tokens": 8, "temperature": 0}
    with sdk.responses.stream(input=f"{new} When is high tide?", **options) as stream:
        first = stream.get_final_response()
    second = sdk.responses.create(input="And low tide?", previous_response_id=first.id, **options)
    assert second.usage.input_tokens_details.cached_tokens > 1000


def test_completions_by_the_openai_sdk(servers: SharedServers, new):
    document = new * 3

    def ask(server, prompt):
        options = {"max_tokens": TOKENS, "temperature": 0, "extra_body": GREEDY}
        return openai_sdk(server).completions.create(model=MODEL_NAME, prompt=prompt, **options)

    prompts = [f"{document}{question}" for question in ("When is high tide?", "and low tide?", "Is there ice?")]
    answers = [ask(servers.gateway, prompt) for prompt in prompts]
    wanted = oracle(servers.seamark, "/v1/completions", *({"prompt": prompt} for prompt in prompts))
    assert answers[2].usage.prompt_tokens_details.cached_tokens == wanted > 64
    assert answers[2].choices[0].text == ask(servers.reference, prompts[2]).choices[0].text


def test_completions_of_token_ids(servers: SharedServers):
    draw = random.Random(uuid.uuid4().int)
    shared = [draw.randrange(100, 4000) for _ in range(600)]
    for number in range(3):
        answer = openai_sdk(servers.gateway).completions.create(
            model=MODEL_NAME, prompt=[*shared, 100 + number, 200], max_tokens=1
        )
    assert answer.usage.prompt_tokens_details.cached_tokens == 600 // UNIT * UNIT


def test_a_document_inside_a_message_hits_at_the_third_request(servers: SharedServers, new):
    sdk = openai_sdk(servers.gateway)
    document = new * 3
    for question in ("When is high tide?", "and low tide?", "Is there ice?"):
        messages = [{"role": "system", "content": "Briefly."}, {"role": "user", "content": document + question}]
        answer = sdk.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=1)
    details = answer.usage.prompt_tokens_details
    assert details.cached_tokens > 0.95 * answer.usage.prompt_tokens - 2 * UNIT
