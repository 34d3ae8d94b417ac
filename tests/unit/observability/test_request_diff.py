"""A changed prefix is named: the message, tool or setting where a request leaves the nearest recent one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import get_args

import pytest

from proxy.boundaries.layout import layout_of
from proxy.chat.chat import CHAT, MESSAGES
from proxy.chat.reader import chat_in, chat_request
from proxy.chat.responses import StoredResponses
from proxy.observability.cures import CHANGE_TEXT
from proxy.observability.request_diff import (
    MAX_REQUESTS,
    MAX_TOOL_BYTES,
    PrefixChange,
    RememberedRequest,
    RequestMemory,
)
from proxy.observability.volatile_text import TextKind
from tests.harness.changed_requests import changed_requests
from tests.harness.steps import finished


def remembering(size: int) -> RequestMemory:
    return RequestMemory(size, now=lambda: 1795600000.0)


def as_recent(body) -> RememberedRequest:
    return RememberedRequest(layout_of(chat_request(body), b"r"), len(json.dumps(body)))


PROMPT = 1000  # tokens


def changed(*bodies):
    """Where the last of these requests leaves one of those before it; its engine has seen nothing like it."""
    recent = remembering(10_000_000)
    for body in bodies:
        last = as_recent(body)
        recent.add(last)
    return finished(recent.seek_change(last, PROMPT, 0))


def test_in_fifty_generated_cases_the_right_part_is_named():
    for case in changed_requests(50, random.Random(4)):
        change = changed(*case.others, case.first, case.second)
        assert change is not None, case.description
        assert (change.what, change.position) == (case.what, case.index), case.description


def messages(*texts):
    roles = ("system", *("user", "assistant") * 20)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


LONG = "You pilot ships into the harbour, and you name the tide. " * 5


def test_the_salt_alone_is_told_apart():
    body = {"messages": messages(LONG, "First?"), "tool_choice": "auto"}
    change = changed({**body, "cache_salt": "a"}, {**body, "cache_salt": "b"})
    assert change.is_salt and change.lost > 0.8 * PROMPT
    shown = change.as_json(excerpts=True)
    assert shown["before"] is None and shown["now"] is None
    for other in ({"cache_salt": "b", "tool_choice": "none"}, {"model": "b", "tool_choice": "none"}):
        assert changed({**body, "cache_salt": "a", "model": "a"}, {**body, "model": "a", **other}) is None


def test_of_two_owners_neither_learns_of_the_other():
    memory, kept = remembering(10**7), []
    first, longer = (messages(LONG, "Tide?", *turns) for turns in ((), ("At nine.", "And then?")))
    for owner, said in (("ann", first), ("bo", longer), ("ann", longer)):
        kept.append(RememberedRequest(layout_of(chat_request({"messages": said}), b"r"), 100, owner))
        memory.add(kept[-1])
        kept[-1].prompt = PROMPT
        assert finished(memory.seek_change(kept[-1], PROMPT, 0)) is None
    assert [each.continued is not None for each in kept] == [False, False, True]


def test_nothing_is_kept_where_no_text_may_be():
    recent = remembering(0)
    one = as_recent({"messages": messages(LONG, "First?")})
    recent.add(one)
    assert recent.held == 0 and finished(recent.seek_change(one, PROMPT, 0)) is None


RULES = "Keep clear of the bar at low water, and call the lock an hour before you are there. " * 40

TOOLS = [{"type": "function", "function": {"name": name, "description": LONG}} for name in ("wind", "tide", "ice")]


AT_NOON, LATER = (messages(f"{LONG}It is {time} now. {LONG}", LONG, "Aye.", "Tide?") for time in ("12:05", "18:21"))

THINKS = {"role": "assistant", "content": None, "reasoning": LONG, "tool_calls": [{"function": {"name": "wind"}}]}

TURNED = [*messages(LONG, LONG), THINKS, {"role": "tool", "content": LONG}]

TURNED_AGAIN = [*TURNED[:2], {**THINKS, "reasoning": "Well."}, TURNED[3]]


@pytest.mark.parametrize(
    ("first", "second", "what", "position", "role", "kind", "character"),
    [
        # Of messages; all kinds of text are in test_volatile_text.py.
        (AT_NOON, LATER, "message", 0, "system", "times", len(f"{LONG}It is 1")),
        (messages(f"{LONG} One.", LONG), messages(f"{LONG} Two.", LONG), "message", 0, "system", None, len(LONG) + 1),
        (TURNED, TURNED_AGAIN, "message", 2, "assistant", "thinking_history", None),
        (TURNED, [*TURNED[:2], *TURNED[:1], *TURNED[2:]], "message", 2, "system", "system_moved", None),
        # Of tools: their order, that of their keys, and what they say.
        (TOOLS, TOOLS[::-1], "tool", 0, "ice", "tools_sorted", None),
        (TOOLS, [TOOLS[0], dict(reversed(TOOLS[1].items())), TOOLS[2]], "tool", 1, "tide", "tool_keys_sorted", 2),
        (TOOLS[:-1], TOOLS, "tool", 2, "ice", None, None),
    ],
)
def test_the_first_difference_is_named(first, second, what, position, role, kind, character):
    def body(part):
        return {"messages": messages(LONG, "Q"), "tools": part} if part[0].keys() >= {"type"} else {"messages": part}

    change = changed(body(first), body(second))
    assert change[:5] == (what, position, role, character, kind)


def continued_by(before: dict, after: dict, path: str = CHAT) -> tuple[RequestMemory, RememberedRequest]:
    """A request that continues another one of 1,000 tokens."""
    memory, last = remembering(10**7), None
    for body in (before, after):
        last = RememberedRequest(layout_of(chat_in(path, body, StoredResponses(0)), b"r"), len(json.dumps(body)))
        memory.add(last)
        last.prompt = PROMPT
    assert last is not None and finished(memory.seek_change(last, PROMPT, 0)) is None
    return memory, last


def test_a_days_question_asked_again_the_next_day_differs_by_its_date():
    """As agents do that put a reminder with the date before the user's own words, in one message."""

    def bodies(said):
        return (
            {"messages": [*messages(RULES), {"role": "user", "content": said(f"2026-11-{day}")}]} for day in (22, 23)
        )

    def reminder(day):
        texts = (f"<reminder>\n{LONG}\nToday's date is {day}.\n\n{LONG}</reminder>", "How do the events run?")
        return [{"type": "text", "text": text} for text in texts]

    change = changed(*bodies(reminder))
    assert (change.position, change.kind) == (1, "dates")
    assert changed(*bodies(lambda day: f"What is the tide on {day}? Answer like this: {LONG}")) is None


THOUGHT = [
    {"role": "user", "content": "Fix the rounding."},
    {"role": "assistant", "content": "I look.", "reasoning": "Let me look at the file first. " * 20},
    {"role": "tool", "content": "round(x)" * 20, "tool_call_id": "c"},
]


NEXT = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now the other one."}]


def test_thinking_that_a_template_drops_is_named_by_what_is_missing():
    before = [*messages(RULES), *THOUGHT]
    memory, last = continued_by({"messages": before}, {"messages": [*before, *NEXT]})

    def otherwise(shared: int) -> PrefixChange | None:
        return finished(memory.rendered_otherwise(last, shared))

    assert otherwise(PROMPT - 5) is None  # all of it but the words that ask for an answer
    assert otherwise(16) is None  # an engine that has forgotten it
    change = otherwise(PROMPT - 400)
    assert (change.kind, change.position, change.role) == ("thinking_history", 2, "assistant")
    assert (change.token, change.lost) == (PROMPT - 400, 400)
    assert "truncate_history_thinking" in change.as_json(excerpts=True)["cure"]


def test_reminders_that_vllm_merges_into_the_system_prompt_are_named():
    loop = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "done"}]}]
    said = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "Yes."}, *loop]
    first = {"system": RULES, "messages": said}
    second = {"system": RULES, "messages": [*said, {"role": "system", "content": "Use the list of tasks."}]}
    memory, last = continued_by(first, second, MESSAGES)
    change = finished(memory.rendered_otherwise(last, PROMPT - 300))
    assert (change.kind, change.lost) == ("system_merged", 300)


def test_each_kind_has_a_cure_and_a_row_in_the_readme():
    readme = (Path(__file__).parents[3] / "proxy" / "README.md").read_text()
    told = {
        word for line in readme.splitlines() if line.startswith("| `") for word in line.split("|")[1].split("`")[1::2]
    }
    assert set(get_args(TextKind)) <= set(CHANGE_TEXT) <= told
    for text in CHANGE_TEXT.values():
        assert text.cure[0].isupper() and text.cure[-1] == "."


def test_what_is_remembered_is_bounded_in_bytes_and_in_number():
    added = [as_recent({"messages": messages(f"{number} " + "x" * 500, "Q")}) for number in range(3 * MAX_REQUESTS)]
    few, many = remembering(20_000), remembering(10_000_000)
    for request in added:
        few.add(request)
        many.add(request)
        kept = list(few._requests.values())
        assert few.held == sum(each.size for each in kept) <= 20_000 and kept[-1] is request
    assert 1 < len(kept) < MAX_REQUESTS  # the bytes were the limit
    few.add(as_recent({"messages": messages("x" * 30_000, "Q")}))
    assert list(few._requests.values()) == kept  # a request that never fits leaves the others alone
    assert list(many._requests.values()) == added[-MAX_REQUESTS:]
    assert many.held == sum(each.size for each in added[-MAX_REQUESTS:])


SAID = [{"role": "user", "content": "Fix the rounding."}, {"role": "assistant", "content": "I look." * 20}]


@pytest.mark.parametrize(
    ("before", "added"),
    [
        (THOUGHT, NEXT[:1]),  # the loop is not over: no user has spoken
        (SAID, NEXT),  # nobody thought
        ([*THOUGHT[:2], {"role": "user", "content": "Next."}, *SAID[1:]], NEXT),  # not since the user spoke last
        (THOUGHT, [NEXT[0], {"role": "system", "content": "Use the list."}]),  # merged by the messages API alone
    ],
)
def test_without_thinking_of_a_loop_that_is_over_nothing_is_dropped(before, added):
    before = [*messages(RULES), *before]
    memory, last = continued_by({"messages": before}, {"messages": [*before, *added]})
    assert finished(memory.rendered_otherwise(last, 500)) is None


def test_into_a_tool_that_is_too_long_nobody_looks_for_another_order_of_keys():
    chat = messages(LONG * 100, LONG * 1000, "tide?")
    kinds = []
    for size in (100, MAX_TOOL_BYTES):
        one = {"type": "function", "function": {"name": "wind", "description": "x" * size}}
        other = {"function": dict(reversed(one["function"].items())), "type": "function"}
        change = changed({"messages": chat, "tools": [one]}, {"messages": chat, "tools": [other]})
        assert change is not None and (change.what, change.position) == ("tool", 0)
        kinds.append((change.kind, change.characters is None))
    assert kinds == [("tool_keys_sorted", False), (None, True)]
