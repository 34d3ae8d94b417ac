"""Rewrite rules change what they name and no other byte."""

from __future__ import annotations

import json

import pytest

from proxy.chat.chat import CHAT, MESSAGES
from proxy.chat.rewrites import rewrite, sorted_by_name
from proxy.http.json_body import with_edits

HEADER = "x-anthropic-billing-header: cc_version=2.1; cch=1f3a;"

BOTH = frozenset({"billing_header", "tools_sorted"})

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("wind", "tide")]

SYSTEM, DEVELOPER, USER = ({"role": role, "content": HEADER} for role in ("system", "developer", "user"))

PARTS = {"role": "system", "content": [7, {"type": "text", "text": HEADER}, {"type": "text", "text": 7}]}

FIRST, SECOND, THIRD = (("messages", index, "content") for index in range(3))


@pytest.mark.parametrize(
    ("body", "paths"),
    [
        ({"messages": [SYSTEM, DEVELOPER, USER, SYSTEM]}, [FIRST, SECOND]),  # what a user wrote stays
        ({"messages": [SYSTEM, PARTS, DEVELOPER]}, [FIRST, (*SECOND, 1, "text"), THIRD]),
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
