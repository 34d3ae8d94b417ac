"""Boundaries of a chat as entries of a hint: by facts of its template, by what an engine has told, or not at all."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from proxy.boundaries.boundary import Boundary, Found, distinct_entries
from proxy.boundaries.finder import MAX_MARKS, BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.resolve import MAX_ENTRIES
from proxy.boundaries.template_facts import Opener, TemplateFacts, Turn
from proxy.chat.chat import MESSAGES
from proxy.chat.reader import chat_in, chat_request, completions_request
from proxy.chat.responses import StoredResponses
from tests.harness.messages import assistant, user

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


def explicit(found: Found) -> list[Any]:
    return [boundary.entry for boundary in found.boundaries if boundary.kind == "explicit"]


CHAT = [SYSTEM, user("First?"), assistant("One."), user("Second?")]

LOOP = [SYSTEM, user("Tide?"), assistant("I will look."), tool("high at nine")]


MARKED = {"tools": [{**TOOLS[0], **EPHEMERAL}]}

EARLIER = [*CHAT[:2], {**CHAT[2], **EPHEMERAL}, CHAT[3], assistant("I will look."), tool("nine")]

LATER = [*EARLIER, assistant("Nine."), user("And?")]

IN_LOOP = [*LOOP[:2], {**LOOP[2], **EPHEMERAL}, LOOP[3], assistant("And the wind."), tool("west")]

PER_USER = TemplateFacts(FACTS.ends, {("user", True): Opener((14,), "<user>", per_user=True)})

CHATS: dict[str, tuple[Any, ...]] = {
    "a chat": (CHAT,),
    "a question": (CHAT[:2],),
    "no system prompt": (CHAT[1:],),
    "tools": (CHAT, {"tools": TOOLS}),
    "a loop": (LOOP,),
    "a loop's second result": ([*LOOP, tool("x")],),
    "a result before the first question": ([SYSTEM, LOOP[2], tool("9"), CHAT[2], CHAT[3]],),
    "no answer wanted": (CHAT, {"add_generation_prompt": False}),
    "an answer begun": (CHAT, {"continue_final_message": True}),
    "answered": ([*CHAT, assistant("Two.")],),
    "the template's markers in the last text": ([*CHAT[:3], user("a <user> b <user>")],),
    "markers in the system prompt": ([{**SYSTEM, "content": "Say <user>."}, *CHAT[1:]],),
    "markers between": ([SYSTEM, user("<user>"), assistant("<user>"), user("?")],),
    "facts of nothing": (CHAT, {}, TemplateFacts()),
    "no facts": (CHAT, {}, None),
    **{f"no chat, {odd}": (odd,) for odd in ([7], [{}], [SYSTEM], [assistant("only me")])},
    # a message without a text has its place all the same
    **{
        f"odd, {odd}": ([*CHAT[:3], odd],)
        for odd in ({"role": "user"}, user(5), user([{"type": "image_url"}]), user([7]), user([text_part("x"), 7]))
    },
    # a client's marks
    "marked tools": (CHAT, MARKED),
    "marked tools and head": ([{**SYSTEM, **EPHEMERAL}, *CHAT[1:]], MARKED),
    "marked tools alone": ([user("Tide?")], MARKED),
    "marked question": ([*CHAT[:3], {**CHAT[3], **EPHEMERAL}],),
    "marked history": ([*CHAT[:2], {**CHAT[2], **EPHEMERAL}, CHAT[3]],),
    "marked before a loop": (EARLIER,),
    "marked before a loop, tools": (EARLIER, {"tools": TOOLS}),
    "marked before a loop that is over": (LATER,),
    "marked before a loop that is over, tools": (LATER, {"tools": TOOLS}),
    "marked before a loop, told of users alone": (LATER, {"tools": TOOLS}, PER_USER),
    "marked in a loop": (IN_LOOP,),
    "marked in a loop that is over": ([*IN_LOOP, assistant("Both."), user("Thanks?")],),
}


@pytest.mark.parametrize("case", CHATS)
def test_each_kind_of_chat_has_its_boundaries(case, expect_golden):
    messages, body, facts = [*CHATS[case], *({}, FACTS)[len(CHATS[case]) - 1 :]]
    found = find(messages, facts, **body)
    lines = [*map(str, shown(found)), f"result {found.result}, failure {found.failure}, end {found.end}"]
    expect_golden("finder", case, "\n".join(lines))
    assert set(found.entries()) == {entry for _, entry in shown(found)} - {None}
    assert (found.turn_key is None) is ("turn" not in dict(shown(found)))


def test_a_turn_that_is_rendered_anew_once_it_is_answered_is_no_boundary():
    broken = frozenset({Turn("tool", later=True, system=True, tools=False)})
    found = find(LOOP, TemplateFacts(FACTS.ends, FACTS.openers, broken))
    assert ("turn", -7) not in shown(found) and found.end is None  # its length would be that of words that change
    borrowed = find(CHAT, FACTS.borrowed({"user": 9}))  # of another setting: good for a hint and not for lengths
    assert ("turn", -9) in shown(borrowed) and borrowed.end is None


def test_a_position_that_an_engine_has_told_stands_in_for_a_fact_and_an_estimate_is_never_sent():
    positions = PositionCache(10**6)
    keys = {boundary.kind: boundary.key for boundary in find(CHAT).boundaries}
    positions.put(keys["system"], 40)
    found = find(CHAT, None, positions)
    assert (found.entries(), found.result, found.failure) == ((40,), "head", None)
    assert shown(find(CHAT, positions=positions)) == shown(find(CHAT))  # a fact goes before it
    assert find(CHAT, None).prefixes == find(CHAT).prefixes
    for facts in (None, TemplateFacts(), FACTS):
        sized = BoundaryFinder(PositionCache(10**6)).find(chat_request({"messages": CHAT}), facts, b"r", 4000, 0.25)
        assert all(boundary.estimate > 100 and not boundary.tokens for boundary in sized.boundaries)
        assert not any(isinstance(entry, int) and entry > 0 for entry in sized.entries())


def test_no_hint_is_longer_than_an_engine_takes_and_the_deepest_positions_save_the_most():
    assert distinct_entries([None, *range(1, 40), 1]) == tuple(range(1, MAX_ENTRIES + 1))
    many = Found(tuple(Boundary("explicit", b"%d" % number, number, number) for number in range(1, 40)))
    assert many.entries() == tuple(range(1, 17))
    parts = [text_part(f"{number}", **EPHEMERAL) for number in range(3 * MAX_MARKS)]
    assert len(explicit(find([SYSTEM, user(parts)]))) == MAX_MARKS


def test_every_boundary_is_found_again_among_the_prefixes_of_the_next_request_the_shortest_first():
    parts = user([text_part("The tide table.", **EPHEMERAL), text_part("When?")])
    for messages in (CHAT, LOOP, [SYSTEM, parts], [*CHAT[:2], {**CHAT[2], **EPHEMERAL}, *CHAT[3:], assistant("x")]):
        found = find(messages)
        assert {boundary.key for boundary in found.boundaries} <= set(found.prefixes)
        grown = find([*messages, assistant("Yes."), user("And?"), assistant("No."), user("More?")])
        between = {boundary.key for boundary in found.boundaries if boundary.kind != "explicit"}
        assert between <= set(grown.prefixes)
        assert [key for key in grown.prefixes if key in between] == [key for key in found.prefixes if key in between]
    completion = completions_request({"prompt": "Tide?"})
    bare = BoundaryFinder(PositionCache(10**6)).find(completion, FACTS, b"renderer")
    assert not bare.boundaries and not {*bare.prefixes} & {*find([user("Tide?")]).prefixes}


def test_a_mark_inside_a_message_waits_for_its_position_whatever_stands_behind_it():
    positions = PositionCache(10**6)
    one, other = ([SYSTEM, user([text_part("Table.", **EPHEMERAL), text_part(end)])] for end in ("When?", "Where?"))
    (place,) = find(one, positions=positions).unplaced
    assert explicit(find(one)) == [None] and (place.message, place.part, place.kept) == (1, 0, "")
    positions.put(place.key, 70)
    assert explicit(find(one, positions=positions)) == explicit(find(other, positions=positions)) == [70]


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
