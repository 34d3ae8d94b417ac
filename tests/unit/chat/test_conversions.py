"""Requests of any API as one chat: its messages, settings, marks, texts and media, whole: `golden/conversions.txt`.

What vLLM itself makes of such requests: tests/engine/unit/test_conversions.py.
"""

from __future__ import annotations

import json

import pytest

from proxy.chat.anthropic import messages_request
from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from proxy.chat.reader import chat_in, chat_request
from proxy.chat.responses import StoredResponses, responses_request
from tests.harness.messages import system

MARK = {"cache_control": {"type": "ephemeral"}}
POINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
QUESTION = {"role": "user", "content": "Tide?"}
URL_IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
USE = {"type": "tool_use", "id": "c", "name": "tide", "input": {"port": "Ayr"}}
TOOL = {"name": "tide", "description": "Tide table", "input_schema": {"properties": {"port": {"type": "string"}}}}
BILLING = "x-anthropic-billing-header: a"


def text(said, **more):
    return {"type": "text", "text": said, **more}


def said(*blocks, role="user"):
    return {"role": role, "content": [*blocks]}


def result(content, **more):
    return {"type": "tool_result", "tool_use_id": "c", "content": content, **more}


def changed(kind, tool):
    return said({"type": kind, "tool": tool}, text("x"))


A, B, C = ({"name": name, "description": name} for name in "abc")
NEWER, DEFERRED = {**A, "description": "newer"}, {**A, "defer_loading": True}

# Bodies of the messages API: those without messages ask a question; a list stands for the messages alone.
ASKED_MESSAGES = [
    *({"system": each} for each in ("You.", 7, [], [text("You "), text(""), text("pilot.")])),
    {"system": [7, {"type": "image", "text": "no"}, {"type": "text"}, text(7), text(BILLING), text("You.")]},
    *({"system": each} for each in ([text("a", **MARK), text("b")], [text("a"), text("b", **MARK)])),
    [system([text(BILLING), text("Go "), text("on.")]), QUESTION, system(""), system("Later.")],
    *([said(*blocks), said(*blocks, role="assistant")] for blocks in (
        [text("a")], [text("a"), text("b")], [{**text("a"), "citations": []}, text("")], [text("a"), IMAGE, URL_IMAGE],
        [{"type": "image", "source": {}}], [text("a"), {"type": "image", "source": "x"}, {"type": "other"}, 7, {}],
        [text("a"), text(7), {"type": "text"}], [7, text("a"), None, text("b")],
        [{"type": "thinking", "thinking": "a"}, {"type": "thinking", "thinking": "b"}, text("c")],
        [text("a"), {"type": "thinking", "thinking": 7}, {"type": "other", "thinking": "b"}],
        [USE, text("x")], [{"type": "tool_use"}, text("x")], [USE, 7, text("")], [],
        [{"type": "thinking", "thinking": "a"}], [result("nine")], [result(None)], [result([1])],
    )),
    *([said(result(content))] for content in (
        "nine", None, [text("a"), text("b")], [text("a"), {"type": "other", "text": "b"}, 7, {"type": "text"}],
        [{"type": "other", "source": {}}, {"type": "image", "source": 7}],
        [{"type": "tool_reference", "tool_name": "t", "name": "n"}, {"type": "tool_reference", "name": "n"}],
    )),
    [said(text("See"), result([text("a"), IMAGE]), {"type": "tool_result"}, result("b", tool_use_id="d"))],
    # marks
    {"tools": [{**TOOL, **MARK}], "messages": [said(text("doc", **MARK), text("?")), said(USE, role="assistant")]},
    {"tools": [TOOL, {**A, **MARK}]},
    [said(text("a", **MARK), text("b", **MARK)), said(text("Here:"), result("nine", **MARK))],
    [QUESTION, said({"type": "thinking", **MARK}, text("a"), {**USE, **MARK}, text("c", **MARK), role="assistant")],
    # tools and settings
    *({"tools": [{"name": "a", **more}, 7]} for more in (
        {"strict": True}, {"input_schema": {}}, {"input_schema": {"type": "array"}}, {"input_schema": 7,
        "defer_loading": True}
    )),
    *({"tools": [A], "tool_choice": choice} for choice in (
        {"type": "auto"}, {"type": "any"}, {"type": "none"}, {"type": "tool", "name": "a"}, {"type": []}, "any"
    )),
    {"tool_choice": {"type": "any"}},
    *({"output_config": each} for each in ({"effort": "low"}, {"effort": None}, "low")),
    *({"thinking": {"type": each}, "output_config": {"effort": "low"}} for each in ("enabled", "disabled")),
    {"chat_template_kwargs": {}, "cache_salt": "", "temperature": 1},
    *({"tools": [DEFERRED, B], "messages": [7, *changes]} for changes in (
        [changed("tool_removal", {"name": "a"})], [changed("tool_removal", {"definition": A})],
        [changed("tool_removal", {"name": "c"}), changed("tool_addition", {"definition": C})],
        [changed("tool_addition", {"name": "c"})], [changed("tool_addition", {"name": "a"})],
        [changed("tool_removal", {"name": "a"}), changed("tool_addition", {"name": "a"})],
        [changed("tool_addition", {"definition": NEWER})], [changed("tool_addition", 7), changed("other",
        {"definition": C})],
    )),
    *({}, {"messages": 7}, [7], {"messages": [{}], "system": 7, "tools": 7, "thinking": {"type": []}}),
]  # fmt: skip


def call(name="tide", **fields):
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}", **fields}


SAID = {"role": "assistant", "content": "Nine."}
THOUGHT = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
SUMMED = {"type": "reasoning", "summary": [{"text": "So."}, {"text": "more"}]}
FREE = {"type": "custom", "name": "patch", "description": "d"}
FUNCTION = {"type": "function", "name": "tide", "parameters": {}}
PATCH = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'Café "Süd"'}


def begun(kind, status):
    item = {"type": kind, "role": "assistant", "call_id": "c", "name": "f", "output": "x", "status": status}
    return [QUESTION, {**item, "content": [text("The tide")]}]


# Bodies of the responses API; a list stands for the input alone.
ASKED_RESPONSES = [
    *({"input": QUESTION["content"], "instructions": each} for each in ("You.", "", 7, ["You."])),
    *([QUESTION, *items] for items in (
        [7, {"type": "other"}, {}], [call(), call("wind")], [call(arguments=None)], [SAID, call()], [call(),
        QUESTION, call()],
        [call(namespace="harbour")], [PATCH], [{"type": "custom_tool_call", "call_id": "c", "name": "tide"}],
        [{"type": "function_call_output", "call_id": "c", "output": "x"}],
        [{"type": "custom_tool_call_output", "call_id": "c", "output": ["x"]}], [THOUGHT, SAID, call()], [SAID,
        THOUGHT],
        [THOUGHT, SUMMED], [{"type": "reasoning"}], [SAID, SAID, {"role": "assistant"}], [call(),
        {"role": "assistant"}],
        [{"role": "assistant", "content": []}], [said(7, {"text": "a"}, {"text": "b"}, role="assistant")],
        [{"type": "reasoning", "summary": ["abc"]}, said("x", role="assistant")],
    )),
    [said({"type": "input_text", "text": "a", "more": 1}, {"type": "input_image", "image_url": "u"}, 7, text("?"))],
    [said({"type": "output_text", "text": "a"}, {"type": "input_file", "file_id": "f"}, text("b", **MARK), text("c"))],
    *({"tools": [each, 7]} for each in (FUNCTION, FREE, {"type": "web_search", "name": "a"}, {"name": "a"})),
    *({"tools": [{"type": "namespace", "name": each, "tools": [FREE, 7, FUNCTION]}]} for each in ("harbour", "",
        None, 7)),
    {"tools": [{"type": "namespace", "tools": 7}]},
    *({"tools": [FUNCTION], "tool_choice": each} for each in ("required", FUNCTION, {"type": "other", "name": "a"},
        ["x"])),
    *({"reasoning": each} for each in (7, {"effort": None}, {"effort": "high"}, {"effort": "none"})),
    {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"enable_thinking": True}, "cache_salt": ""},
    *(begun(kind, "incomplete") for kind in ("message", "reasoning", "function_call", "function_call_output")),
    *(begun("message", status) for status in ("in_progress", "completed", None)),
    [*begun("message", "incomplete"), QUESTION],
    *({"input": each, "instructions": "You."} for each in (None, [], {}, 7)),
]  # fmt: skip

PARTS = [text("Look:"), {"type": "image_url", "image_url": {"url": "data:,"}}, text("what?"), text(7)]

ASKED_CHATS = [
    [QUESTION],
    {"messages": [{**system("You."), **MARK}, said(text("a", **MARK), text("b"))], "tools": [TOOL, {**TOOL, **MARK}]},
    [system("You."), 7, said(*PARTS), {"role": "assistant"}],
    [
        7,
        said(7, text("a", **POINT), text("b", cache_control=None)),
        {**QUESTION, **MARK},
        {**QUESTION, "cache_control": {}},
    ],
    *({"messages": each} for each in (None, [], {}, "text")),
]

ASKED_PROMPTS = [
    *({"prompt": each, "cache_salt": "s"} for each in ("x", ["x"], [0], [65, 0x10FFFF], [[65]], [5, 0x110000])),
    *({"prompt": each} for each in (None, "", [], [""], ["a", "b"], [[1], [2]], [True], [-1], [1.0], ["a", 1])),
]


def shown(chat):
    if chat is None:
        return "no chat"
    settings = {name: value for name, value in chat.body.items() if name not in ("model", "messages", "tools")}
    tools = [tool.get("function", tool) for tool in chat.body.get("tools") or ()]
    lines = [*map(json.dumps, chat.messages), *(f"tool {json.dumps(tool)}" for tool in tools)]
    places = [
        *chat.marks,
        f"roles {chat.roles}",
        f"texts {chat.texts}",
        *([f"media {chat.media}"] if chat.media else []),
    ]
    return "\n".join(map(str, [*lines, f"settings {json.dumps(settings)}", *places, f"{chat.path}, ids {chat.ids}"]))


CASES = [
    *(
        (MESSAGES, {"messages": [QUESTION], **each} if isinstance(each, dict) and each else each)
        for each in ASKED_MESSAGES
    ),
    *((RESPONSES, each) for each in ASKED_RESPONSES),
    *((CHAT, each) for each in ASKED_CHATS),
    *((COMPLETIONS, each) for each in ASKED_PROMPTS),
]


@pytest.mark.parametrize(("endpoint", "given"), CASES, ids=range(len(CASES)))
def test_a_request_of_any_api_is_a_chat_as_vllm_reads_it(endpoint, given, expect_golden):
    field = "input" if endpoint == RESPONSES else "messages"
    body = given if isinstance(given, dict) else {field: given}
    if endpoint == RESPONSES:
        body = {"input": [QUESTION], **body}
    case = f"{endpoint} {json.dumps(given, ensure_ascii=False)}"
    expect_golden("conversions", case, shown(chat_in(endpoint, {"model": "m", **body}, StoredResponses(10**6))))


def test_what_is_rendered_and_what_it_is_compared_by_are_told_apart():
    asked = {"model": "m", "messages": [QUESTION], "max_tokens": 5}
    assert (messages_request(asked).asked, chat_request(asked).asked) == (asked, asked)
    alone, continued = (responses_request({"model": "m", "input": "Tide?"}, before) for before in (None, []))
    assert (alone.path, alone.asked) == (RESPONSES, {"model": "m", "input": "Tide?"})
    assert continued.path == CHAT and continued.asked is continued.body


def test_a_stored_response_continues_without_its_instructions_and_stays_as_it_is():
    stored = StoredResponses(100_000)
    first = responses_request({"model": "m", "instructions": "You pilot.", "input": "Tide?"})
    output = [7, THOUGHT, {"type": "message", "content": [{"type": "output_text", "text": "Nine."}]}]
    stored.put(first, {"id": "r1", "output": output}, "boot")
    items = [call(), {"type": "function_call_output", "call_id": "c", "output": "nine"}, said(text("a", **MARK))]
    for _ in range(3):
        chat = responses_request({"model": "m", "input": items}, stored.chat("r1"))
        assert [message["role"] for message in chat.messages] == ["user", "assistant", "assistant", "tool", "user"]
        assert [mark.message for mark in chat.marks] == [4]
    assert [message["content"] for message in stored.chat("r1")] == ["You pilot.", "Tide?", "Nine."]
