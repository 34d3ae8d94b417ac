"""Requests of any API as one chat, whole: `golden/conversions.txt`; whose it is, what is kept and what is rewritten.

What vLLM itself makes of such requests: tests/engine/unit/test_conversions.py.
"""

from __future__ import annotations

import json
import sys

import pytest
from msgspec.structs import replace

from proxy.boundaries.layout import layout_of
from proxy.chat.anthropic import messages_request
from proxy.chat.chat import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Chat, flag, number
from proxy.chat.reader import chat_in, chat_request
from proxy.chat.responses import MAX_ID_CHARACTERS, StoredResponses, responses_request
from proxy.chat.rewrites import rewrite, sorted_by_name
from proxy.http.json_body import with_edits
from tests.harness.messages import system

MARK = {"cache_control": {"type": "ephemeral"}}
POINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
QUESTION = {"role": "user", "content": "Tide?"}
MARKED = {**QUESTION, **MARK}
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
    {"tools": [FUNCTION], "tool_choice": "required"},
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
    [7, said(7, text("a", **POINT), text("b", cache_control=None)), MARKED, {**QUESTION, "cache_control": {}}],
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
    lines += [f"settings {json.dumps(settings)}", *chat.marks, f"roles {chat.roles}", f"texts {chat.texts}"]
    lines += [f"media {chat.media}"] if chat.media else []
    return "\n".join(map(str, [*lines, f"{chat.path}, ids {chat.ids}"]))


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


ASKED = {
    CHAT: {"messages": [{"role": "user", "content": "Tide?"}]},
    MESSAGES: {"messages": [{"role": "user", "content": "Tide?"}]},
    RESPONSES: {"input": "Tide?"},
    COMPLETIONS: {"prompt": "Tide?"},
}


def chat(endpoint: str, **body) -> Chat:
    found = chat_in(endpoint, {"model": "m", **ASKED[endpoint], **body}, StoredResponses(10**6))
    assert found is not None
    return found


@pytest.mark.parametrize("endpoint", ASKED)
def test_one_prompt_under_two_salts_has_two_keys_at_every_endpoint(endpoint):
    asked = [chat(endpoint, **salt) for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"})]
    keys = {layout.keys.after[-1] if (layout := layout_of(each, b"r")) else None for each in asked}
    assert len(keys) == 3 and [each.body.get("cache_salt") for each in asked] == [None, "a", "b"]
    assert chat(endpoint).is_bare is (endpoint == COMPLETIONS)


def test_a_chat_is_compared_by_the_models_own_name():
    asked = chat(CHAT)
    assert asked.head is asked.body and replace(asked, model="m").head is asked.body
    assert replace(asked, model="other").head == {**asked.body, "model": "other"}


def test_a_stored_response_is_its_owners_and_is_continued_under_the_salt_of_the_request():
    stored = StoredResponses(10**6)
    stored.put(chat(RESPONSES, cache_salt="a"), {"id": "resp_1", "output": []}, "boot", "ann")
    body = {"model": "m", "input": "And now?", "previous_response_id": "resp_1", "cache_salt": "b"}
    found = chat_in(RESPONSES, body, stored, "ann")
    assert found is not None and found.texts == ("Tide?", "And now?") and found.body["cache_salt"] == "b"
    assert chat_in(RESPONSES, body, stored, "bob") is None
    assert chat_in(RESPONSES, {**body, "previous_response_id": None}, stored) is not None


def test_a_flag_and_a_number_are_what_the_worker_reads():
    flags = {
        True: (True, 1, 1.0, "1", "True", "yes", "on", "t"),
        False: (False, None, 0, 0.0, "0", "false", "no", "off"),
    }
    for wanted, values in (*flags.items(), (None, (2, -1, 0.5, "", "maybe", [], {}, [True]))):
        assert [value for value in values if flag(value) is not wanted] == []
    numbers = [0, 7, -7, "2", 2.0, " 2 ", True, False, None, "", "two", 2.5, [], {}]
    assert str([number(each) for each in numbers]) == str([0, 7, -7, 2, 2, 2, 1, 0, *[None] * 6])


def put(stored: StoredResponses, name: object, text: str = "Tide?", owner: str | None = None) -> None:
    answer = {"id": name, "output": [{"type": "message", "content": [{"type": "output_text", "text": "Nine."}]}]}
    stored.put(chat(RESPONSES, input=text), answer, "w#1", owner)


def test_workers_are_known_of_so_many_responses_and_others_learn_each_once():
    stored = StoredResponses(10**6, most=2)
    told = []
    stored.on_kept = lambda name, boot: told.append(name)
    for response_id in ("resp_1", "resp_2", "resp_2", "resp_3"):
        put(stored, response_id)
    assert len(told) == len(set(told)) == 3 and not any(b"resp" in name for name in told)
    stored.keep_remote(told[0], "w#2")
    assert [stored.boot(f"resp_{number}") for number in (1, 2, 3)] == ["w#2", None, "w#1"] and len(told) == 3


def test_a_response_is_known_to_its_owner_only():
    stored = StoredResponses(10**6)
    put(stored, "resp_1", owner="ann")
    put(stored, "resp_1", "Another?", owner="bob")
    for owner, first in (("ann", "Tide?"), ("bob", "Another?")):
        assert [message["content"] for message in stored.chat("resp_1", owner)] == [first, "Nine."]
    for name, owner in (("resp_1", None), ("resp_1", ""), ("resp_1", "eve"), ("resp_2", "ann"), ([], "ann")):
        assert stored.chat(name, owner) is None and stored.boot(name, owner) is None


def test_what_is_kept_is_bounded_and_the_oldest_is_forgotten_first():
    stored = StoredResponses(20_000)
    for each in range(100):
        put(stored, f"resp_{each}", "x" * 1000)
        assert 0 < stored.held <= 20_000
    put(stored, "resp_large", "x" * 30_000)  # costs no other
    kept = [number for number in range(100) if stored.chat(f"resp_{number}") is not None]
    assert kept == list(range(kept[0], 100)) and len(kept) > 5
    assert sum(len(repr(stored.chat(f"resp_{number}"))) for number in kept) <= 20_000
    assert stored.chat("resp_large") is None and stored.boot("resp_large") == "w#1"  # where it can be asked for


@pytest.mark.parametrize("content", ["", [{"type": "input_text", "text": ""}] * 100])
def test_each_message_and_value_that_is_kept_counts(content):
    """A bound on text alone would let in any number of empty ones."""
    stored = StoredResponses(10**6)
    items = [{"role": "user", "content": content}] * (1 if content else 100)
    stored.put(chat_in(RESPONSES, {"model": "m", "input": items}, stored), {"id": "r"}, "w#1")
    assert stored.held >= 100 * sys.getsizeof({"role": "user", "content": ""})


def test_an_answer_without_a_sound_name_is_not_remembered():
    stored = StoredResponses(10**6)
    for name in (None, 7, ["r"], "r" * (MAX_ID_CHARACTERS + 1)):
        put(stored, name)
    assert not stored.held and not stored._boots


HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"

BOTH = frozenset({"billing_header", "tools_sorted"})

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("wind", "tide")]

SYSTEM, DEVELOPER, USER = ({"role": role, "content": HEADER} for role in ("system", "developer", "user"))

HEADERS = {"role": "system", "content": [7, {"type": "text", "text": HEADER}, {"type": "text", "text": 7}]}

FIRST, SECOND, THIRD = (("messages", index, "content") for index in range(3))


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({"messages": [SYSTEM, DEVELOPER, USER, SYSTEM]}, [FIRST, SECOND]),  # what a user wrote stays
        ({"messages": [SYSTEM, HEADERS, DEVELOPER]}, [FIRST, (*SECOND, 1, "text"), THIRD]),
        ({"messages": [SYSTEM], "tools": TOOLS}, [FIRST, ("tools",)]),
        ({"instructions": f"{HEADER}\nYou.", "input": "x"}, [("instructions",)]),
        *(
            ({"messages": [{"role": "system", "content": content}]}, [])
            for content in (
                f"{HEADER} You are a pilot.\nBe brief.",
                "x-anthropic-billing-header: cch=1; You pilot ships.",
                "x-anthropic-billing-header is a header our API gets. Explain it to users.",
                f"You.\n{HEADER}\n",
            )
        ),
        *(({"messages": odd}, []) for odd in ([USER, SYSTEM], [7, SYSTEM], 7, [7], [])),
        *(({"tools": odd}, []) for odd in ([7], [*TOOLS, 7], {}, "ab", None, TOOLS[::-1])),
        *(({"instructions": odd}, []) for odd in ("You.", 7)),
    ],
)
def test_the_header_goes_from_the_first_system_prompts_and_tools_are_sorted_and_odd_bodies_left_alone(body, paths):
    found = rewrite(body, BOTH, CHAT)
    assert [edit.path for edit in found.edits] == paths and found.could == ()
    named = tuple(rule for rule in sorted(BOTH) if any(("tools" in path) is (rule == "tools_sorted") for path in paths))
    assert found.applied == named
    assert rewrite(body, frozenset(), CHAT) == ((), (), named)  # counted by itself where it is off
    done = json.loads(with_edits(json.dumps(body).encode(), found.edits))
    assert rewrite(done, BOTH, CHAT).edits == ()


def test_two_requests_with_different_headers_become_one_and_every_other_byte_stays():
    form = ' {"messages" : [{"role":"system","content":"%s cch=%d;\\nYou."}],"n":1.50} '
    raw = [(form % (HEADER, number)).encode() for number in (1, 2)]
    one, other = (with_edits(each, rewrite(json.loads(each), BOTH, CHAT).edits) for each in raw)
    assert one == other == b' {"messages" : [{"role":"system","content":"You."}],"n":1.50} '


def test_where_vllm_does_it_itself_it_is_left_to_vllm():
    found = rewrite({"messages": [SYSTEM], "tools": TOOLS}, BOTH, MESSAGES)
    assert ([edit.path for edit in found.edits], found.applied, found.could) == ([("tools",)], ("tools_sorted",), ())


def test_tools_are_sorted_by_their_names_in_every_api():
    names = [{"name": "b", "function": {"name": "a"}}, {"name": "b", "function": 7}, {"name": "c"}, {"name": 7}]
    assert sorted_by_name(names[::-1]) == sorted_by_name(tuple(names)) == [names[3], *names[:3]]
