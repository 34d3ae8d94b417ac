"""The keys of a chat's beginnings: equal for equal beginnings however these are written, and for no others."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.boundaries.layout import PromptLayout, layout_of
from proxy.chat.reader import chat_request

SYSTEM = {"role": "system", "content": "You pilot ships into the harbour."}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def layout(messages: Any, renderer_id: bytes = b"renderer", **body: Any) -> PromptLayout:
    found = layout_of(chat_request({"messages": messages, **body}), renderer_id)
    assert found is not None
    return found


CHAT = [SYSTEM, user("First?"), assistant("One."), user("Second?")]


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        (CHAT, None),
        ([SYSTEM, user("Tide?"), assistant("I will look."), {"role": "tool", "content": "nine"}], 1),
        ([user("Tide?"), {"role": "system", "content": "Be brief."}, {"role": "tool", "content": "nine"}], 1),
        ([user("Tide?"), assistant("."), {"role": "system", "content": "."}, {"role": "tool", "content": "nine"}], 0),
        (
            [*CHAT, assistant("."), {"role": "tool", "content": "a"}, assistant("."), {"role": "tool", "content": "b"}],
            3,
        ),
        ([SYSTEM, {"role": "tool", "content": "nine"}], None),
    ],
)
def test_before_a_tool_loop_the_user_message_ends_with_its_reminders(messages, end):
    assert layout(messages).end_before_loop == end


def test_a_tools_result_right_behind_the_question_is_a_loop_too():
    assert layout([user("Tide?"), {"role": "tool", "content": "nine"}]).end_before_loop == 0
    assert layout([{"role": "function", "content": "nine"}, {"role": "tool", "content": "x"}]).end_before_loop is None
