"""Rewrite rules change what they name and no other byte."""

from __future__ import annotations

import json

import pytest

from proxy.chat.chat import CHAT, MESSAGES
from proxy.chat.rewrites import rewrite
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
