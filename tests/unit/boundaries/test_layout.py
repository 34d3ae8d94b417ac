"""The keys of a chat's beginnings: equal for equal beginnings however these are written, and for no others."""

from __future__ import annotations

from typing import Any

import pytest
from xxhash import xxh3_128_digest

from proxy.boundaries.layout import PromptLayout, layout_of
from proxy.chat.chat import MESSAGES, RESPONSES, Mark
from proxy.chat.reader import chat_in, chat_request
from proxy.chat.responses import StoredResponses

SYSTEM = {"role": "system", "content": "You pilot ships into the harbour."}

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]


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
    "written",
    [
        [{"content": SYSTEM["content"], "role": "system"}, *CHAT[1:]],
        [SYSTEM, user([{"type": "text", "text": "First?"}]), *CHAT[2:]],
        [SYSTEM, user("First?", name=None, cache_control={"type": "ephemeral"}), *CHAT[2:]],
        [*CHAT[:3], user("Another?")],
        [*CHAT[:3], user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], name="anna")],
    ],
)
def test_equal_beginnings_have_one_key_however_they_are_written(written):
    one, other = layout(CHAT), layout(written)
    assert (one.system_key, one.key, one.opener_key(1)) == (other.system_key, other.key, other.opener_key(1))
    assert one.keys.after[:3] == other.keys.after[:3]


@pytest.mark.parametrize(
    "change",
    [
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"cache_salt": "x"},
        {"reasoning_effort": "high"},
        {"model": "other"},
        {"renderer_id": b"another template"},
        {"messages": [{**SYSTEM, "content": "You."}, *CHAT[1:]]},
    ],
)
def test_whatever_can_move_a_position_makes_another_key(change):
    one, other = layout(CHAT), layout(**{"messages": CHAT, **change})
    assert not {one.system_key, one.key, *one.keys.after} & {other.system_key, other.key, *other.keys.after}


def test_keys_do_not_depend_on_sampling_or_on_what_comes_later():
    one, other = layout(CHAT, temperature=1), layout([*CHAT, assistant("Two."), user("Third?")], seed=5, stream=True)
    assert one.system_key == other.system_key and one.turn_key == other.keys.after[3]
    assert one.key == other.opener_key(3) != other.key


def test_the_places_of_a_chat_have_keys_of_their_own():
    found = layout(CHAT)
    assert len({*found.keys.before, *found.keys.after, *map(found.opener_key, range(4))}) == 12
    assert found.opener_key(1) == found.system_key and found.opener_key(3) == found.key
    assert layout([*CHAT[:3], {"role": "tool", "content": "x"}]).key != found.key  # another opener stands there


def test_the_same_chat_at_every_endpoint_has_the_same_keys():
    stored = StoredResponses(10**6)
    turns = CHAT[1:]
    bodies = {
        MESSAGES: {"model": "m", "system": SYSTEM["content"], "messages": turns, "max_tokens": 5},
        RESPONSES: {"model": "m", "instructions": SYSTEM["content"], "input": turns},
    }
    for endpoint, body in bodies.items():
        found = layout_of(chat_in(endpoint, body, stored), b"renderer")
        assert found is not None
        assert (found.system_key, found.key) == (layout(CHAT, model="m").system_key, layout(CHAT, model="m").key)


def test_the_key_of_a_marked_part_is_that_of_what_stands_before_its_end():
    def part_key(*parts: str, **message: Any) -> bytes:
        content = [{"type": "text", "text": text} for text in parts]
        return layout([SYSTEM, {"role": "user", "content": content, **message}]).part_key(Mark(1, 0))

    one = part_key("a", "b")
    assert one == part_key("a", "c") == part_key("a", "b", name=None, cache_control={"type": "ephemeral"})
    assert one != part_key("b", "b") and one != part_key("a", "b", name="anna")
    reordered = [SYSTEM, {"content": [{"type": "text", "text": "a"}], "role": "user"}]
    assert layout(reordered).part_key(Mark(1, 0)) == one
    beside = part_key("a", "b", name="anna", id="7")
    assert part_key("a", "b", id="7", name="anna") == beside


def test_the_key_of_a_beginning_of_a_text_depends_on_the_message_it_is_in():
    found = layout(CHAT)
    head = xxh3_128_digest(b"Fir")
    assert len({found.cut_key(1, head), found.cut_key(3, head), found.cut_key(1, xxh3_128_digest(b"Fi"))}) == 3
    assert found.cut_key(1, head) == layout([SYSTEM, user("First, please?")]).cut_key(1, head)


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


def test_a_chat_that_nobody_else_could_go_on_with_has_no_layout():
    for messages in ([SYSTEM], [assistant("only me")], [7], [{}]):
        assert layout_of(chat_request({"messages": messages}), b"renderer") is None


def test_the_first_and_the_last_message_that_others_may_differ_in():
    found = layout([*CHAT, {"role": "developer", "content": "Be brief."}])
    assert (found.first, found.last, found.alone) == (1, 3, False)
    assert layout(CHAT[:2]).alone and layout(CHAT[:2]).system_key == layout(CHAT[:2]).key


def test_a_turn_ends_with_the_chat_if_an_answer_is_asked_for():
    turn = layout(CHAT).keys.after[-1]
    for body in ({}, {"add_generation_prompt": True}, {"continue_final_message": False}):
        assert layout(CHAT, **body).turn_key == turn
    for body in ({"add_generation_prompt": False}, {"add_generation_prompt": None}, {"continue_final_message": True}):
        assert layout(CHAT, **body).turn_key is None
    assert layout(CHAT, add_generation_prompt=False, continue_final_message=True).turn_key is None
    assert layout([*CHAT, assistant("Two.")]).turn_key is None
    assert layout([*CHAT, assistant("Two.")], add_generation_prompt=True).turn_key is None


def test_a_tools_result_right_behind_the_question_is_a_loop_too():
    assert layout([user("Tide?"), {"role": "tool", "content": "nine"}]).end_before_loop == 0
    assert layout([{"role": "function", "content": "nine"}, {"role": "tool", "content": "x"}]).end_before_loop is None


def test_the_key_of_a_later_part_depends_on_all_parts_up_to_it():
    def key(part: int, *texts: str) -> bytes:
        return layout([user([{"type": "text", "text": text} for text in texts])]).part_key(Mark(0, part))

    assert len({key(0, "a", "b"), key(1, "a", "b"), key(1, "a", "c"), key(1, "x", "b")}) == 4
    assert key(1, "a", "b", "c") == key(1, "a", "b", "d")


def test_where_a_chat_begins_without_a_system_prompt_its_head_is_what_stands_beside_it():
    found = layout([user("Tide?")], tools=TOOLS)
    assert (found.first, found.last, found.alone) == (0, 0, True)
    assert found.opener_key(0) == found.system_key == found.key != layout([user("Tide?")]).key
