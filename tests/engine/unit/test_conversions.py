"""What stands in for /v1/messages and /v1/responses makes the chats and answers of vLLM: judged by its own code."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, should_continue_final_message

from proxy.chat.canonical import chat_keys
from proxy.chat.responses import responses_request
from proxy.chat.through_chat import MessageStream, chat_of, message_of

QUESTION = {"role": "user", "content": "Tide?"}

TEXTS = st.sampled_from(["", "a", "Café\n", "{}", "x-anthropic-billing-header: cch=1;"])

FLAGS = st.sampled_from([True, False, "true", "false", 1, 0, "off", None])

URL = {"type": "url", "url": "http://x"}

SOURCES = st.sampled_from([{"type": "base64", "media_type": "image/png", "data": "AA"}, URL, {"type": "url"}, {}])

INPUTS = st.sampled_from([{}, {"port": "Ayr"}, {"é": [1, None, {"a": 0.5}]}])


def drawn(each: dict[str, Any]) -> dict[str, st.SearchStrategy[Any]]:
    return {k: v if isinstance(v, st.SearchStrategy) else st.just(v) for k, v in each.items()}


def some(has: dict[str, Any], **optional: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with all of `has`, and some of the others: values, or strategies for them."""
    return st.fixed_dictionaries(drawn(has), optional=drawn(optional))


def contents(blocks: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return TEXTS | st.lists(blocks, max_size=4)


REFERENCES = some({"type": "tool_reference"}, tool_name=TEXTS, name=TEXTS)

ITEMS = some({"type": st.sampled_from(["text", "document"]), "text": TEXTS}) | some({"type": "image"}, source=SOURCES)

BLOCKS = (
    some({"type": "text"}, text=TEXTS, cache_control={"type": "ephemeral"})
    | some({"type": "image"}, source=SOURCES)
    | some({"type": "tool_use"}, id=TEXTS, name=TEXTS, input=INPUTS)
    | some({"type": "tool_result"}, tool_use_id=TEXTS, content=contents(ITEMS | REFERENCES), is_error=FLAGS)
    | some({"type": st.sampled_from(["thinking", "redacted_thinking"])}, thinking=TEXTS, signature=TEXTS)
    | REFERENCES
)

NAMES = st.sampled_from("fg")

SCHEMAS = st.sampled_from([{}, {"type": "object"}, {"properties": {"port": {"type": "string"}}}])

TOOLS = some({"name": NAMES, "input_schema": SCHEMAS}, description=TEXTS, strict=FLAGS, defer_loading=FLAGS)

NAMED = some({"type": "tool_reference", "name": NAMES})

DEFINED = some({"type": "tool_addition", "tool": some({"type": "tool_definition", "definition": TOOLS})})

CHANGES = DEFINED | some({"type": st.sampled_from(["tool_addition", "tool_removal"]), "tool": NAMED})

SAID = some({"role": st.sampled_from(["user", "assistant"]), "content": contents(BLOCKS)})

TURNS = SAID | some({"role": "system", "content": contents(BLOCKS | CHANGES)})

CHOICES = some(
    {"type": st.sampled_from(["auto", "any", "tool", "none"]), "name": NAMES}, disable_parallel_tool_use=FLAGS
)

THINKING = st.sampled_from([{"type": "disabled"}, {"type": "adaptive"}, {"type": "enabled", "budget_tokens": 2048}])

REQUESTS = some(
    {"model": "m", "max_tokens": 4096, "messages": st.lists(TURNS, min_size=1, max_size=5)},
    **{"system": contents(BLOCKS), "stream": FLAGS, "temperature": "0.5", "top_p": 0.5, "top_k": 3, "cache_salt": "s"},
    **{"tools": st.lists(TOOLS, max_size=3), "tool_choice": CHOICES, "thinking": THINKING, "watermarking": FLAGS},
    **{
        "stop_sequences": ["\n"],
        "chat_template_kwargs": {"a": False},
        "vllm_xargs": {"seamark_boundaries": [16, "l:7"]},
    },
    output_config=some({}, effort=st.sampled_from(["low", None]), format=some({"type": "json_schema"}, schema=SCHEMAS)),
)


def fields_of(request: ChatCompletionRequest) -> dict[str, Any]:
    """Those that mean something: a default counts as one that is not there, and no call has an id of the clock."""
    defaults = {"stop": [], "parallel_tool_calls": True, "tools": []}
    found = json.loads(request.model_dump_json(exclude_none=True, exclude={"request_id"}))
    if not found.get("tools"):
        found.pop("tool_choice", None)
    for call in (call for message in found["messages"] for call in message.get("tool_calls") or ()):
        call["id"] = re.sub(r"^call_\d+$", "", call["id"])
    return {name: value for name, value in found.items() if defaults.get(name, ...) != value}


@given(body=REQUESTS, merges=st.booleans())
@settings(max_examples=300)
def test_a_request_to_messages_is_the_chat_that_vllm_makes_of_it(body, merges):
    """Whatever it takes. A tool that is referred to or chosen and not there is left to the chat API, or ignored."""
    try:
        request = AnthropicMessagesRequest(**json.loads(json.dumps(body)))
        wanted = AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=merges)
    except ValueError:
        reject()
    tools = [tool.function.name for tool in wanted.tools or ()]
    choice = body.get("tool_choice", {})
    assume(wanted.messages and (not tools or choice.get("type") != "tool" or choice["name"] in tools))
    assert fields_of(ChatCompletionRequest.model_validate(chat_of(body, merges=merges))) == fields_of(wanted)


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


USAGE = {
    "prompt_tokens": 300,
    "completion_tokens": 5,
    "total_tokens": 305,
    "prompt_tokens_details": {"cached_tokens": 160, "created_cache_tokens": 16},
}

FUNCTIONS = some({"name": "tide", "arguments": INPUTS.map(json.dumps)})

CALLS = some({"id": TEXTS, "type": "function", "function": FUNCTIONS})

ANSWERS = some({}, content=TEXTS, reasoning=TEXTS, tool_calls=st.lists(CALLS, max_size=2))

ENDS = st.tuples(st.sampled_from(["stop", "length", "tool_calls"]), st.sampled_from([None, 7, "END"]))

DETAILS = st.sampled_from([None, {}, {"cached_tokens": 160, "created_cache_tokens": 16}, {"cached_tokens": 301}])


def without_signatures(value: Any) -> Any:
    """vLLM signs thoughts with random letters."""
    if isinstance(value, dict):
        return {name: "" if name == "signature" else without_signatures(each) for name, each in value.items()}
    return [without_signatures(each) for each in value] if isinstance(value, list) else value


@given(said=ANSWERS, ends=ENDS, details=DETAILS)
def test_an_answer_is_the_same_message(said, ends, details):
    finish, stop = ends
    usage = {**USAGE, "prompt_tokens_details": details}
    choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": finish, "stop_reason": stop}
    chat = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    answer = ChatCompletionResponse.model_validate({**chat, "usage": usage})
    theirs = AnthropicServingMessages.messages_full_converter(None, answer)  # type: ignore[arg-type]
    wanted = json.loads(theirs.model_dump_json(exclude_none=True))
    found = json.loads(message_of(answer.model_dump_json().encode()))
    assert {name: value for name, value in without_signatures(found).items() if value is not None} == (
        without_signatures(wanted)
    )


GIVEN = st.sampled_from(["", '{"at"', ": 5}", "{}"])

BEGUN = some(
    {"index": st.integers(0, 1), "id": st.sampled_from(["c1", "c2"])}, function=some({"name": "tide"}, arguments=GIVEN)
)

PARTS = BEGUN | some({"index": st.integers(0, 1), "function": some({"arguments": GIVEN})})

DELTAS = some({"reasoning": TEXTS}) | some({"content": TEXTS}) | some({"tool_calls": st.lists(PARTS, max_size=2)})


def events_of(text: str) -> list[Any]:
    named = [event.partition("\ndata: ") for event in text.split("\n\n") if event]
    assert all(json.loads(data)["type"] == name.removeprefix("event: ") for name, _, data in named)
    return [without_signatures(json.loads(data)) for _, _, data in named]


@given(deltas=st.lists(DELTAS, max_size=8), ends=ENDS)
def test_a_stream_is_the_same_events_however_it_arrives(deltas, ends):
    finish, stop = ends
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    early = {**USAGE, "completion_tokens": 0, "prompt_tokens_details": None}

    def chunk(delta: dict[str, Any], end: Any = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": end, "stop_reason": stop if end else None}
        return {**head, "choices": [choice], "usage": early}

    chunks = [chunk({"role": "assistant", "content": ""}), *map(chunk, deltas), chunk({"content": ""}, finish)]
    lines = [f"data: {json.dumps(each)}\n\n" for each in (*chunks, {**head, "choices": [], "usage": USAGE})]
    lines.append("data: [DONE]\n\n")

    async def converted() -> list[str]:
        async def generated() -> Any:
            for line in lines:
                yield line

        return [event async for event in AnthropicServingMessages.message_stream_converter(None, generated())]  # type: ignore[arg-type]

    wanted = events_of("".join(asyncio.run(converted())))
    raw = "".join(lines).encode()
    for size in (1, 7, len(raw)):
        stream = MessageStream()
        told = b"".join(stream.events(raw[at : at + size]) for at in range(0, len(raw), size))
        assert events_of(told.decode()) == wanted
