"""A chat's answer as a message, piece by piece: which blocks it has, why it ended, and what an error becomes.

That vLLM's own route says the same: tests/engine/unit/test_through_chat.py.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from proxy.chat.through_chat import MessageStream, chat_of, message_of

QUESTION = {"role": "user", "content": "High tide?"}


def asked(**body: Any) -> dict[str, Any]:
    made = chat_of({"model": "m", "messages": [QUESTION], **body})
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({}, {}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 0}, {"temperature": 0, "top_p": 0.5, "top_k": 0}),
        ({"temperature": None, "top_p": None}, {}),
        ({"stop_sequences": ["END"]}, {"stop": ["END"]}),
        ({"watermarking": "w", "kv_transfer_params": {"a": 1}}, {"watermarking": "w", "kv_transfer_params": {"a": 1}}),
        ({"ec_transfer_params": {"b": 1}, "vllm_xargs": {}}, {"ec_transfer_params": {"b": 1}, "vllm_xargs": {}}),
        ({"cache_salt": "s"}, {"cache_salt": "s"}),
        ({"max_tokens": 0}, {"max_tokens": 0, "max_completion_tokens": 0}),
        ({"max_tokens": 7}, {"max_tokens": 7, "max_completion_tokens": 7}),
        ({"tool_choice": {"disable_parallel_tool_use": True}}, {"parallel_tool_calls": False}),
        ({"tool_choice": {"disable_parallel_tool_use": False}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, {"thinking_token_budget": 0}),
        ({"thinking": {"type": "enabled"}}, {}),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, {}),
        ({"thinking": {"type": "disabled", "budget_tokens": 9}}, {"reasoning_effort": "none"}),
        ({"thinking": "enabled", "tool_choice": 7, "output_config": []}, {}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": {}}}},
        ),
        ({"output_config": {"format": {"type": "json_schema"}}}, {}),
        ({"output_config": {"format": "json"}}, {}),
        ({"stream": False}, {}),
        (
            {"stream": True},
            {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        ),
    ],
)
def test_a_field_of_a_request_becomes_the_chat_apis(given, made):
    assert asked(**given) == {"model": "m", "messages": [QUESTION], **made}


# Whole answers.

CALL = {"id": "c1", "type": "function", "function": {"name": "tide", "arguments": '{"at": 5}'}}

USE = {"type": "tool_use", "id": "c1", "name": "tide", "input": {"at": 5}}


def whole(said: dict[str, Any], finish: Any = "stop", stop: Any = None, usage: Any = None) -> dict[str, Any]:
    choice = {"message": said, "finish_reason": finish, "stop_reason": stop}
    answer = {"id": "chat-1", "model": "m", "choices": [choice], "usage": usage}
    made: dict[str, Any] = json.loads(message_of(json.dumps(answer).encode()))
    return made


def test_thoughts_texts_and_calls_are_blocks_in_this_order():
    thought, *blocks = whole({"content": "So.", "reasoning": "Hm.", "tool_calls": [CALL]})["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hm.")
    assert re.fullmatch("[0-9a-f]{32}", thought["signature"])
    assert blocks == [{"type": "text", "text": "So."}, USE]


ENDS = [
    ("stop", None, "end_turn", None),
    ("stop", 7, "end_turn", None),
    ("stop", "END", "stop_sequence", "END"),
    ("length", None, "max_tokens", None),
    ("length", "END", "max_tokens", None),
    ("tool_calls", None, "tool_use", None),
    ("tool_calls", "END", "stop_sequence", "END"),
    ("abort", None, None, None),
]


@pytest.mark.parametrize(("finish", "stop", "reason", "sequence"), ENDS)
def test_why_a_whole_answer_ended(finish, stop, reason, sequence):
    made = whole({"content": "x"}, finish, stop)
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(("finish", "reason"), [("stop", "tool_use"), ("length", "max_tokens"), ("abort", None)])
def test_calls_of_a_whole_answer_are_complete_whatever_string_ended_it(finish, reason):
    made = whole({"tool_calls": [CALL]}, finish, "END")
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, None)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ({"message": "No.", "type": "BadRequestError"}, {"type": "BadRequestError", "message": "No."}),
        ({}, {"type": "api_error", "message": ""}),
        ({"message": None, "type": None, "code": 7}, {"type": "api_error", "message": ""}),
    ],
)
def test_an_error_is_anthropics(error, told):
    assert json.loads(message_of(json.dumps({"error": error}).encode())) == {"type": "error", "error": told}


NO_ANSWERS = [
    b"",
    b"no JSON",
    b"[" * 100_000,
    b"7",
    b"[]",
    b"{}",
    b'{"error": "text"}',
    b'{"choices": []}',
    b'{"choices": [{}]}',
    b'{"choices": [{"message": 7}]}',
    b'{"choices": [{"message": {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}]}}]}',
    b'{"choices": [{"message": {"tool_calls": [{"id": "c"}]}}]}',
]


@pytest.mark.parametrize("answer", NO_ANSWERS, ids=lambda answer: answer[:60].decode())
def test_what_is_no_chats_answer_stays_as_it_is(answer):
    assert message_of(answer) == answer


# Streams.


def told(*chunks: Any, done: bool = True) -> list[dict[str, Any]]:
    """The events of a stream of these chunks, each JSON or raw bytes."""
    lines = [each if isinstance(each, bytes) else b"data: " + json.dumps(each).encode() for each in chunks]
    raw = b"".join(line + b"\n\n" for line in (*lines, *([b"data: [DONE]"] if done else [])))
    return shown(MessageStream().events(raw))


def shown(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for event in raw.decode().split("\n\n")[:-1]:
        kind, _, data = event.partition("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def delta(said: dict[str, Any], finish: Any = None, stop: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": said, "finish_reason": finish, "stop_reason": stop}
    return {"id": "chat-1", "model": "m", "choices": [choice], "usage": {"prompt_tokens": 9}}


LAST = {"id": "chat-1", "model": "m", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}


def call(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, **fields}]}


def opened(index: int, name: str) -> dict[str, Any]:
    return call(index, id=name, function={"name": "tide", "arguments": ""})


def blocks(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Kind and content of each block, told apart as a client does; fails for one that is not opened or not closed."""
    found: list[tuple[str, str]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(found), event
            found.append((event["content_block"]["type"], ""))
            is_open = True
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(found) - 1, event
            kind, content = found[-1]
            added = event["delta"]
            more = added.get("text", added.get("thinking", added.get("partial_json", "")))
            found[-1] = (kind, content + more)
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(found) - 1, event
            is_open = False
        assert event["type"] != "error", event
    assert not is_open
    return found


def test_a_thought_is_signed_when_it_ends():
    events = told(delta({"reasoning": "H"}), delta({"reasoning": "m."}), delta({"content": "Nine."}), LAST)
    assert blocks(events) == [("thinking", "Hm."), ("text", "Nine.")]
    signed = [event["delta"]["signature"] for event in events if "signature" in event.get("delta", {})]
    assert len(signed) == 1 and re.fullmatch("[0-9a-f]{32}", signed[0])
    opening = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert opening == [{"type": "thinking", "thinking": ""}, {"type": "text", "text": ""}]


def test_a_call_that_names_itself_again_goes_on():
    events = told(
        delta(call(0, id="c1", function={"name": "tide", "arguments": "{"})),
        delta(call(0, id="c1", function={"name": "tide", "arguments": "}"})),
        LAST,
    )
    assert blocks(events) == [("tool_use", "{}")]


def test_a_call_is_not_open_before_it_has_a_name_and_an_id():
    events = told(
        delta(call(0, function={"arguments": "early"})),
        delta(call(0, id="c1")),
        delta(call(0, id="c1", function={"arguments": "still early"})),
        delta(call(0, id="c1", function={"name": "tide", "arguments": "{}"})),
        LAST,
    )
    assert blocks(events) == [("tool_use", "{}")]


def test_text_within_a_call_comes_behind_it():
    events = told(
        delta(opened(0, "c1")),
        delta({"content": "an"}),
        delta({"content": "d"}),
        delta(call(0, function={"arguments": "{}"})),
        delta(opened(1, "c2")),
        delta({"content": " then"}),
        LAST,
    )
    assert blocks(events) == [("tool_use", "{}"), ("text", "and"), ("tool_use", ""), ("text", " then")]
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]


def test_a_thought_behind_a_call_ends_it():
    events = told(
        delta(opened(0, "c1")),
        delta({"reasoning": "Hm."}),
        delta(call(0, function={"arguments": "late"})),
        LAST,
    )
    assert blocks(events) == [("tool_use", ""), ("thinking", "Hm.")]


def test_a_call_is_judged_by_its_own_arguments():
    chunks = [delta(opened(0, "c1")), delta(call(0, function={"arguments": '{"at'}))]
    chunks += [delta(opened(1, "c2")), delta(call(1, function={"arguments": "{}"})), delta({}, "stop", "END")]
    (ended,) = (event["delta"] for event in told(*chunks, LAST) if event["type"] == "message_delta")
    assert ended["stop_reason"] == "tool_use"


def test_a_stream_without_a_chunk_or_after_an_error_has_no_end():
    assert told() == []
    for broken in (b'data: {"error": {"message": "No.", "type": "t"}}', b"data: {"):
        kinds = [event["type"] for event in told(delta({"content": "x"}), broken)]
        assert kinds == ["message_start", "content_block_start", "content_block_delta", "error"], broken
    assert [event["type"] for event in told(delta({}), LAST, b"data: [DONE]")].count("message_stop") == 1


def test_an_error_within_a_stream_is_told_as_it_came():
    (event,) = told(b'data: {"error": {"message": "No.", "type": "t"}}')
    assert event == {"type": "error", "error": {"type": "t", "message": "No."}}


@pytest.mark.parametrize(
    "line",
    [
        *(b"data: {", b"data: 7", b"data: []", b"data: {}", b'data: {"choices": 7}', b'data: {"choices": [{}]}'),
        b"data: " + b"[" * 100_000,
        b'data: {"choices": [{"delta": 7}]}',
    ],
    ids=lambda line: line[:40].decode(),
)
def test_a_line_that_is_no_chunk_is_an_error_of_the_workers(line):
    last = told(line)[-1]
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
