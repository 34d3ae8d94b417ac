"""Boundaries of a chat as entries of a hint: by facts of its template, by what an engine has told, or not at all."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import date
from typing import Any

import pytest

from proxy.boundaries import finder
from proxy.boundaries.boundary import Found
from proxy.boundaries.divergence import DivergenceLearner
from proxy.boundaries.finder import MAX_MARKS, BoundaryFinder
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.resolve import MAX_ENTRIES, resolve
from proxy.boundaries.template_facts import Opener, TemplateFacts, Turn
from proxy.boundaries.token_ids import common_prefix
from proxy.chat.chat import MESSAGES
from proxy.chat.reader import chat_in, chat_request, completions_request
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


def without(missing: str) -> TemplateFacts:
    """Facts that have no opener in one place."""
    openers = {where: opener for where, opener in FACTS.openers.items() if where[0] != missing}
    return TemplateFacts(FACTS.ends, openers)


def test_a_longer_chat_has_a_system_prompt_a_history_and_a_turn():
    found = find(CHAT)
    assert shown(found) == [("history", "last:4,5"), ("system", "first:1,2"), ("turn", -5)]
    assert (found.result, found.failure, found.end) == ("learnt", None, 5)


def test_a_question_alone_shares_its_system_prompt():
    assert shown(find([SYSTEM, user("Tide?")])) == [("system", "last:3"), ("turn", -5)]


def test_without_system_prompt_and_tools_nothing_stands_before_the_first_text():
    assert shown(find(CHAT[1:])) == [("history", "last:4,5"), ("turn", -5)]


def test_tools_belong_to_the_system_prompt_and_have_openers_of_their_own():
    for messages in (CHAT, CHAT[1:]):
        assert shown(find(messages, tools=TOOLS)) == [("history", "last:14"), ("system", "first:11"), ("turn", -5)]


def test_a_tool_loop_has_the_turn_before_it_once_that_is_told():
    positions = PositionCache(10**6)
    found = find(LOOP, positions=positions)
    assert shown(found) == [("history", "last:6"), ("system", "first:1,2"), ("turn", -7), ("turn", None)]
    first = find(LOOP[:2])
    assert first.turn_key is not None
    positions.put(first.turn_key, 123)
    assert ("turn", 123) in shown(find(LOOP, positions=positions))


def test_a_tools_result_behind_another_one_has_an_opener_of_its_own():
    assert ("history", "last:7") in shown(find([*LOOP, tool("low at three")]))
    assert ("history", "last:7") in shown(find([*LOOP, {"role": "function", "content": "low at three"}]))
    assert ("history", "last:6") in shown(find([*LOOP, assistant("And the wind."), tool("west")]))


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


def test_a_turn_that_is_rendered_anew_once_it_is_answered_is_no_boundary():
    broken = frozenset({Turn("tool", later=True, system=True, tools=False)})
    facts = TemplateFacts(FACTS.ends, FACTS.openers, broken)
    found = find(LOOP, facts)
    assert shown(found) == [("history", "last:6"), ("system", "first:1,2"), ("turn", None)]
    assert found.end is None  # its length would be that of words that change
    assert ("turn", -5) in shown(find(CHAT, facts)) and ("turn", -7) in shown(find(LOOP[1:], facts))


def test_a_client_that_asks_for_no_answer_ends_no_turn():
    assert "turn" in dict(shown(find(CHAT)))
    for body in ({"add_generation_prompt": False}, {"continue_final_message": True}):
        found = find(CHAT, **body)
        assert "turn" not in dict(shown(found)) and (found.turn_key, found.end) == (None, None)
    assert "turn" not in dict(shown(find([*CHAT, assistant("Two.")])))


def test_a_role_whose_end_is_not_known_ends_its_turn_somewhere():
    found = find(CHAT, TemplateFacts({}, FACTS.openers))
    assert shown(found) == [("history", "last:4,5"), ("system", "first:1,2"), ("turn", None)] and found.end is None


def test_a_template_that_asks_for_no_answer_ends_its_turn_one_token_before_the_prompts_end():
    found = find(CHAT, TemplateFacts({"user": 0}, FACTS.openers))
    assert ("turn", -1) in shown(found) and found.end == 1


def test_facts_of_another_setting_are_good_for_a_hint_and_not_for_lengths():
    found = find(CHAT, FACTS.borrowed({"user": 9, "tool": 9}))
    assert shown(found) == [("history", "last:4,5"), ("system", "first:1,2"), ("turn", -9)]
    assert found.end is None


@pytest.mark.parametrize(
    "messages",
    [None, [], "text", [7], [None], [{}], [SYSTEM], [assistant("only me")]],
)
def test_a_chat_that_nobody_else_could_go_on_with_has_no_boundary(messages):
    found = find(messages)
    assert (found.boundaries, found.entries(), found.failure) == ((), (), "no_boundary")


@pytest.mark.parametrize(
    "odd",
    [{"role": "user"}, user(None), user(5), user([{"type": "image_url"}]), user([7]), user([text_part("x"), 7])],
)
def test_a_message_without_a_text_has_its_place_all_the_same(odd):
    assert shown(find([SYSTEM, user("First?"), assistant("One."), odd])) == shown(find(CHAT))


def test_a_chat_of_too_many_messages_has_no_boundary(monkeypatch):
    monkeypatch.setattr(finder, "MAX_MESSAGES", len(CHAT))
    assert find(CHAT).boundaries
    assert (find([*CHAT, user("Third?")]).boundaries, find([*CHAT, user("x")]).failure) == ((), "no_boundary")


def test_a_prompt_without_messages_is_left_to_the_engine_and_begins_like_no_chat():
    chats = completions_request({"prompt": "Tide?"}), chat_request({"messages": [user("Tide?")]})
    found, of_chat = (BoundaryFinder(PositionCache(10**6)).find(chat, FACTS, b"renderer") for chat in chats)
    assert (found.boundaries, found.failure) == ((), None)
    assert not {*found.prefixes} & {*of_chat.prefixes}


# What a template is not known for.


def test_without_facts_there_is_no_hint_but_the_prefixes_are_known_to_the_gateway():
    found = find(CHAT, None)
    assert (found.entries(), found.failure, found.result, found.end) == ((), "no_facts", "none", None)
    assert {boundary.key for boundary in found.boundaries} == {boundary.key for boundary in find(CHAT).boundaries}
    assert found.prefixes == find(CHAT).prefixes


@pytest.mark.parametrize(
    ("missing", "kind", "messages"), [("first", "system", CHAT), ("user", "history", CHAT), ("tool", "history", LOOP)]
)
def test_an_opener_that_is_not_known_costs_its_boundary_only(missing, kind, messages):
    found, whole = find(messages, without(missing)), find(messages)
    assert (kind, None) in shown(found) and found.failure is None
    assert set(found.entries()) == set(whole.entries()) - {dict(shown(whole))[kind]}


def test_facts_that_tell_nothing_of_this_chat_are_no_boundary():
    found = find(CHAT, TemplateFacts())
    assert (found.entries(), found.failure) == ((), "no_boundary")


def test_a_position_that_an_engine_has_told_stands_in_for_a_fact():
    positions = PositionCache(10**6)
    head = {boundary.kind: boundary.key for boundary in find(CHAT).boundaries}
    positions.put(head["system"], 40)
    found = find(CHAT, None, positions)
    assert (found.entries(), found.result, found.failure) == ((40,), "head", None)
    assert find(CHAT, without("first"), positions).result == "learnt"
    assert set(find(CHAT, without("first"), positions).entries()) == {40, "last:4,5", -5}


def test_a_fact_goes_before_a_remembered_position():
    positions = PositionCache(10**6)
    for boundary in find(CHAT).boundaries:
        positions.put(boundary.key, 40)
    found = find(CHAT, positions=positions)
    assert shown(found) == shown(find(CHAT)) and {boundary.tokens for boundary in found.boundaries} == {40}


def test_an_estimate_is_never_sent():
    body = {"messages": CHAT}
    use = BoundaryFinder(PositionCache(10**6))
    for facts in (None, TemplateFacts(), FACTS):
        found = use.find(chat_request(body), facts, b"renderer", 4000, 0.25)
        assert all(boundary.estimate > 100 and not boundary.tokens for boundary in found.boundaries)
        assert not any(isinstance(entry, int) and entry > 0 for entry in found.entries())


def test_an_estimate_leaves_out_what_stands_behind_and_puts_the_boundaries_in_order():
    messages = [SYSTEM, user("x" * 1000), assistant("y" * 2000), user("z" * 400)]
    found = BoundaryFinder(PositionCache(10**6)).find(chat_request({"messages": messages}), FACTS, b"r", 4000, 0.5)
    assert [(boundary.kind, boundary.estimate) for boundary in found.boundaries] == [
        ("system", 300),
        ("history", 1800),
        ("turn", 2000),
    ]


# Places that a client marked.


def explicit(found: Found) -> list[Any]:
    return [boundary.entry for boundary in found.boundaries if boundary.kind == "explicit"]


def test_a_mark_on_tools_or_system_prompt_is_the_head_once():
    marked_tools = [{**TOOLS[0], **EPHEMERAL}]
    for messages, tools in ((CHAT, marked_tools), ([{**SYSTEM, **EPHEMERAL}, *CHAT[1:]], marked_tools)):
        assert shown(find(messages, tools=tools)) == shown(find(CHAT, tools=TOOLS))
    assert shown(find([user("Tide?")], tools=marked_tools)) == [("system", "last:13"), ("turn", -5)]


def test_a_mark_at_the_end_of_a_message_before_the_last_question_is_the_history():
    assert shown(find([*CHAT[:2], {**CHAT[2], **EPHEMERAL}, CHAT[3]])) == shown(find(CHAT))


def test_a_mark_before_an_earlier_question_skips_the_later_ones():
    marked = [*CHAT[:2], {**CHAT[2], **EPHEMERAL}, CHAT[3], assistant("Two."), user("Third?"), assistant("Three.")]
    for more in range(3):
        messages = [*marked, *[user("More?"), assistant("Yes.")] * more, user("And?")]
        assert explicit(find(messages)) == [f"last-{more + 2}:4,5"]


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


def test_a_mark_before_an_answer_is_sent_once_its_position_is_told():
    positions = PositionCache(10**6)
    messages = [SYSTEM, {**CHAT[1], **EPHEMERAL}, *CHAT[2:]]
    assert explicit(find(messages, positions=positions)) == [None]
    earlier = find(CHAT[:2])
    assert earlier.turn_key is not None
    positions.put(earlier.turn_key, 60)  # the turn of an earlier request
    assert explicit(find(messages, positions=positions)) == [60]


def test_a_mark_on_the_last_message_is_the_turn():
    assert shown(find([*CHAT[:3], {**CHAT[3], **EPHEMERAL}])) == shown(find(CHAT))


def test_a_mark_inside_a_message_waits_for_its_position():
    positions = PositionCache(10**6)
    messages = [SYSTEM, user([text_part("The tide table.", **EPHEMERAL), text_part("When?")])]
    found = find(messages, positions=positions)
    (place,) = found.unplaced
    assert explicit(found) == [None] and (place.message, place.part, place.kept) == (1, 0, "")
    positions.put(place.key, 70)
    found = find(messages, positions=positions)
    assert explicit(found) == [70] and found.unplaced == ()
    other = [SYSTEM, user([text_part("The tide table."), text_part("Where?")])]
    other[1]["content"][0] |= EPHEMERAL
    assert explicit(find(other, positions=positions)) == [70]


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


def test_more_marks_than_count_are_left_aside():
    parts = [text_part(f"{number}", **EPHEMERAL) for number in range(3 * MAX_MARKS)]
    assert len(explicit(find([SYSTEM, user(parts)]))) == MAX_MARKS


def test_no_hint_is_longer_than_an_engine_takes():
    positions = PositionCache(10**6)
    messages = [SYSTEM, user([text_part(f"{number}", **EPHEMERAL) for number in range(MAX_MARKS + 1)]), *LOOP[2:]]
    for number, boundary in enumerate(find(messages).boundaries):
        positions.put(boundary.key, 100 + number)
    found = find(messages, positions=positions)
    assert MAX_MARKS < len(found.entries()) <= MAX_ENTRIES
    assert len(found.entries()) == len(set(found.entries()))
    many = tuple(found.boundaries[0]._replace(entry=number, tokens=number) for number in range(1, 40))
    assert found._replace(boundaries=many).entries() == tuple(range(1, 17))


def test_a_head_whose_opener_is_not_known_waits_for_its_position():
    found = find(CHAT, without("first"))
    (place,) = found.unplaced
    assert (place.message, place.kept, place.part) == (1, "", None)
    assert place.key in {boundary.key for boundary in found.boundaries if boundary.kind == "system"}
    assert find(CHAT).unplaced == () and find(CHAT, None).unplaced == ()


def test_a_head_before_several_parts_is_not_sought_behind_the_first_of_them():
    parts = user([text_part("The tide table."), text_part("When?")])
    assert find([SYSTEM, parts, *CHAT[2:]], without("first")).unplaced == ()
    assert find([SYSTEM, user([text_part("First?")]), *CHAT[2:]], without("first")).unplaced


# Texts that hold a template's own markers.


@pytest.mark.parametrize(("text", "entry"), [("<user>?", "last-1:4,5"), ("a <user> b <user>", "last-2:4,5")])
def test_an_opener_inside_the_last_text_is_skipped(text, entry):
    for content in (text, [text_part(text), text_part("And?")], [text_part("And?"), text_part(text)]):
        assert ("history", entry) in shown(find([*CHAT[:3], user(content)]))


def test_an_opener_inside_the_head_leaves_the_head_without_an_entry():
    for content in ("Say <user>.", [text_part("Say <user>."), text_part("Be brief.")]):
        found = find([{"role": "system", "content": content}, *CHAT[1:]])
        assert shown(found) == [("history", "last:4,5"), ("system", None), ("turn", -5)]


def test_an_opener_inside_a_text_between_moves_nothing():
    assert shown(find([SYSTEM, user("<user>"), assistant("<user>"), user("Second?")])) == shown(find(CHAT))


def test_where_no_text_of_the_opener_is_known_none_is_counted():
    facts = TemplateFacts(FACTS.ends, {("user", False): Opener((4, 5))})
    assert ("history", "last:4,5") in shown(find([*CHAT[:3], user("<user>")], facts))


# Keys and their order.


def test_the_beginnings_of_a_prompt_come_shortest_first():
    found = find(CHAT)
    keys = {boundary.kind: boundary.key for boundary in found.boundaries}
    shorter = find(CHAT[:2])
    assert shorter.layout is not None and found.layout is not None
    assert found.prefixes == (
        found.layout.keys.after[0],
        keys["system"],
        shorter.turn_key,
        found.layout.keys.after[2],
        keys["history"],
        keys["turn"],
    )


def test_every_boundary_is_found_again_among_the_prefixes_of_the_next_request():
    parts = user([text_part("The tide table.", **EPHEMERAL), text_part("When?")])
    for messages in (CHAT, LOOP, [SYSTEM, parts], [*CHAT[:2], {**CHAT[2], **EPHEMERAL}, *CHAT[3:], assistant("x")]):
        found = find(messages)
        assert {boundary.key for boundary in found.boundaries} <= set(found.prefixes)
        grown = find([*messages, assistant("Yes."), user("And?"), assistant("No."), user("More?")])
        between = {boundary.key for boundary in found.boundaries if boundary.kind != "explicit"}
        assert between <= set(grown.prefixes)


def test_a_beginning_inside_a_message_stands_between_its_start_and_its_end():
    parts = user([text_part("The tide table.", **EPHEMERAL), text_part("When?")])
    found = find([SYSTEM, parts])
    (mark,) = (boundary.key for boundary in found.boundaries if boundary.kind == "explicit")
    (head,) = (boundary.key for boundary in found.boundaries if boundary.kind == "system")
    assert found.prefixes[1:] == (head, mark, found.turn_key)


def test_shared_text_inside_messages_serves_the_choice_of_a_worker_only():
    use = BoundaryFinder(PositionCache(10**6), DivergenceLearner(10**7))
    document = "The pilot boards two miles off the bar. " * 40
    for question in ("When is high tide?", "and the wind?", "Is there ice?"):
        chat = chat_request({"messages": [SYSTEM, user(document + question)]})
        found = use.find(chat, FACTS, b"renderer", 2000, by_texts=True)
    learned = [boundary for boundary in found.boundaries if boundary.kind == "learned"]
    assert learned and {boundary.entry for boundary in learned} == {None}
    assert {boundary.key for boundary in learned} <= set(found.prefixes)
    assert set(found.entries()) == {"last:3", -5}
    assert "learned" not in {each.kind for each in use.find(chat, FACTS, b"renderer", 2000).boundaries}


# A tokenizer and template of the generated models.

TEXTS = [
    "Quartz is a mineral.",
    "83 ships wait",
    " leading space",
    "wind",
    "é accents",
    "💡",
    "",
    "\nx",
    "<|im_start|>user",
]


def facts_of(tokenizer: Any) -> TemplateFacts:
    """Of the template `<|im_start|>role, a line break, a text`; a text may merge with that line break."""

    def ids(text: str) -> tuple[int, ...]:
        whole = tokenizer.render({"messages": [{"role": text, "content": "x"}], "add_generation_prompt": False})
        opened = tokenizer.render({"messages": [{"role": text, "content": "\n"}], "add_generation_prompt": False})
        return tuple(whole[: common_prefix(whole, opened)])

    asked, silent = (
        tokenizer.render({"messages": [user("x")], "add_generation_prompt": asks}) for asks in (True, False)
    )
    end = len(asked) - len(silent)
    openers = {
        (place, tools): Opener(
            ids("tool" if place == "tool" else "user"), f"<|im_start|>{role}", no_tool=role == "user"
        )
        for place, role in (("first", "user"), ("alone", "user"), ("user", "user"), ("tool", "tool"))
        for tools in (False, True)
    }
    return TemplateFacts({"user": end, "tool": end}, openers)


def chats(rng: random.Random) -> list[dict[str, Any]]:
    """Chats of every shape."""
    made = []
    for number in range(60):
        messages = [SYSTEM] if number % 3 else []
        for _ in range(rng.randrange(4)):
            messages += [user(rng.choice(TEXTS)), assistant(rng.choice(TEXTS[:-1]))]
            if rng.random() < 0.4:
                messages += [tool(rng.choice(TEXTS[:-1])), assistant("So.")]
        messages.append(user(rng.choice(TEXTS)))
        if rng.random() < 0.3:
            messages += [assistant("I will look."), tool(rng.choice(TEXTS[:-1]))]
        made.append({"messages": messages, **({"tools": TOOLS} if number % 2 else {})})
    return made


def parts_at(tokenizer: Any, body: Mapping[str, Any], index: int) -> int:
    """Where the prompt of a chat parts from one with another text in message `index`."""
    prompt, shared = tokenizer.render(body), len(tokenizer.render(body))
    for text in TEXTS:
        changed = [*body["messages"]]
        changed[index] = {**changed[index], "content": text}
        if text[:1] != body["messages"][index]["content"][:1]:
            shared = min(shared, common_prefix(prompt, tokenizer.render({**body, "messages": changed})))
    return shared


def test_entries_lie_where_two_chats_really_part(tokenizer):
    facts, use = facts_of(tokenizer), BoundaryFinder(PositionCache(10**6))
    kinds, skipped = set(), 0
    for body in chats(random.Random(3)):
        found = use.find(chat_request(body), facts, b"renderer")
        prompt = tokenizer.render(body)
        roles = [message["role"] for message in body["messages"]]
        first = roles.index("user")
        for boundary in found.boundaries:
            if boundary.entry is None:
                continue
            (position,) = resolve([boundary.entry], prompt)
            kinds.add(boundary.kind)
            if boundary.kind == "turn":
                going_on = [*body["messages"], assistant("Two."), user("Third?")]
                assert tokenizer.render({**body, "messages": going_on})[:position] == prompt[:position]
                assert len(prompt) - position == facts.end("user")
            else:
                earlier = [index for index, role in enumerate(roles[:-1]) if role == "user" and index > first]
                places = [first] if boundary.kind == "system" else [len(roles) - 1, *earlier[-2:]]
                partings = [parts_at(tokenizer, body, index) for index in places]
                assert any(parting - 1 <= position <= parting for parting in partings), (body, boundary)
                skipped += "last-" in str(boundary.entry)
    assert kinds == {"system", "history", "turn"} and skipped > 10


def test_the_last_questions_before_the_last_one_have_entries_too():
    questions = [message for number in range(5) for message in (user(f"{number}?"), assistant("Yes."))]
    wanted = [("history", f"last{skipped}:4,5") for skipped in ("-1", "-2", "")]
    assert shown(find([SYSTEM, *questions, user("And?")])) == [*wanted, ("system", "first:1,2"), ("turn", -5)]
    in_loop = find([SYSTEM, *questions, user("And?"), assistant("I will look."), tool("nine")])
    assert "last-1" not in str(in_loop.entries())  # the questions of a loop's history had their turn


def test_a_head_that_moves_into_the_last_user_message_has_no_place_once_the_conversation_goes_on():
    dated = {"role": "system", "content": "You pilot ships. " * 40 + f"\nToday is {date.today()}."}
    moved = TemplateFacts({"user": 5}, broken=frozenset({Turn("user", later=False, system=True, tools=False)}))
    positions = PositionCache(10**6)
    alone = find([dated, user("First?")], moved, positions)
    for boundary in alone.boundaries:
        positions.put(boundary.key, 90)
    assert shown(find([dated, user("First?")], moved, positions)) == [("learned", 90), ("system", 90)]
    later = find([dated, user("First?"), assistant("One."), user("Second?")], moved, positions)
    assert {boundary.kind for boundary in later.boundaries} == {"history", "turn"}
    assert not later.unplaced and not {boundary.key for boundary in alone.boundaries} & {*later.prefixes}
    stays = find([dated, user("First?"), assistant("One."), user("Second?")], TemplateFacts(), positions)
    assert ("system", 90) in shown(stays) and ("learned", 90) in shown(stays)


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


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"t": "<user>"}'}}]},
        {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "<user>", "arguments": "{}"}}]},
        {"reasoning": "They say <user>."},
    ],
)
def test_an_opener_in_a_call_or_in_thinking_is_counted_too(fields):
    marked = assistant("One.", **EPHEMERAL)
    found = find([SYSTEM, user("First?"), marked, user("Second?"), assistant("Two.", **fields), user("Third?")])
    assert ("explicit", "last-2:4,5") in shown(found)


def test_an_opener_with_a_line_break_is_counted_in_arguments_as_json_writes_it():
    opener = Opener((4, 5), "<user>\n", per_user=True)
    facts = TemplateFacts(openers={("user", False): opener})
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"t": "<user>\\n<user>\\n"}'}}
    marked, calls = assistant("One.", **EPHEMERAL), assistant("", tool_calls=[call])
    found = find([SYSTEM, user("First?"), marked, user("Second?"), calls, user("Third?")], facts)
    assert ("explicit", "last-3:4,5") in shown(found)


# Where estimates lie, and what is told of places without an entry.


def estimates(found: Found) -> dict[str, int]:
    return {boundary.kind: boundary.estimate for boundary in found.boundaries}


def sized(messages: list[Any], size: int, facts: TemplateFacts | None = FACTS, **body: Any) -> Found:
    return BoundaryFinder(PositionCache(10**6)).find(
        chat_request({"messages": messages, **body}), facts, b"r", size, 1.0
    )


def test_an_estimate_inside_a_message_counts_what_stands_before_it():
    dated = "x" * 700 + f"\nToday is {date.today()}." + "y" * 300
    found = sized([{"role": "system", "content": dated}, user("z" * 100)], len(dated) + 100)
    assert estimates(found)["learned"] == 701 and estimates(found)["system"] == len(dated)
    parts = user([text_part("a" * 50, **EPHEMERAL), text_part("b" * 100)])
    assert estimates(sized([SYSTEM, parts], 1000))["explicit"] == 1000 - 100


def test_the_turn_before_a_loop_ends_behind_its_message():
    messages = [SYSTEM, user("a" * 100), assistant("b" * 200), tool("c" * 400)]
    found = sized(messages, 1000)
    assert [each.estimate for each in found.boundaries if each.kind == "turn" and each.entry is None] == [400]
    assert estimates(sized(messages, 10))["history"] == 0  # never less


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


def test_a_date_is_sought_in_the_first_system_messages_before_the_first_question():
    dated = "x" * 700 + f"\nToday is {date.today()}."

    def kinds(*messages: dict[str, Any]) -> list[str]:
        return [boundary.kind for boundary in find([*messages, user("q")]).boundaries if boundary.kind == "learned"]

    plain, odd = {"role": "system", "content": "Be brief."}, {"role": "system"}
    for role in ("system", "developer"):
        assert kinds({"role": role, "content": dated}) == ["learned"]
    assert kinds(plain, odd, plain, {"role": "system", "content": dated}) == ["learned"]
    assert kinds(plain, odd, plain, plain, {"role": "system", "content": dated}) == []
    assert kinds(assistant(dated)) == kinds(user("a"), {"role": "system", "content": dated}) == []
    last = find([plain, user("q"), {"role": "system", "content": dated}], moved("user"))
    assert "learned" not in estimates(last)
    assert kinds({"role": "system", "content": dated}, {"role": "system", "content": "y" + dated}) == ["learned"]


def moved(role: str, tools: bool = False) -> TemplateFacts:
    """Of a template that writes its head into the last user message."""
    broken = frozenset({Turn("user", later=False, system=system, tools=tools) for system in (False, True)})
    return TemplateFacts({role: 5}, broken=broken)


def test_where_tools_move_nothing_up_to_the_first_question_stays_and_all_behind_it_does():
    marked = [{**user("First?"), **EPHEMERAL}, assistant("One."), user("Second?")]
    found = find(marked, moved("user", tools=True), tools=TOOLS)
    assert {boundary.kind for boundary in found.boundaries} == {"explicit", "history", "turn"}
    assert {boundary.kind for boundary in find(marked, TemplateFacts({"user": 5}), tools=TOOLS).boundaries} == {
        *("system", "explicit", "history", "turn")
    }


def test_a_message_in_parts_that_is_marked_as_a_whole_is_marked_at_its_end():
    whole = {"role": "system", "content": [text_part("You pilot."), text_part("Be brief.")], **EPHEMERAL}
    last = {"role": "system", "content": [text_part("You pilot."), text_part("Be brief.", **EPHEMERAL)]}
    first = {"role": "system", "content": [text_part("You pilot.", **EPHEMERAL), text_part("Be brief.")]}
    kinds = [[each.kind for each in find([head, *CHAT[1:]]).boundaries] for head in (whole, last, first)]
    assert [("explicit" in each) for each in kinds] == [False, False, True]


def test_marks_before_a_question_that_nothing_precedes_are_the_head():
    found = find([user("First?")], tools=[{**TOOLS[0], **EPHEMERAL}])
    assert shown(found) == [("system", "last:13"), ("turn", -5)]
    found = find([user([text_part("a", **EPHEMERAL), text_part("b")])])
    assert [each.kind for each in found.boundaries].count("explicit") == 1
