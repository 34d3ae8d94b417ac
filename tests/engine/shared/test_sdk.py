"""The `openai` SDK on a real engine through the gateway, as a user would call it."""

from __future__ import annotations

import openai
import pytest

from proxy.bench.harness.servers import MODEL_NAME
from tests.harness.engines import SharedServers

MESSAGES = [
    {"role": "system", "content": "You pilot ships into the harbour, and you answer in one sentence at most. " * 6},
    {"role": "user", "content": "When is high tide?"},
]


@pytest.fixture
def sdk(servers: SharedServers) -> openai.OpenAI:
    return openai.OpenAI(base_url=servers.gateway.url + "/v1", api_key="unused", max_retries=0)


def test_a_chat_and_its_second_sight(sdk):
    first = sdk.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=8)
    assert first.choices[0].message.content and first.usage.completion_tokens == 8
    other = [MESSAGES[0], {"role": "user", "content": "And low tide?"}]
    second = sdk.chat.completions.with_raw_response.create(model=MODEL_NAME, messages=other, max_tokens=8)
    cached = second.parse().usage.prompt_tokens_details.cached_tokens
    assert cached > 64
    assert second.headers["x-seamark-cached"] == str(cached) == second.headers["x-seamark-predicted"]
    assert second.headers["x-seamark-worker"] and second.headers["x-request-id"]


def test_a_stream_without_usage(sdk):
    chunks = list(sdk.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, max_tokens=8, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_with_usage(sdk):
    options = {"include_usage": True}
    chunks = list(
        sdk.chat.completions.create(
            model=MODEL_NAME, messages=MESSAGES, max_tokens=8, stream=True, stream_options=options
        )
    )
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_errors_are_the_sdks_own(sdk):
    with pytest.raises(openai.NotFoundError, match="made-up"):
        sdk.chat.completions.create(model="made-up", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError):
        sdk.chat.completions.create(model=MODEL_NAME, messages="text")


def test_models(sdk):
    models = sdk.models.list().data
    assert [model.id for model in models] == [MODEL_NAME]
    assert models[0].max_model_len == 8192


def test_completions_and_tokens_pass_through(sdk):
    assert sdk.completions.create(model=MODEL_NAME, prompt="The tide", max_tokens=4).choices[0].text
