"""Rewrite rules change what they name and no other byte."""

from __future__ import annotations

import json

from proxy.chat.chat import CHAT, MESSAGES
from proxy.chat.rewrites import rewrite, sorted_by_name
from proxy.http.json_body import Edit, with_edits

HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"

ON = frozenset({"billing_header"})

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("wind", "tide")]


def rewritten(body, on=ON):
    return with_edits(json.dumps(body).encode(), rewrite(body, on, CHAT).edits)


def test_two_requests_with_different_headers_become_one():
    bodies = [{"messages": [{"role": "system", "content": f"{HEADER} cch={n};\nYou."}]} for n in range(2)]
    assert rewritten(bodies[0]) == rewritten(bodies[1])


def test_tools_are_sorted_only_where_that_is_switched_on_and_counted_where_not():
    assert rewrite({"tools": TOOLS}, ON, CHAT) == ((), (), ("tools_sorted",))
    body = json.loads(rewritten({"tools": TOOLS}, frozenset({"tools_sorted"})))
    assert [tool["function"]["name"] for tool in body["tools"]] == ["tide", "wind"]
    assert rewrite({"tools": TOOLS[::-1]}, ON, CHAT).could == ()


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


def test_each_rule_is_applied_or_counted_by_itself_also_where_another_does_not_hold():
    body = {"messages": [{"role": "system", "content": HEADER}], "tools": TOOLS}
    both = frozenset({"billing_header", "tools_sorted"})
    found = rewrite(body, both, CHAT)
    assert [edit.path for edit in found.edits] == [("messages", 0, "content"), ("tools",)]
    assert (found.applied, found.could) == (("billing_header", "tools_sorted"), ())
    assert rewrite(body, frozenset(), CHAT) == ((), (), ("billing_header", "tools_sorted"))
    found = rewrite(body, both, MESSAGES)
    assert ([edit.path for edit in found.edits], found.applied) == ([("tools",)], ("tools_sorted",))


def test_only_a_list_of_tools_is_sorted():
    one, two = {"name": "a"}, {"name": "b"}
    assert sorted_by_name([two, one]) == sorted_by_name((two, one)) == [one, two]
    assert sorted_by_name([]) == []
    for odd in (None, {}, "ab", [one, 7], 7):
        assert sorted_by_name(odd) is None
