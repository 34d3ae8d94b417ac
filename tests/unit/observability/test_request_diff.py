"""A changed prefix is named: the message, tool or setting where a request leaves the nearest recent one."""

from __future__ import annotations

import random

import pytest

from proxy.boundaries.candidates import layout_of
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.reader import chat_request
from proxy.observability.request_diff import RememberedRequest, RequestMemory, volatile_text
from tests.harness.changed_requests import changed_requests


def as_recent(body) -> RememberedRequest:
    text = repr(body.get("tools")) + "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
    return RememberedRequest(layout_of(chat_request(body), b"r"), TokenIds.of(map(ord, text)), len(text))


def changed(*bodies):
    """Where the last of these requests leaves one of those before it."""
    recent = RequestMemory(10_000_000)
    for body in bodies:
        last = as_recent(body)
        recent.add(last)
    return recent.change(last)


def test_in_fifty_generated_cases_the_right_part_is_named():
    for case in changed_requests(50, random.Random(4)):
        change = changed(*case.others, case.first, case.second)
        assert change is not None, case.told
        assert (change.what, change.position) == (case.what, case.index), case.told
        assert change.token is not None


def messages(*texts):
    roles = ("system", *("user", "assistant") * 20)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


LONG = "You pilot ships into the harbour, and you name the tide. " * 5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (messages(LONG, "First?"), messages(LONG, "Second?")),
        (messages(LONG, "First?"), messages(LONG, "First?", "One.", "Second?")),
        (messages(LONG, "First?", "One.", "Second?"), messages(LONG, "First?", "Uno.", "Another?")),
        (messages(LONG, "a" * 900, "ok", "sum up"), messages(LONG, "b" * 900, "ok", "sum up")),
        (messages(LONG, "First?"), messages("Nothing in common with it at all. " * 9, "Other?")),
    ],
)
def test_another_request_is_no_change(first, second):
    assert changed({"messages": first}, {"messages": second}) is None


def test_the_salt_alone_is_told_apart():
    body = {"messages": messages(LONG, "First?")}
    change = changed({**body, "cache_salt": "a"}, {**body, "cache_salt": "b"})
    assert change.salt and change.role == "cache_salt"


def test_nothing_is_kept_where_no_text_may_be():
    recent = RequestMemory(0)
    one = as_recent({"messages": messages(LONG, "First?")})
    recent.add(one)
    assert recent.held == 0 and recent.change(one) is None


TOOLS = [{"type": "function", "function": {"name": name, "description": LONG}} for name in ("wind", "tide", "ice")]


@pytest.mark.parametrize(
    ("first", "second", "word"),
    [
        ({"tools": TOOLS}, {"tools": TOOLS[::-1]}, "tools_sorted"),
        ({"system": f"{LONG}\nToday is 2026-11-21."}, {"system": f"{LONG}\nToday is 2026-11-22."}, "dates"),
        (
            {"system": f"<total_tokens>17</total_tokens>{LONG}"},
            {"system": f"<total_tokens>9</total_tokens>{LONG}"},
            "token_counters",
        ),
        (
            {"system": f"{LONG}\nWorking directory: /a"},
            {"system": f"{LONG}\nWorking directory: /b"},
            "working_directory",
        ),
        ({"system": f"{LONG} One."}, {"system": f"{LONG} Two."}, None),
    ],
)
def test_volatile_text_is_recognised(first, second, word):
    def body(part):
        return {"messages": messages(part.get("system", LONG), "First?"), "tools": part.get("tools", TOOLS)}

    change = changed(body(first), body(second))
    assert change is not None and volatile_text(change) == word


def test_text_is_shown_only_where_excerpts_are_on():
    change = changed({"messages": messages(LONG + "secret one", "Q")}, {"messages": messages(LONG + "secret two", "Q")})
    assert "secret" not in str(change.as_json(excerpts=False)) and "secret two" in str(change.as_json(excerpts=True))
