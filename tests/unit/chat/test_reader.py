"""A request of any API as one chat: its salt, its marks, its texts."""

from __future__ import annotations

import pytest

from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES, TOOLS, Chat, Mark
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


TOOL = {"name": "tide", "input_schema": {"type": "object"}}

OTHER_TOOL = {"name": "wind", "input_schema": {"type": "object"}}


def marks(**body) -> tuple[Mark, ...]:
    return chat(MESSAGES, **{**ASKED[MESSAGES], **body}).marks


def test_a_mark_on_the_last_of_two_tools_is_the_end_of_the_tools():
    assert marks(tools=[TOOL, {**OTHER_TOOL, **EPHEMERAL}]) == (Mark(TOOLS),)


def test_marks_inside_and_at_the_end_of_a_message_and_on_a_tool_result():
    parts = [{"type": "text", "text": "a", **EPHEMERAL}, {"type": "text", "text": "b", **EPHEMERAL}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "nine", **EPHEMERAL}
    messages = [{"role": "user", "content": parts}, {"role": "user", "content": [result]}]
    assert marks(messages=messages) == (Mark(0, 0), Mark(0), Mark(1))


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
