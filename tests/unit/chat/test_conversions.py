"""Requests to /v1/messages and /v1/responses as chats: the client's marks, stored responses and nonsense.

What vLLM itself makes of such requests: tests/engine/unit/test_conversions.py.
"""

from __future__ import annotations

import pytest

from proxy.chat.anthropic import messages_request
from proxy.chat.chat import TOOLS, Mark
from proxy.chat.reader import chat_request
from proxy.chat.responses import responses_request

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


@pytest.mark.parametrize("body", [{}, {"messages": 7}, {"messages": [7]}, {"messages": [{}], "system": 7, "tools": 7}])
def test_nonsense_raises_nothing(body):
    messages_request(body)
    chat_request(body)
    responses_request({"input": body.get("messages"), "tools": 7, "reasoning": 7})
    responses_request({"input": [{"type": "reasoning", "summary": ["abc"]}, {"role": "assistant", "content": ["x"]}]})
    messages_request({**body, "messages": [{}], "thinking": {"type": []}, "tools": [{}], "tool_choice": {"type": []}})


# Each kind of block of the messages API, in sound and in odd shapes.

QUESTION = {"role": "user", "content": "Tide?"}

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}

IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}


def text(said):
    return {"type": "text", "text": said}


def system(said):
    return {"role": "system", "content": said}


def messages(*given, **body):
    return messages_request({"model": "m", "messages": [*given], **body}).messages


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("You.", [system("You.")]),
        ("", []),
        (None, []),
        (7, []),
        ([], []),
        ([text("You "), text(""), text("pilot.")], [system("You pilot.")]),
        ([7, {"type": "image", "text": "no"}, {"type": "text"}, text(7), text("x-anthropic-billing-header: a")], []),
        ([{"type": "image", "text": "no"}, text("You.")], [system("You.")]),
    ],
)
def test_the_system_prompt_is_its_texts(given, made):
    assert messages(QUESTION, system=given) == [*made, QUESTION]
    if not isinstance(given, int):
        assert messages(QUESTION, {"role": "system", "content": given}) == [QUESTION, *made]


@pytest.mark.parametrize(
    ("blocks", "made"),
    [
        ([text("a")], {"content": "a"}),
        ([text("a"), text("b")], {"content": [text("a"), text("b")]}),
        ([{**text("a"), "citations": []}, text("")], {"content": "a"}),
        ([IMAGE], {"content": [IMAGE_PART]}),
        ([text("a"), IMAGE], {"content": [text("a"), IMAGE_PART]}),
        (
            [text("a"), {"type": "image", "source": {"type": "url", "url": "http://x"}}],
            {"content": [text("a"), {"type": "image_url", "image_url": {"url": "http://x"}}]},
        ),
        (
            [{"type": "image", "source": {}}],
            {"content": [{"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,"}}]},
        ),
        ([text("a"), {"type": "image", "source": "x"}, {"type": "other", "source": {}}, 7, {}], {"content": "a"}),
        ([text("a"), {"type": "text", "text": 7}, {"type": "text"}], {"content": "a"}),
        ([7, text("a"), None, text("b")], {"content": [text("a"), text("b")]}),
        ([text("a"), {"type": "thinking", "thinking": 7}, {"type": "other", "thinking": "b"}], {"content": "a"}),
        (
            [{"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": "b"}, text("c")],
            {"content": "c", "reasoning": "ab"},
        ),
        (
            [{"type": "tool_use", "id": "c", "name": "tide", "input": {"a": 1}}, text("x")],
            {
                "content": "x",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "tide", "arguments": '{"a": 1}'}},
                ],
            },
        ),
        (
            [{"type": "tool_use"}, text("x")],
            {
                "content": "x",
                "tool_calls": [{"id": "call", "type": "function", "function": {"name": "", "arguments": "{}"}}],
            },
        ),
    ],
)
def test_blocks_become_parts_thoughts_and_calls(blocks, made):
    for role in ("user", "assistant"):
        assert messages({"role": role, "content": blocks}) == [{"role": role, **made}]


def result(content, **fields):
    return {"type": "tool_result", "tool_use_id": "c", "content": content, **fields}


def test_what_a_result_shows_stands_behind_it_and_before_what_the_user_says():
    given = [text("See"), result([text("a"), IMAGE]), {"type": "tool_result"}]
    assert messages({"role": "user", "content": given}) == [
        {"role": "tool", "tool_call_id": "c", "content": "a"},
        {"role": "user", "content": [IMAGE_PART]},
        {"role": "tool", "tool_call_id": "", "content": ""},
        {"role": "user", "content": "See"},
    ]


def test_a_result_in_an_assistants_message_is_a_text():
    for content, said in (("nine", "nine"), (None, ""), ([1], "[1]")):
        given = {"role": "assistant", "content": [result(content)]}
        assert messages(given) == [{"role": "assistant", "content": f"Tool result: {said}"}]


# Tools and settings of the messages API.


def made_of(**body):
    return messages_request({"messages": [QUESTION], **body}).body


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "a"}, {"type": "function", "function": {"name": "a"}}),
        ({"type": "other"}, "auto"),
        ({"type": []}, "auto"),
        ("any", "auto"),
    ],
)
def test_which_tool_is_to_be_called(choice, made):
    assert made_of(tools=[TOOL], tool_choice=choice)["tool_choice"] == made
    assert "tool_choice" not in made_of(tool_choice=choice)


def changed(kind, tool):
    return {"role": "user", "content": [{"type": kind, "tool": tool}, text("x")]}


A, B, C = ({"name": name, "description": name} for name in "abc")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([("tool_removal", {"name": "a"})], "b"),
        ([("tool_removal", {"definition": A})], "b"),
        ([("tool_removal", {"name": "c"})], "ab"),
        ([("tool_addition", {"definition": C})], "abc"),
        ([("tool_addition", {"name": "c"})], "ab"),
        ([("tool_addition", {"name": "a"})], "ab"),
        ([("tool_removal", {"name": "a"}), ("tool_addition", {"name": "a"})], "ab"),
        ([("tool_addition", {"definition": C}), ("tool_removal", {"name": "c"})], "ab"),
        ([("tool_removal", {"name": "c"}), ("tool_addition", {"definition": C})], "abc"),
        ([("tool_addition", 7), ("other", {"definition": C})], "ab"),
    ],
)
def test_messages_add_tools_and_take_them_away_in_their_order(changes, names):
    chat = messages_request({"tools": [A, B], "messages": [7, *(changed(*change) for change in changes)]})
    assert "".join(tool["function"]["name"] for tool in chat.body["tools"]) == names


# Each kind of item of the responses API.


def responses(*items, **body):
    return responses_request({"model": "m", "input": [*items], **body})


def call(name="tide", **fields):
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}", **fields}


def called(name="tide", arguments="{}"):
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


SAID = {"role": "assistant", "content": "Nine."}

THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}


@pytest.mark.parametrize(
    ("items", "made"),
    [
        ([{"role": "user", "content": "a"}, {"type": "message", "role": "user", "content": None}], None),
        ([7, QUESTION, {"type": "other"}, {}], [QUESTION]),
        ([call()], [{"role": "assistant", "tool_calls": [called()]}]),
        ([call(arguments=None)], [{"role": "assistant", "tool_calls": [called(arguments="")]}]),
        ([call(), call("wind")], [{"role": "assistant", "tool_calls": [called(), called("wind")]}]),
        ([SAID, call()], [{**SAID, "tool_calls": [called()]}]),
        ([QUESTION, call(), QUESTION, call()], None),
        ([call(namespace="harbour")], [{"role": "assistant", "tool_calls": [called("harbour__tide")]}]),
        (
            [{"type": "custom_tool_call", "call_id": "c", "name": "tide"}],
            [{"role": "assistant", "tool_calls": [called(arguments='{"input": ""}')]}],
        ),
        (
            [{"type": "function_call_output", "call_id": "c", "output": "x"}],
            [{"role": "tool", "content": "x", "tool_call_id": "c"}],
        ),
        (
            [{"type": "custom_tool_call_output", "call_id": "c", "output": ["x"]}],
            [{"role": "tool", "content": ["x"], "tool_call_id": "c"}],
        ),
        (
            [THOUGHT, SAID, call()],
            [{"role": "assistant", "reasoning": "Hm.", "content": "Nine.", "tool_calls": [called()]}],
        ),
        ([SAID, THOUGHT], [{**SAID, "reasoning": "Hm."}]),
        (
            [THOUGHT, {"type": "reasoning", "summary": [{"text": "So."}]}],
            [{"role": "assistant", "reasoning": "Hm."}, {"role": "assistant", "reasoning": "So."}],
        ),
        ([{"type": "reasoning"}], [{"role": "assistant", "reasoning": ""}]),
        ([SAID, SAID], [SAID, SAID]),
        ([SAID, {"role": "assistant"}], [SAID]),
        ([call(), {"role": "assistant"}], [{"role": "assistant", "tool_calls": [called()], "content": None}]),
        ([{"role": "assistant", "content": []}], []),
        (
            [{"role": "assistant", "content": [7, {"text": "a"}, {"text": "b"}]}],
            [{"role": "assistant", "content": "a"}],
        ),
    ],
)
def test_items_of_one_turn_come_together_in_one_message(items, made):
    if made is None:
        given = responses(*items).messages
        assert [message["role"] for message in given] == [
            "assistant" if item.get("type") == "function_call" else item["role"] for item in items
        ]
    else:
        found = responses(QUESTION, *items)
        assert found is not None and found.messages == [QUESTION, *made]


@pytest.mark.parametrize(
    ("part", "made"),
    [
        *(({"type": kind, "text": "a", "more": 1}, text("a")) for kind in ("input_text", "output_text", "text")),
        ({"type": "input_image", "image_url": "u"}, {"type": "image_url", "image_url": {"url": "u"}}),
        ({"type": "input_file", "file_id": "f"}, {"type": "input_file", "file_id": "f"}),
        (7, 7),
    ],
)
def test_a_part_of_a_response_is_one_of_a_chat(part, made):
    given = [part, text("?")]
    assert responses({"role": "user", "content": given}).messages == [{"role": "user", "content": [made, text("?")]}]


def test_marks_of_a_response_lie_behind_what_stood_before_its_input():
    item = {"role": "user", "content": [text("a"), {**text("b"), "cache_control": EPHEMERAL}, text("c")]}
    assert responses(QUESTION, item, instructions="You.").marks == (Mark(2, 1),)
    before = [system("old"), QUESTION, SAID]
    continued = responses_request({"model": "m", "input": [item]}, before)
    assert continued.messages[:2] == before[1:] and continued.marks == (Mark(2, 1),)


@pytest.mark.parametrize(
    ("tool", "made"),
    [
        ({"type": "function", "name": "a", "parameters": {}}, {"name": "a", "parameters": {}}),
        ({"type": "web_search", "name": "a"}, None),
        ({"name": "a"}, None),
        (7, None),
    ],
)
def test_a_tool_of_a_response_is_a_function_or_vllms_own(tool, made):
    body = responses(QUESTION, tools=[tool]).body
    assert body.get("tools") == ([{"type": "function", "function": made}] if made else None)
    assert body.get("tool_choice") == ("auto" if made else None)


def test_a_tool_of_free_text_takes_one_text_and_a_namespace_names_all_of_its_own():
    free = {"type": "custom", "name": "patch", "description": "d"}
    inner = [free, 7, {"type": "function", "name": "tide"}]
    given = [free, {"type": "namespace", "name": "harbour", "tools": inner}, {"type": "namespace", "tools": 7}]
    first, *named = [tool["function"] for tool in responses(QUESTION, tools=given).body["tools"]]
    assert (first["name"], first["description"], list(first["parameters"]["properties"])) == ("patch", "d", ["input"])
    assert [tool["name"] for tool in named] == ["harbour__patch", "harbour__tide"]


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        (None, "auto"),
        ("required", "required"),
        ({"type": "function", "name": "a"}, {"type": "function", "function": {"name": "a"}}),
        ({"type": "other", "name": "a"}, "auto"),
        (["required"], "auto"),
    ],
)
def test_which_tool_a_response_is_to_call(choice, made):
    assert responses(QUESTION, tools=[{"type": "function"}], tool_choice=choice).body["tool_choice"] == made


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ({}, {}),
        ({"reasoning": 7, "chat_template_kwargs": 7, "cache_salt": None}, {}),
        ({"reasoning": {"effort": None}, "chat_template_kwargs": {}}, {}),
        ({"cache_salt": ""}, {"cache_salt": ""}),
        ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        ),
    ],
)
def test_settings_of_a_response_that_reach_the_template_or_the_cache(body, made):
    assert responses(QUESTION, **body).body == {"model": "m", "messages": [QUESTION], **made}
