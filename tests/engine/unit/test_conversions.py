"""What stands in for /v1/messages and /v1/responses makes the chats and answers of vLLM: judged by its own code."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, should_continue_final_message

from proxy.chat.anthropic import messages_request
from proxy.chat.canonical import chat_keys
from proxy.chat.responses import responses_request
from proxy.chat.through_chat import MessageStream, chat_of, message_of

QUESTION = {"role": "user", "content": "Tide?"}

USE = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"port": "Ayr"}}

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "nine"}]}

DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}

TOOL = {"name": "tide", "description": "Tide table", "input_schema": {"properties": {"port": {"type": "string"}}}}

MESSAGES = {
    "system blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "You pilot.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " Briefly."},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Tide?"}]}],
    },
    "tools": {
        "tools": [TOOL],
        "messages": [
            QUESTION,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Look.", "signature": "s"}, USE]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "And then?"}]},
        ],
    },
    "thinking off, effort high": {
        "thinking": {"type": "disabled"},
        "output_config": {"effort": "high"},
        "messages": [QUESTION],
    },
    "an empty system message": {"messages": [QUESTION, {"role": "system", "content": ""}]},
    "reminders behind the user and inside a loop": {
        "system": "You pilot.",
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "<hint>"}, {"type": "text", "text": "Tide?"}]},
            {"role": "system", "content": "Harbours: Ayr, Dover."},
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
            {"role": "user", "content": [RESULT]},
            {"role": "system", "content": [{"type": "text", "text": each} for each in ("Keep the list ", "short.")]},
            {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}]},
        ],
    },
    "tools that are named in a result, and tools that come and go": {
        "tools": [{**TOOL, "defer_loading": True}, {**TOOL, "name": "wind"}],
        "messages": [
            QUESTION,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "content": [{"type": "tool_reference", "tool_name": "tide"}]}]},
            {
                "role": "system",
                "content": [
                    {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "tide"}},
                    {
                        "type": "tool_addition",
                        "tool": {"type": "tool_definition", "definition": {**TOOL, "name": "ice"}},
                    },
                    {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "wind"}},
                    {"type": "text", "text": "Again?"},
                ],
            },
        ],
    },
    "a document in a result": {
        "tools": [TOOL],
        "messages": [
            QUESTION,
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [{**RESULT, "content": [*RESULT["content"], DOCUMENT]}]},
        ],
    },
    "sampling of a stream that thinks": {
        "messages": [QUESTION],
        "stream": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stop_sequences": ["\n", "END"],
        "cache_salt": "salt",
        "vllm_xargs": {"seamark_boundaries": [16, "last:7,8"]},
        "thinking": {"type": "enabled", "budget_tokens": 2048},
    },
    "no tools at once": {
        "tools": [TOOL],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "messages": [QUESTION],
    },
    "one tool, and a schema": {
        "messages": [QUESTION],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "tide"},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    },
}


def fields_of(request: ChatCompletionRequest) -> dict[str, Any]:
    """Those that mean something: a default counts as one that is not there."""
    defaults = {"stop": [], "tool_choice": "none", "parallel_tool_calls": True}
    found = request.model_dump(exclude_none=True, exclude={"request_id"})
    return {name: value for name, value in found.items() if defaults.get(name, ...) != value}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    """As it is read for its boundaries, and as it is sent where a chat stands in for it."""
    body = {"model": "m", "max_tokens": 4096, **MESSAGES[name]}
    request = AnthropicMessagesRequest(**json.loads(json.dumps(body)))
    wanted = AnthropicServingMessages.to_chat_completion_request(request)
    made = messages_request(body)
    theirs = json.loads(wanted.model_dump_json(exclude_none=True))
    assert keys(made.messages) == keys(theirs["messages"])
    assert [_without_nulls(tool) for tool in made.body.get("tools", [])] == theirs.get("tools", [])
    assert made.body.get("reasoning_effort") == theirs.get("reasoning_effort")
    assert fields_of(ChatCompletionRequest.model_validate(chat_of(body))) == fields_of(wanted)


RESPONSES = {
    "text": {"input": "Tide?", "instructions": "You pilot."},
    "tools": {
        "tools": [{"type": "function", "name": "tide", "description": "d", "parameters": {"type": "object"}}],
        "input": [
            QUESTION,
            {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "tide", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "nine"},
            {"type": "function_call_output", "call_id": "c2", "output": "ten"},
        ],
    },
    "a custom tool": {
        "tools": [{"type": "custom", "name": "patch", "description": "d"}],
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Patch it."}]},
            {"role": "assistant", "content": "So?"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        ],
    },
    "a result that is incomplete": {
        "input": [
            QUESTION,
            {"type": "function_call", "call_id": "c1", "name": "tide", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "n", "status": "incomplete"},
        ],
    },
}


@pytest.mark.parametrize("name", RESPONSES)
def test_responses(name):
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
    """Keys of the messages, with sorted names: vLLM's request classes have an order of their own."""
    return chat_keys({}, json.loads(json.dumps(messages, sort_keys=True)), b"").after


def _without_nulls(value):
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return value


USAGE = {
    "prompt_tokens": 300,
    "completion_tokens": 5,
    "total_tokens": 305,
    "prompt_tokens_details": {"cached_tokens": 160, "created_cache_tokens": 16},
}

CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": 5}'}}

ANSWERS = {
    "nothing": ({"content": ""}, "stop", None),
    "cut": ({"content": "At"}, "length", None),
    "a stop token": ({"content": "At"}, "stop", 7),
    "a thought": ({"reasoning": "Hm.", "content": "At nine."}, "stop", None),
    "a call": ({"content": None, "tool_calls": [CALL]}, "tool_calls", None),
    "a call that was asked for": ({"content": "Let me see.", "tool_calls": [CALL]}, "stop", None),
}


def without_signatures(value: Any) -> Any:
    """vLLM signs thoughts with random letters."""
    if isinstance(value, dict):
        return {name: "" if name == "signature" else without_signatures(each) for name, each in value.items()}
    return [without_signatures(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("said", "finish", "stop"), ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("usage", [USAGE, {**USAGE, "prompt_tokens_details": None}])
def test_an_answer_is_the_same_message(said, finish, stop, usage):
    choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": finish, "stop_reason": stop}
    chat = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    answer = ChatCompletionResponse.model_validate({**chat, "usage": usage})
    theirs = AnthropicServingMessages.messages_full_converter(None, answer)  # type: ignore[arg-type]
    wanted = json.loads(theirs.model_dump_json(exclude_none=True))
    found = json.loads(message_of(answer.model_dump_json().encode()))
    assert {name: value for name, value in without_signatures(found).items() if value is not None} == (
        without_signatures(wanted)
    )


def called(**fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, **fields}]}


STREAMS = {
    "a thought": [{"reasoning": "H"}, {"reasoning": "m."}, {"content": "At nine."}],
    "a call in parts": [
        {"content": "Let me see."},
        called(id="c1", type="function", function={"name": "tide", "arguments": ""}),
        called(function={"arguments": '{"at"'}),
        called(function={"arguments": ": 5}"}),
    ],
    "two calls, and a word between": [
        called(id="c1", type="function", function={"name": "tide", "arguments": '{"at": 5}'}),
        {"content": "and"},
        {"tool_calls": [{"index": 1, "id": "c2", "type": "function", "function": {"name": "tide", "arguments": "{"}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
    ],
}


def events_of(text: str) -> list[Any]:
    named = [event.partition("\ndata: ") for event in text.split("\n\n") if event]
    assert all(json.loads(data)["type"] == name.removeprefix("event: ") for name, _, data in named)
    return [without_signatures(json.loads(data)) for _, _, data in named]


@pytest.mark.parametrize("deltas", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize(("finish", "stop"), [("stop", None), ("length", None), ("tool_calls", None), ("stop", "END")])
async def test_a_stream_is_the_same_events_however_it_arrives(deltas, finish, stop):
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    early = {**USAGE, "completion_tokens": 0, "prompt_tokens_details": None}

    def chunk(delta: dict[str, Any], end: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": end, "stop_reason": stop if end else None}
        return {**head, "choices": [choice], "usage": early}

    chunks = [chunk({"role": "assistant", "content": ""}), *map(chunk, deltas), chunk({"content": ""}, finish)]
    lines = [f"data: {json.dumps(each)}\n\n" for each in (*chunks, {**head, "choices": [], "usage": USAGE})]
    lines.append("data: [DONE]\n\n")

    async def generated() -> Any:
        for line in lines:
            yield line

    theirs = [event async for event in AnthropicServingMessages.message_stream_converter(None, generated())]  # type: ignore[arg-type]
    wanted = events_of("".join(theirs))
    raw = "".join(lines).encode()
    for size in (1, 7, len(raw)):
        stream = MessageStream()
        told = b"".join(stream.events(raw[at : at + size]) for at in range(0, len(raw), size))
        assert events_of(told.decode()) == wanted
