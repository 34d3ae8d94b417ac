"""A request of any API as one chat: its salt, its marks, its texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.boundaries.layout import layout_of
from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOOLS, Chat, Mark, text_of
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}

ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "Tide?"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "Tide?"}]},
    RESPONSES: {"input": "Tide?"},
    COMPLETIONS: {"prompt": "Tide?"},
}


def chat(endpoint: str, **body) -> Chat:
    found = chat_in(endpoint, {"model": "m", **body}, StoredResponses(10**6))
    assert found is not None
    return found


def key(asked: Chat) -> bytes:
    layout = layout_of(asked, b"renderer")
    assert layout is not None
    return layout.keys.after[-1]


@pytest.mark.parametrize("endpoint", ASKED)
def test_one_prompt_under_two_salts_has_two_keys_at_every_endpoint(endpoint):
    asked = [chat(endpoint, **ASKED[endpoint], **salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})]
    assert len({key(each) for each in asked}) == 3
    assert [each.body.get("cache_salt") for each in asked] == [None, "a", "b"]


def test_a_continued_response_keeps_the_salt_of_the_request():
    stored = StoredResponses(10**6)
    first = chat(RESPONSES, **ASKED[RESPONSES], cache_salt="a")
    stored.put(first, {"id": "resp_1", "output": []}, "boot")
    for salt in ("a", "b"):
        body = {"model": "m", "input": "And now?", "previous_response_id": "resp_1", "cache_salt": salt}
        continued = chat_in(RESPONSES, body, stored)
        assert continued is not None and continued.body["cache_salt"] == salt


TOOL = {"name": "tide", "input_schema": {"type": "object"}}

OTHER_TOOL = {"name": "wind", "input_schema": {"type": "object"}}


def marks(**body) -> tuple[Mark, ...]:
    return chat(MESSAGES, **{**ASKED[MESSAGES], **body}).marks


def test_a_mark_on_the_last_of_two_tools_is_the_end_of_the_tools():
    assert marks(tools=[TOOL, {**OTHER_TOOL, **EPHEMERAL}]) == (Mark(TOOLS),)


def test_without_a_marked_tool_no_tools_are_marked():
    assert marks() == marks(tools=[]) == marks(tools=[TOOL, OTHER_TOOL]) == ()


def test_a_mark_on_the_last_block_of_the_system_prompt_is_its_end():
    blocks = [{"type": "text", "text": "You pilot."}, {"type": "text", "text": "Be brief.", **EPHEMERAL}]
    assert marks(system=blocks) == (Mark(0),)


def test_a_mark_on_an_earlier_block_is_a_place_in_the_joined_system_prompt():
    blocks = [{"type": "text", "text": "You pilot.", **EPHEMERAL}, {"type": "text", "text": "Be brief."}]
    assert marks(system=blocks) == (Mark(0, characters=len("You pilot.")),)


def test_marks_inside_and_at_the_end_of_a_message_and_on_a_tool_result():
    parts = [{"type": "text", "text": "a", **EPHEMERAL}, {"type": "text", "text": "b", **EPHEMERAL}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "nine", **EPHEMERAL}
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": [result]}]
    assert marks(messages=messages) == (Mark(0, 0), Mark(0), Mark(1))


def test_a_chat_is_marked_on_its_tools_parts_and_messages():
    tools = [{"type": "function", "function": {"name": "tide"}}]
    parts = [{"type": "text", "text": "a", **EPHEMERAL}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "You.", **EPHEMERAL}, {"role": "user", "content": parts}]
    assert chat(CHAT, messages=messages, tools=[*tools, {**tools[0], **EPHEMERAL}]).marks == (
        Mark(TOOLS),
        Mark(0),
        Mark(1, 0),
    )
    assert chat(CHAT, messages=messages, tools=tools).marks == (Mark(0), Mark(1, 0))


def test_roles_texts_and_media_stand_beside_the_messages():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    parts = [{"type": "text", "text": "Look:"}, image, {"type": "text", "text": "what?"}, {"type": "text", "text": 7}]
    messages = [{"role": "system", "content": "You."}, 7, {"role": "user", "content": parts}, {"role": "assistant"}]
    asked = chat(CHAT, messages=messages)
    assert asked.roles == ("system", None, "user", "assistant")
    assert asked.texts == ("You.", None, "what?", None)
    assert asked.media == ((2, image), (2, parts[3]))


def test_a_chat_of_text_parts_alone_holds_no_media():
    assert chat(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": "Tide?"}]}]).media == ()


def test_a_message_of_an_assistant_may_hold_a_tool_call_and_nothing_else():
    block = {"type": "tool_use", "id": "c", "name": "tide", "input": {"port": "Ayr"}}
    messages = [
        *ASKED[MESSAGES]["messages"],
        {"role": "assistant", "content": [block, 7, {"type": "text", "text": ""}]},
    ]
    asked = chat(MESSAGES, messages=messages)
    assert asked.texts == ("Tide?", None)
    assert asked.messages[1]["tool_calls"][0]["function"] == {"name": "tide", "arguments": '{"port": "Ayr"}'}


@pytest.mark.parametrize(("space", "name"), [("harbour", "harbour__tide"), ("", "tide"), (None, "tide"), (7, "tide")])
def test_tools_of_a_namespace_are_named_after_it(space, name):
    tools = [{"type": "namespace", "name": space, "tools": [{"type": "function", "name": "tide"}]}]
    assert chat(RESPONSES, **ASKED[RESPONSES], tools=tools).body["tools"][0]["function"]["name"] == name


def test_only_a_completion_is_bare_of_messages():
    assert {endpoint: chat(endpoint, **ASKED[endpoint]).is_bare for endpoint in ASKED} == {
        CHAT: False,
        MESSAGES: False,
        RESPONSES: False,
        COMPLETIONS: True,
    }


def test_a_mark_on_a_tool_result_is_none_on_the_text_before_it():
    result = {"type": "tool_result", "tool_use_id": "c", "content": "nine", **EPHEMERAL}
    text = {"type": "text", "text": "Here:"}
    assert marks(messages=[{"role": "user", "content": [text, result]}]) == (Mark(0),)


def test_a_response_that_an_assistant_began_is_continued():
    begun = {"type": "message", "role": "assistant", "status": "incomplete", "content": "The tide"}
    asked = [{"role": "user", "content": "Tide?"}, begun]
    settings = ("add_generation_prompt", "continue_final_message")
    body = chat(RESPONSES, input=asked).body
    assert [body.get(name) for name in settings] == [False, True]
    body = chat(RESPONSES, input=[*asked, {"role": "user", "content": "And now?"}]).body
    assert [body.get(name) for name in settings] == [None, None]


@pytest.mark.parametrize("status", ["in_progress", "incomplete", "completed", None])
@pytest.mark.parametrize("kind", ["message", "reasoning", "function_call", "function_call_output"])
def test_only_what_an_assistant_began_to_say_or_think_is_continued(kind, status):
    item = {"type": kind, "role": "assistant", "content": "x", "call_id": "c", "name": "f", "output": "x"}
    item |= {"status": status, "content": [{"type": "text", "text": "The tide"}]}
    body = chat(RESPONSES, input=[{"role": "user", "content": "Tide?"}, item]).body
    is_continued = kind in ("message", "reasoning") and status in ("in_progress", "incomplete")
    assert (body.get("continue_final_message") is True) == is_continued
    assert (body.get("add_generation_prompt") is False) == is_continued


def test_each_reasoning_of_a_response_is_its_first_text():
    thoughts = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": text} for text in texts]}
        for texts in (("first", "more"), ("second",), ())
    ]
    asked = chat(RESPONSES, input=[{"role": "user", "content": "Tide?"}, *thoughts])
    assert [message.get("reasoning") for message in asked.messages] == [None, "first", "second", ""]


def test_token_ids_are_characters_up_to_the_last_there_is():
    ids = [5, 0x10FFFF]
    assert chat(COMPLETIONS, prompt=ids).texts == ("".join(map(chr, ids)),)
    beyond = {"model": "m", "prompt": [5, 0x110000]}
    assert chat_in(COMPLETIONS, beyond, StoredResponses(10**6)) is None


def test_all_results_in_one_message_are_answers_to_their_calls():
    results = [{"type": "tool_result", "tool_use_id": name, "content": f"at {name}"} for name in ("a", "b")]
    asked = chat(MESSAGES, messages=[{"role": "user", "content": [*results, {"type": "text", "text": "So?"}]}])
    assert [(message["role"], message.get("tool_call_id"), message["content"]) for message in asked.messages] == [
        ("tool", "a", "at a"),
        ("tool", "b", "at b"),
        ("user", None, "So?"),
    ]


@pytest.mark.parametrize(("effort", "thinks"), [("high", True), ("none", False)])
def test_the_effort_of_a_response_reaches_the_template(effort, thinks):
    body = chat(RESPONSES, **ASKED[RESPONSES], reasoning={"effort": effort}).body
    assert (body["reasoning_effort"], body["chat_template_kwargs"]) == (effort, {"enable_thinking": thinks})


def test_tools_that_a_result_names_answer_the_same_call():
    found = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "tool_reference", "tool_name": "tide"}]}
    asked = chat(MESSAGES, messages=[{"role": "user", "content": [found]}])
    assert [message["tool_call_id"] for message in asked.messages] == ["a", "a"]


# A prompt without messages.


def completion(prompt, **body) -> Chat | None:
    return chat_in(COMPLETIONS, {"prompt": prompt, **body}, StoredResponses(10**6))


@pytest.mark.parametrize("prompt", [None, "", [], [""], ["a", "b"], [[1], [2]], [True], [-1], [1.0], ["a", 1], [[]], 7])
def test_what_is_not_one_prompt_is_no_chat(prompt):
    assert completion(prompt) is None


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [("x", "x", None), (["x"], "x", None), ([0], "\0", [0]), ([65, 66], "AB", [65, 66]), ([[65]], "A", [65])],
)
def test_a_prompt_of_text_or_ids_is_one_user_message(prompt, text, ids):
    body = {"model": "m", "cache_salt": "s", "temperature": 1}
    found = completion(prompt, **body)
    assert found is not None and found.messages == [{"role": "user", "content": text}]
    assert (found.ids, found.marks, found.path) == (ids, (), COMPLETIONS)
    assert found.body == {"model": "m", "cache_salt": "s", "add_generation_prompt": False}
    assert found.asked == {"prompt": prompt, **body}


# A chat.


@pytest.mark.parametrize("messages", [None, [], {}, "text", 7])
def test_without_messages_there_is_no_chat(messages):
    for endpoint in (CHAT, MESSAGES):
        assert chat_in(endpoint, {"messages": messages}, StoredResponses(0)) is None
    for given in (None, [], {}, 7):
        assert chat_in(RESPONSES, {"input": given, "instructions": "You."}, StoredResponses(0)) is None


def test_marks_are_found_behind_what_is_no_message_and_in_every_spelling():
    point = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [7, {"type": "text", "text": "a", **point}, {"type": "text", "text": "b", "cache_control": None}]
    messages = [7, {"role": "user", "content": parts}, {"role": "user", "content": "x", **EPHEMERAL}]
    messages += [{"role": "user", "content": "x", "cache_control": {}}, {"role": "user", **EPHEMERAL}]
    assert chat(CHAT, messages=messages).marks == (Mark(1, 1), Mark(2))


def test_a_chat_is_compared_by_the_models_own_name():
    asked = chat(CHAT, **ASKED[CHAT])
    assert asked.head is asked.body and replace(asked, model="m").head is asked.body
    assert replace(asked, model="other").head == {**asked.body, "model": "other"}
    assert asked.asked is asked.body
    messages = {**ASKED[MESSAGES], "max_tokens": 5}
    assert chat(MESSAGES, **messages).asked == {"model": "m", **messages}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": ""}, ""),
        ({"content": [{"text": "a"}, {"text": "b"}, {"type": "image"}, 7]}, "b"),
        ({"content": [{"text": 7}]}, None),
        ({"content": []}, None),
        ({"content": {"text": "a"}}, None),
        ({}, None),
        ("a", None),
    ],
)
def test_the_text_of_a_message_is_the_last_in_which_others_may_differ(message, text):
    assert text_of(message) == text


def test_a_stored_response_is_its_owners():
    stored = StoredResponses(10**6)
    stored.put(chat(RESPONSES, **ASKED[RESPONSES]), {"id": "resp_1", "output": []}, "boot", "ann")
    body = {"model": "m", "input": "And now?", "previous_response_id": "resp_1"}
    found = chat_in(RESPONSES, body, stored, "ann")
    assert found is not None and found.texts == ("Tide?", "And now?")
    for owner in ("bob", None):
        assert chat_in(RESPONSES, body, stored, owner) is None
    assert chat_in(RESPONSES, {**body, "previous_response_id": None}, stored) is not None
