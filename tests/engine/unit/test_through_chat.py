"""What stands in for /v1/messages turns answers as vLLM's own route does; requests: test_conversions.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionResponse

from proxy.chat.through_chat import MessageStream, message_of

USAGE = {
    "prompt_tokens": 300,
    "completion_tokens": 5,
    "total_tokens": 305,
    "prompt_tokens_details": {"cached_tokens": 160, "created_cache_tokens": 16},
}

CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": 5}'}}

ANSWERS = {
    "text": ({"content": "At nine."}, "stop", None),
    "nothing": ({"content": ""}, "stop", None),
    "cut": ({"content": "At"}, "length", None),
    "a stop string": ({"content": "At"}, "stop", "\n"),
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
    "text": [{"content": "At "}, {"content": "nine."}],
    "nothing": [],
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
