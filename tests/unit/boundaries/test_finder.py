"""Boundaries of a chat as entries of a hint: by facts of its template, by what an engine has told, or not at all."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from proxy.boundaries.boundary import Found
from proxy.boundaries.divergence import DivergenceLearner
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.template_facts import Opener, TemplateFacts
from proxy.chat.chat import MESSAGES
from proxy.chat.reader import chat_in, chat_request
from proxy.chat.responses import StoredResponses

SYSTEM = {"role": "system", "content": "You pilot ships into the harbour."}

TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]

EPHEMERAL = {"cache_control": {"type": "ephemeral"}}

FACTS = TemplateFacts(
    ends={"user": 5, "tool": 7},
    openers={
        ("first", False): Opener((1, 2), "<user>"),
        ("alone", False): Opener((3,), "<user>"),
        ("user", False): Opener((4, 5), "<user>", per_user=True),
        ("tool", False): Opener((6,), "<tool>"),
        ("results", False): Opener((7,), "<tool>"),
        ("first", True): Opener((11,), "<user>"),
        ("alone", True): Opener((13,), "<user>"),
        ("user", True): Opener((14,), "<user>", no_tool=True),
        ("tool", True): Opener((16,), "<tool>"),
    },
)


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def text_part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def find(
    messages: Any, facts: TemplateFacts | None = FACTS, positions: PositionCache | None = None, **body: Any
) -> Found:
    use = BoundaryFinder(positions if positions is not None else PositionCache(10**6))
    return use.find(chat_request({"messages": messages, **body}), facts, b"renderer")


def shown(found: Found) -> list[tuple[str, Any]]:
    """Kind and entry of each boundary; by kind, because the order of what has no length yet is not known."""
    return sorted(((boundary.kind, boundary.entry) for boundary in found.boundaries), key=repr)


CHAT = [SYSTEM, user("First?"), assistant("One."), user("Second?")]

LOOP = [SYSTEM, user("Tide?"), assistant("I will look."), tool("high at nine")]


def test_reminders_behind_the_user_message_belong_to_the_turn_before_the_loop():
    reminded = [
        SYSTEM,
        user("Tide?"),
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "!"},
    ]
    found = find([*reminded, *LOOP[2:]])
    ends = {boundary.key for boundary in found.boundaries if boundary.kind == "turn"}
    assert find(reminded).turn_key in ends and find(reminded[:2]).turn_key not in ends


def test_a_chat_that_begins_with_a_tools_result_has_no_entry_for_its_head():
    """The first user message lies behind the result then, and so behind the head."""
    found = find([SYSTEM, assistant("I will look."), tool("nine"), assistant("Nine."), user("Thanks?")])
    assert shown(found) == [("history", "last:4,5"), ("system", None), ("turn", -5)]


def test_a_client_that_asks_for_no_answer_ends_no_turn():
    assert "turn" in dict(shown(find(CHAT)))
    for body in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        found = find(CHAT, **body)
        assert "turn" not in dict(shown(found)) and (found.turn_key, found.end) == (None, None)
    assert "turn" not in dict(shown(find([*CHAT, assistant("Two.")])))


@pytest.mark.parametrize(
    "odd",
    [{"role": "user"}, user(None), user(5), user([{"type": "image_url"}]), user([7]), user([text_part("x"), 7])],
)
def test_a_message_without_a_text_has_its_place_all_the_same(odd):
    assert shown(find([SYSTEM, user("First?"), assistant("One."), odd])) == shown(find(CHAT))


# What a template is not known for.


def test_without_facts_there_is_no_hint_but_the_prefixes_are_known_to_the_gateway():
    found = find(CHAT, None)
    assert (found.entries(), found.failure, found.result, found.end) == ((), "no_facts", "none", None)
    assert {boundary.key for boundary in found.boundaries} == {boundary.key for boundary in find(CHAT).boundaries}
    assert found.prefixes == find(CHAT).prefixes


# Places that a client marked.


def explicit(found: Found) -> list[Any]:
    return [boundary.entry for boundary in found.boundaries if boundary.kind == "explicit"]


def test_a_mark_on_tools_or_system_prompt_is_the_head_once():
    marked_tools = [{**TOOLS[0], **EPHEMERAL}]
    for messages, tools in ((CHAT, marked_tools), ([{**SYSTEM, **EPHEMERAL}, *CHAT[1:]], marked_tools)):
        assert shown(find(messages, tools=tools)) == shown(find(CHAT, tools=TOOLS))
    assert shown(find([user("Tide?")], tools=marked_tools)) == [("system", "last:13"), ("turn", -5)]


def test_a_mark_before_an_earlier_question_is_not_counted_across_tools_unless_these_hold_no_opener():
    messages = [*CHAT[:2], {**CHAT[2], **EPHEMERAL}, CHAT[3], assistant("I will look."), tool("nine")]
    assert explicit(find(messages)) == [None]  # told of chats without tools' results only
    assert explicit(find(messages, tools=TOOLS)) == ["last:14"]
    later = [*messages, assistant("Nine."), user("And?")]
    assert explicit(find(later)) == [None] and explicit(find(later, tools=TOOLS)) == ["last-1:14"]
    per_user = TemplateFacts(FACTS.ends, {("user", True): Opener((14,), "<user>", per_user=True)})
    assert explicit(find(later, per_user, tools=TOOLS)) == [None]


def test_a_mark_before_an_earlier_tools_result_has_no_entry():
    messages = [*LOOP[:2], {**LOOP[2], **EPHEMERAL}, LOOP[3], assistant("And the wind."), tool("west")]
    assert explicit(find(messages)) == [None]
    assert explicit(find([*messages, assistant("Both."), user("Thanks?")])) == [None]


def test_a_mark_on_the_last_message_is_the_turn():
    assert shown(find([*CHAT[:3], {**CHAT[3], **EPHEMERAL}])) == shown(find(CHAT))


def test_a_mark_inside_a_system_prompt_is_a_beginning_of_its_text():
    blocks = [text_part("You pilot.", **EPHEMERAL), text_part("Be brief.")]
    body = {"model": "m", "system": blocks, "messages": [user("First?"), assistant("One."), user("Second?")]}
    chat = chat_in(MESSAGES, body, StoredResponses(10**6))
    positions = PositionCache(10**6)
    found = BoundaryFinder(positions).find(chat, FACTS, b"renderer")
    (place,) = found.unplaced
    assert (place.message, place.kept, place.part) == (0, "You pilot.", None)
    positions.put(place.key, 20)
    assert 20 in BoundaryFinder(positions).find(chat, FACTS, b"renderer").entries()


# Texts that hold a template's own markers.


# Keys and their order.


# A tokenizer and template of the generated models.


def test_beginnings_inside_a_message_come_shortest_first():
    blocks = [text_part("a" * 600 + "\n", **EPHEMERAL), text_part("b" * 3000 + f"\nToday is {date.today()}.")]
    body = {"model": "m", "system": blocks, "messages": [user("q")]}
    found = BoundaryFinder(PositionCache(10**6)).find(chat_in(MESSAGES, body, StoredResponses(0)), None, b"r", 4000)
    kinds = {boundary.key: boundary.kind for boundary in found.boundaries}
    assert [kinds[key] for key in found.prefixes if key in kinds] == ["explicit", "learned", "system", "turn"]


def test_marked_parts_and_shared_beginnings_of_one_message_come_shortest_first():
    learner = DivergenceLearner(10**7)
    use = BoundaryFinder(PositionCache(10**6), learner)

    def ask(text: str) -> Found:
        parts = [text_part("one"), text_part("two", **EPHEMERAL), text_part(text)]
        return use.find(chat_request({"messages": [user(parts)]}), None, b"r", 9000, by_texts=True)

    line = "The tide turns at nine.\n"
    for lines, last in ((300, "a"), (300, "b"), (100, "c"), (100, "d"), (300, "a")):
        found = ask(line * lines + last * 100)
    kinds = {boundary.key: (boundary.kind, boundary.estimate) for boundary in found.boundaries}
    shown_at = [kinds[key] for key in found.prefixes if key in kinds]
    assert [kind for kind, _ in shown_at[:3]] == ["history", "explicit", "learned"] and len(shown_at) > 4
    assert shown_at[2:] == sorted(shown_at[2:], key=lambda each: each[1])


def test_an_opener_with_a_line_break_is_counted_in_arguments_as_json_writes_it():
    opener = Opener((4, 5), "<user>\n", per_user=True)
    facts = TemplateFacts(openers={("user", False): opener})
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"t": "<user>\\n<user>\\n"}'}}
    marked, calls = assistant("One.", **EPHEMERAL), assistant("", tool_calls=[call])
    found = find([SYSTEM, user("First?"), marked, user("Second?"), calls, user("Third?")], facts)
    assert ("explicit", "last-3:4,5") in shown(found)


# Where estimates lie, and what is told of places without an entry.


def test_a_place_before_a_date_is_told_by_its_tokens_once_and_needs_no_render():
    dated = {"role": "system", "content": "x" * 700 + f"\nToday is {date.today()}."}
    use = BoundaryFinder(PositionCache(10**6))

    def ask(facts: TemplateFacts | None) -> Found:
        return use.find(chat_request({"messages": [dated, user("q")]}), facts, b"renderer")

    first = ask(FACTS)
    assert first.dated is not None and first.dated in first.unplaced
    assert first.dated.kept == "x" * 700 + "\n" and ask(None).dated is None
    entry = use.dates.learn(b"renderer", first.dated.key, range(100))
    told = ask(TemplateFacts())
    assert (told.dated, told.entries(), told.result) == (None, (entry,), "head")
    assert first.dated not in told.unplaced
    assert ask(FACTS).result == "learnt"
    use.dates.learn(b"renderer", first.dated.key, range(3))  # nothing names it
    untold = ask(FACTS)
    assert untold.dated is None and [each.entry for each in untold.boundaries if each.kind == "learned"] == [None]
