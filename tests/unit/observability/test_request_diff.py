"""A changed prefix is named: the message, tool or setting where a request leaves the nearest recent one."""

from __future__ import annotations

import random

import pytest

from proxy.boundaries.layout import layout_of
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.reader import chat_request
from proxy.observability.request_diff import MAX_REQUESTS, RememberedRequest, RequestMemory, volatile_text
from tests.harness.changed_requests import changed_requests


def as_recent(body, rendered: bool = True) -> RememberedRequest:
    text = repr(body.get("tools")) + "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
    return RememberedRequest(
        layout_of(chat_request(body), b"r"), TokenIds.of(map(ord, text)) if rendered else None, len(text)
    )


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
        assert change is not None, case.description
        assert (change.what, change.position) == (case.what, case.index), case.description
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


def test_of_several_versions_of_a_chat_the_nearest_is_named():
    text = LONG + "Speak of the {} alone. " + LONG
    near = messages(text.format("tide"), "First?", "One.", "Second?")
    far = messages(text.format("wind"), "Uno?" * 20, "Another one.", "Third?")
    now = messages(text.format("time"), "First?", "One.", "Second?")
    for others in ([near, far], [far, near]):
        change = changed(*({"messages": other} for other in (*others, now)))
        assert change.old == near[0]
        assert change.characters == len(LONG + "Speak of the ti")


def test_a_changed_setting_is_no_salt():
    recent = RequestMemory(10_000_000)
    body = {"messages": messages(LONG, "First?"), "tools": TOOLS}
    one, other = (as_recent({**body, "tool_choice": choice}, rendered=False) for choice in ("auto", "none"))
    recent.add(one)
    recent.add(other)
    change = recent.change(other)
    assert (change.what, change.role, change.salt, change.token) == ("setting", "tool_choice", False, None)


def test_a_request_that_was_not_rendered_is_compared_all_the_same():
    recent = RequestMemory(10_000_000)
    recent.add(as_recent({"messages": messages(LONG + "one", "Q")}))
    new = as_recent({"messages": messages(LONG + "two", "Q")}, rendered=False)
    recent.add(new)
    change = recent.change(new)
    assert (change.what, change.position, change.token, change.characters) == ("message", 0, None, len(LONG))


def test_a_change_as_the_page_shows_it():
    change = changed({"messages": messages(LONG + "one", "Q")}, {"messages": messages(LONG + "two", "Q")})
    shown = {"what": "message", "index": 0, "role": "system", "characters": len(LONG)}
    shown["token"] = len("None<system>" + LONG)
    assert change.as_json(excerpts=False) == shown
    excerpts = {"before": LONG[-40:] + "one", "now": LONG[-40:] + "two"}
    assert change.as_json(excerpts=True) == {**shown, **excerpts}


def test_what_is_remembered_is_bounded_in_bytes_and_in_number():
    recent = RequestMemory(20_000)
    added = [as_recent({"messages": messages(f"{number} " + "x" * 500, "Q")}) for number in range(3 * MAX_REQUESTS)]
    for request in added:
        recent.add(request)
        kept = list(recent._requests.values())
        assert recent.held == sum(each.size for each in kept) <= 20_000
        assert kept[-1] is request
    assert 1 < len(kept) < MAX_REQUESTS  # the bytes were the limit
    recent.add(as_recent({"messages": messages("x" * 30_000, "Q")}))
    assert list(recent._requests.values()) == kept  # a request that never fits leaves the others alone

    many = RequestMemory(10_000_000)
    for request in added:
        many.add(request)
    assert list(many._requests.values()) == added[-MAX_REQUESTS:]
    assert many.held == sum(each.size for each in added[-MAX_REQUESTS:])


def test_a_request_that_continues_another_takes_its_place():
    recent = RequestMemory(10_000_000)
    recent.add(as_recent({"messages": messages(LONG, "First?")}))
    longer = as_recent({"messages": messages(LONG, "First?", "One.", "Second?")})
    recent.add(longer)
    assert list(recent._requests.values()) == [longer]
    assert recent.held == longer.size
