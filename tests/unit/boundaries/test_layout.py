"""The keys of a chat's beginnings: equal for equal beginnings however these are written, and for no others."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.boundaries.layout import PromptLayout, layout_of
from proxy.chat.chat import Mark
from proxy.chat.reader import chat_request
from tests.harness.messages import assistant, user

SYSTEM = {"role": "system", "content": "You pilot ships into the harbour."}


def layout(messages: Any, renderer_id: bytes = b"renderer", **body: Any) -> PromptLayout:
    found = layout_of(chat_request({"messages": messages, **body}), renderer_id)
    assert found is not None
    return found


CHAT = [SYSTEM, user("First?"), assistant("One."), user("Second?")]


TOOLS = [{"type": "function", "function": {"name": "tide"}}]


@pytest.mark.parametrize(
    "written",
    [
        [{"content": SYSTEM["content"], "role": "system"}, *CHAT[1:]],
        [SYSTEM, user([{"type": "text", "text": "First?"}]), *CHAT[2:]],
        [SYSTEM, user("First?", name=None, cache_control={"type": "ephemeral"}), *CHAT[2:]],
        [*CHAT[:3], user("Another?")],
    ],
)
def test_equal_beginnings_have_one_key_however_they_are_written_and_whatever_comes_later(written):
    one, other = layout(CHAT, temperature=1), layout([*written, assistant("Two."), user("Third?")], seed=5, stream=True)
    assert (one.system_key, one.opener_key(1)) == (other.system_key, other.opener_key(1))
    assert one.keys.after[:3] == other.keys.after[:3] and one.key == other.opener_key(3) != other.key


@pytest.mark.parametrize(
    "change",
    [
        *({"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}, {"cache_salt": "x"}),
        *({"reasoning_effort": "high"}, {"model": "other"}, {"renderer_id": b"another template"}),
        {"messages": [{**SYSTEM, "content": "You."}, *CHAT[1:]]},
    ],
)
def test_whatever_can_move_a_position_makes_another_key(change):
    one, other = layout(CHAT), layout(**{"messages": CHAT, **change})
    assert not {one.system_key, one.key, *one.keys.after} & {other.system_key, other.key, *other.keys.after}


def test_the_key_of_a_part_depends_on_all_parts_up_to_it_and_on_its_message():
    def key(part: int, *texts: str, **message: Any) -> bytes:
        return layout([user([{"type": "text", "text": text} for text in texts], **message)]).part_key(Mark(0, part))

    assert len({key(0, "a", "b"), key(1, "a", "b"), key(1, "a", "c"), key(1, "x", "b"), key(0, "a", name="anna")}) == 5
    assert key(1, "a", "b", "c") == key(1, "a", "b", "d") == key(1, "a", "b", cache_control={"type": "ephemeral"})


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
        ([user("Tide?"), {"role": "tool", "content": "nine"}], 0),
        ([{"role": "function", "content": "nine"}, {"role": "tool", "content": "x"}], None),
    ],
)
def test_before_a_tool_loop_the_user_message_ends_with_its_reminders(messages, end):
    assert layout(messages).end_before_loop == end
