"""Rewrite rules change what they name and no other byte."""

from __future__ import annotations

import json

import pytest

from proxy.chat.chat import CHAT, MESSAGES
from proxy.chat.rewrites import rewrite, sorted_by_name, tool_name
from proxy.http.json_body import Edit, with_edits

HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"

ON = frozenset({"billing_header"})

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("wind", "tide")]


def rewritten(body, on=ON):
    return with_edits(json.dumps(body).encode(), rewrite(body, on, CHAT).edits)


@pytest.mark.parametrize(
    ("content", "left"),
    [
        (f"{HEADER}\nYou pilot ships.", "You pilot ships."),
        ([{"type": "text", "text": HEADER}, {"type": "text", "text": "You."}], ""),
    ],
)
def test_the_billing_header_goes(content, left):
    body = {"messages": [{"role": "system", "content": content}, {"role": "user", "content": HEADER}]}
    messages = json.loads(rewritten(body))["messages"]
    kept = messages[0]["content"]
    assert (kept if isinstance(kept, str) else kept[0]["text"]) == left
    assert messages[1]["content"] == HEADER  # what a user wrote stays


@pytest.mark.parametrize(
    "content",
    [
        f"{HEADER} You are a pilot.\nBe brief.",
        "x-anthropic-billing-header: cch=1; You pilot ships.",
        "x-anthropic-billing-header is a header our API gets. Explain it to users.",
        f"You.\n{HEADER}\n",
    ],
)
def test_a_prompt_that_goes_on_behind_the_header_or_speaks_of_it_stays(content):
    assert rewrite({"messages": [{"role": "system", "content": content}]}, ON, CHAT).edits == ()


def test_where_vllm_does_it_itself_it_is_left_to_vllm():
    body = {"messages": [{"role": "system", "content": f"{HEADER}\nYou."}]}
    assert rewrite(body, ON, MESSAGES) == ((), (), ())


def test_two_requests_with_different_headers_become_one():
    bodies = [{"messages": [{"role": "system", "content": f"{HEADER} cch={n};\nYou."}]} for n in range(2)]
    assert rewritten(bodies[0]) == rewritten(bodies[1])


def test_tools_are_sorted_only_where_that_is_switched_on_and_counted_where_not():
    assert rewrite({"tools": TOOLS}, ON, CHAT) == ((), (), ("tools_sorted",))
    body = json.loads(rewritten({"tools": TOOLS}, frozenset({"tools_sorted"})))
    assert [tool["function"]["name"] for tool in body["tools"]] == ["tide", "wind"]
    assert rewrite({"tools": TOOLS[::-1]}, ON, CHAT).could == ()


@pytest.mark.parametrize(
    "body",
    [{}, {"messages": 7}, {"messages": [7]}, {"tools": [7]}, {"tools": [*TOOLS, 7]}, {"tools": {}}, {"messages": []}],
)
def test_odd_bodies_are_left_alone(body):
    assert rewrite(body, frozenset({"billing_header", "tools_sorted"}), CHAT).edits == ()


def test_every_other_byte_stays():
    raw = b' {"a" : [1.50,{"x":"\xc3\xa9\\u00e9"} , "s"],\n"b":1E5} '
    assert with_edits(raw, [Edit(("a", 1, "x"), "new")]) == raw.replace(b'"\xc3\xa9\\u00e9"', b'"new"')
    assert with_edits(raw, [Edit(("a", 2), 2), Edit(("b",), 3)]) == raw.replace(b'"s"', b"2").replace(b"1E5", b"3")


def paths(body, on=ON, endpoint=CHAT):
    return [edit.path for edit in rewrite(body, on, endpoint).edits]


def test_the_header_is_sought_in_the_messages_before_the_first_that_is_no_system_prompt():
    system, developer = ({"role": role, "content": HEADER} for role in ("system", "developer"))
    user = {"role": "user", "content": "Tide?"}
    first, second, third = (("messages", index, "content") for index in range(3))
    assert paths({"messages": [system, developer, user, system]}) == [first, second]
    assert paths({"messages": [user, system]}) == paths({"messages": [7, system]}) == []
    parts = {"role": "system", "content": [7, {"type": "text", "text": HEADER}, {"type": "text", "text": 7}]}
    assert paths({"messages": [system, parts, developer]}) == [first, (*second, 1, "text"), third]


def test_the_header_goes_from_the_instructions_of_a_response():
    assert json.loads(rewritten({"instructions": f"{HEADER}\nYou.", "input": "x"}))["instructions"] == "You."
    assert paths({"instructions": "You.", "messages": []}) == paths({"instructions": 7}) == []


def test_each_rule_is_applied_or_counted_by_itself_also_where_another_does_not_hold():
    body = {"messages": [{"role": "system", "content": HEADER}], "tools": TOOLS}
    both = frozenset({"billing_header", "tools_sorted"})
    found = rewrite(body, both, CHAT)
    assert [edit.path for edit in found.edits] == [("messages", 0, "content"), ("tools",)]
    assert (found.applied, found.could) == (("billing_header", "tools_sorted"), ())
    assert rewrite(body, frozenset(), CHAT) == ((), (), ("billing_header", "tools_sorted"))
    found = rewrite(body, both, MESSAGES)
    assert ([edit.path for edit in found.edits], found.applied) == ([("tools",)], ("tools_sorted",))


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        ({"type": "function", "function": {"name": "tide"}}, "tide"),
        ({"name": "wind"}, "wind"),
        ({"name": "wind", "function": 7}, "wind"),
        ({"name": "wind", "function": {"name": "tide"}}, "tide"),
        ({"name": 7}, "7"),
        ({}, "None"),
    ],
)
def test_a_tool_has_a_name_in_every_api(tool, name):
    assert tool_name(tool) == name


def test_only_a_list_of_tools_is_sorted():
    one, two = {"name": "a"}, {"name": "b"}
    assert sorted_by_name([two, one]) == sorted_by_name((two, one)) == [one, two]
    assert sorted_by_name([]) == []
    for odd in (None, {}, "ab", [one, 7], 7):
        assert sorted_by_name(odd) is None
