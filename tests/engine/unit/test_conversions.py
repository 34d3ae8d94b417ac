"""Requests to /v1/messages and /v1/responses become the chat that vLLM makes of them: judged by vLLM's own code."""

from __future__ import annotations

import json

import pytest

from proxy.chat.anthropic import messages_request
from proxy.chat.canonical import chat_keys
from proxy.chat.chat import TOOLS, Mark
from proxy.chat.reader import chat_request
from proxy.chat.responses import StoredResponses, responses_request

EPHEMERAL = {"type": "ephemeral"}

USE = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"port": "Ayr"}}

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "nine"}]}

DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}

TOOL = {"name": "tide", "description": "Tide table", "input_schema": {"properties": {"port": {"type": "string"}}}}

MESSAGES = {
    "text": {"messages": [{"role": "user", "content": "Tide?"}], "system": "You pilot."},
    "system blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "You pilot.", "cache_control": EPHEMERAL},
            {"type": "text", "text": " Briefly."},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Tide?"}]}],
    },
    "tools": {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "Tide?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Look.", "signature": "s"}, USE]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "And then?"}]},
        ],
    },
    "results only": {
        "tools": [TOOL],
        "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": "Tide?"},
            {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, USE]},
            {"role": "user", "content": [{**RESULT, "content": "nine"}]},
        ],
    },
    "images": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "See"}, IMAGE, {"type": "text", "text": "?"}]}
        ]
    },
    "thinking off": {"thinking": {"type": "disabled"}, "messages": [{"role": "user", "content": "Tide?"}]},
    "thinking off, effort high": {
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
        "messages": [{"role": "user", "content": "Tide?"}],
    },
    "an empty system message": {
        "messages": [{"role": "user", "content": "Tide?"}, {"role": "system", "content": ""}],
    },
    "a document in a result": {
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "Tide?"},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "content": [*RESULT["content"], DOCUMENT]}]},
        ],
    },
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    body = {"model": "m", "max_tokens": 8, **MESSAGES[name]}
    wanted = AnthropicServingMessages.to_chat_completion_request(
        AnthropicMessagesRequest(**json.loads(json.dumps(body)))
    )
    made = messages_request(body)
    theirs = json.loads(wanted.model_dump_json(exclude_none=True))
    assert keys(made.messages) == keys(theirs["messages"])
    ours = [_without_nulls(tool) for tool in made.body.get("tools", [])]
    assert ours == theirs.get("tools", [])
    assert made.body.get("reasoning_effort") == theirs.get("reasoning_effort")


RESPONSES = {
    "text": {"input": "Tide?", "instructions": "You pilot."},
    "messages": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Tide?"}]},
            {"role": "assistant", "content": "Nine."},
            {"role": "user", "content": "And then?"},
        ]
    },
    "tools": {
        "tools": [{"type": "function", "name": "tide", "description": "d", "parameters": {"type": "object"}}],
        "input": [
            {"role": "user", "content": "Tide?"},
            {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "tide", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "nine"},
            {"type": "function_call_output", "call_id": "c2", "output": "ten"},
        ],
    },
    "a custom tool": {
        "tools": [{"type": "custom", "name": "patch", "description": "d"}],
        "input": [
            {"role": "user", "content": "Patch it."},
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        ],
    },
    "a result that is incomplete": {
        "input": [
            {"role": "user", "content": "Tide?"},
            {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "n", "status": "incomplete"},
        ],
    },
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name):
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, should_continue_final_message

    body = {"model": "m", **RESPONSES[name]}
    request = ResponsesRequest(**json.loads(json.dumps(body)))
    theirs = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    theirs = json.loads(json.dumps(theirs, default=lambda value: value.model_dump()))
    for message in theirs:  # a list of one text renders as that text, whatever the API calls its type
        if isinstance(message.get("content"), list):
            message["content"] = [{"type": "text", "text": part["text"]} for part in message["content"]]
    made = responses_request(body)
    assert keys(made.messages) == keys(theirs)
    assert bool(made.body.get("continue_final_message")) == should_continue_final_message(request.input)


def keys(messages):
    """Of the messages with the names in them sorted: vLLM's request classes write them in an order of their own."""
    return chat_keys({}, json.loads(json.dumps(messages, sort_keys=True)), b"").after


def _without_nulls(value):
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return value


def test_marks_of_the_messages_api_lie_where_their_blocks_ended_up():
    body = {
        "tools": [{**TOOL, "cache_control": EPHEMERAL}],
        "system": [
            {"type": "text", "text": "You pilot.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "More."},
        ],
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "doc", "cache_control": EPHEMERAL}, {"type": "text", "text": "?"}],
            },
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "cache_control": EPHEMERAL}]},
        ],
    }
    assert messages_request(body).marks == (Mark(TOOLS), Mark(0, characters=10), Mark(1, 0), Mark(3))


def test_marks_of_a_chat():
    part = {"type": "text", "text": "doc", "prompt_cache_breakpoint": {"mode": "explicit"}}
    body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]}
    assert chat_request(body).marks == (Mark(0, 0),)


def test_a_stored_response_continues_without_its_instructions():
    stored = StoredResponses(100_000)
    first = responses_request({"model": "m", "instructions": "You pilot.", "input": "Tide?"})
    answer = {"id": "r1", "output": [{"type": "message", "content": [{"type": "output_text", "text": "Nine."}]}]}
    stored.put(first, answer, "boot")
    second = responses_request({"model": "m", "input": "And then?"}, stored.chat("r1"))
    assert [message["content"] for message in second.messages] == ["Tide?", "Nine.", "And then?"]
    assert (second.path, second.asked) == ("/v1/chat/completions", second.body) and stored.boot("r1") == "boot"


def test_a_stored_response_stays_as_it_is_however_it_is_continued():
    stored = StoredResponses(100_000)
    first = responses_request({"model": "m", "input": "Tide?"})
    answer = {"id": "r1", "output": [{"type": "message", "content": [{"type": "output_text", "text": "Nine."}]}]}
    stored.put(first, answer, "boot")
    call = {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": "{}"}
    items = [call, {"type": "function_call_output", "call_id": "c1", "output": "nine"}]
    for _ in range(3):
        chat = responses_request({"model": "m", "input": items}, stored.chat("r1"))
        assert [message["role"] for message in chat.messages] == ["user", "assistant", "assistant", "tool"]
    assert stored.chat("r1") == [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "Nine."}]


def test_stored_calls_count():
    stored = StoredResponses(10_000)
    call = {"type": "function_call", "call_id": "c", "name": "tide", "arguments": "x" * 20_000}
    stored.put(responses_request({"model": "m", "input": ["?", call]}), {"id": "r", "output": []}, "boot")
    assert stored.chat("r") is None


def test_stored_responses_are_bounded():
    stored = StoredResponses(10_000)
    chat = responses_request({"model": "m", "input": "x" * 3000})
    for number in range(10):
        stored.put(chat, {"id": f"r{number}", "output": []}, "boot")
    assert stored.chat("r0") is None and stored.chat("r9") is not None


@pytest.mark.parametrize("body", [{}, {"messages": 7}, {"messages": [7]}, {"messages": [{}], "system": 7, "tools": 7}])
def test_nonsense_raises_nothing(body):
    messages_request(body)
    chat_request(body)
    responses_request({"input": body.get("messages"), "tools": 7, "reasoning": 7})
    responses_request({"input": [{"type": "reasoning", "summary": ["abc"]}, {"role": "assistant", "content": ["x"]}]})
    messages_request({**body, "messages": [{}], "thinking": {"type": []}, "tools": [{}], "tool_choice": {"type": []}})
