"""Requests to /v1/messages and /v1/responses as chats: the client's marks, stored responses and nonsense.

What vLLM itself makes of such requests: tests/engine/unit/test_conversions.py.
"""

from __future__ import annotations

import pytest

from proxy.boundaries.layout import layout_of
from proxy.chat.anthropic import messages_request
from proxy.chat.chat import TOOLS, Mark
from proxy.chat.reader import chat_request
from proxy.chat.responses import StoredResponses, responses_request

EPHEMERAL = {"type": "ephemeral"}

USE = {"type": "tool_use", "id": "t1", "name": "tide", "input": {"port": "Ayr"}}

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "nine"}]}

TOOL = {"name": "tide", "description": "Tide table", "input_schema": {"properties": {"port": {"type": "string"}}}}


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


REMINDER = {"role": "system", "content": "The list of tasks has not been used for a while."}

# As coding agents send it: a reminder before the user's own words in one message, another one as a system message
# behind it, and one in the middle of a loop.
AGENT_TURN = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<reminder>\nToday's date is 2026-11-22.\n</reminder>\n"},
            {"type": "text", "text": "Fix the rounding."},
        ],
    },
    {"role": "system", "content": "Helpers: one that searches, one that plans."},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "Look.", "signature": "s"}, USE]},
    {"role": "user", "content": [RESULT]},
    REMINDER,
]


def test_reminders_stay_where_they_were_said():
    chat = messages_request({"model": "m", "system": "You pilot.", "messages": AGENT_TURN})
    assert chat.roles == ("system", "user", "system", "assistant", "tool", "system")
    assert chat.texts[2] == AGENT_TURN[1]["content"] and chat.texts[5] == REMINDER["content"]
    said = [{"type": "text", "text": "x-anthropic-billing-header: a=1;"}, {"type": "text", "text": "Go "}]
    said = [*AGENT_TURN, {"role": "system", "content": [*said, {"type": "text", "text": "on."}]}]
    assert messages_request({"messages": [*said, {"role": "system", "content": ""}]}).texts[-1] == "Go on."


def test_a_turn_begins_with_the_turn_before_it_and_its_reminders():
    """What was said as a list of one text comes back as a text: it is the same message."""
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}
    asked = {"role": "user", "content": [{"type": "text", "text": "And now the other one."}]}
    again = {"role": "user", "content": "And now the other one."}
    turns = [AGENT_TURN, [*AGENT_TURN, answer, asked], [*AGENT_TURN, answer, again, {**REMINDER}]]
    chats = [messages_request({"model": "m", "system": "You pilot.", "messages": turn}) for turn in turns]
    first, second, third = (layout_of(chat, b"r").keys.after for chat in chats)
    assert second[: len(first)] == first and third[: len(second)] == second
    assert len({*first, *second, *third}) == len(third)


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


def test_what_a_tool_without_a_schema_was_told_is_written_as_vllm_writes_it():
    call = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'Café "Süd"'}
    (said,) = responses_request({"model": "m", "input": [call]}).messages
    assert said["tool_calls"][0]["function"]["arguments"] == '{"input": "Café \\"Süd\\""}'


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
