"""Boundaries of a chat: the keys of its beginnings, entries of a hint for them, and what a text shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.boundaries.boundary import MAX_ENTRIES, Boundary, Found
from proxy.boundaries.divergence import MAX_CUTS, DivergenceLearner
from proxy.boundaries.finder import MAX_MARKS, BoundaryFinder
from proxy.boundaries.layout import PromptLayout, layout_of
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.template_facts import Opener, TemplateFacts, Turn
from proxy.chat.chat import MESSAGES, Mark
from proxy.chat.reader import chat_in, chat_request, completions_request
from proxy.chat.responses import StoredResponses
from tests.harness.messages import assistant, system, user

SYSTEM = system("You pilot ships into the harbour.")


def layout(messages: Any, renderer_id: bytes = b"renderer", **body: Any) -> PromptLayout:
    found = layout_of(chat_request({"messages": messages, **body}), renderer_id)
    assert found is not None
    return found


CHAT = [SYSTEM, user("First?"), assistant("One."), user("Second?")]

TOOLS = [{"type": "function", "function": {"name": "tide"}}]


@pytest.mark.parametrize(
    "written",
    [
        [SYSTEM, user([{"type": "text", "text": "First?"}]), *CHAT[2:]],
        [SYSTEM, user("First?", name=None, cache_control={"type": "ephemeral"}), *CHAT[2:]],
        [*CHAT[:3], user("Another?")],
    ],
)
def test_equal_beginnings_have_one_key_however_they_are_written_and_whatever_comes_later(written):
    one, other = layout(CHAT, temperature=1), layout([*written, assistant("Two."), user("Third?")], seed=5, stream=True)
    assert (one.system_key, one.openers[1]) == (other.system_key, other.openers[1])
    assert one.keys.after[:3] == other.keys.after[:3] and one.key == other.openers[3] != other.key


def test_the_key_of_a_part_depends_on_all_parts_up_to_it_and_on_its_message():
    def key(part: int, *texts: str, **message: Any) -> bytes:
        return layout([user([{"type": "text", "text": text} for text in texts], **message)]).part_key(Mark(0, part))

    assert len({key(0, "a", "b"), key(1, "a", "b"), key(1, "a", "c"), key(1, "x", "b"), key(0, "a", name="anna")}) == 5
    assert key(1, "a", "b", "c") == key(1, "a", "b", "d") == key(1, "a", "b", cache_control={"type": "ephemeral"})


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


@pytest.mark.parametrize(
    ("messages", "end"),
    [
        (CHAT, None),
        ([user("Tide?"), system("Be brief."), tool("nine")], 1),
        ([user("Tide?"), assistant("."), system("."), tool("nine")], 0),
        ([*CHAT, assistant("."), tool("a"), assistant("."), tool("b")], 3),
        ([SYSTEM, tool("nine")], None),
        ([{"role": "function", "content": "nine"}, tool("x")], None),
    ],
)
def test_before_a_tool_loop_the_user_message_ends_with_its_reminders(messages, end):
    assert layout(messages).end_before_loop == end


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


def text_part(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def find(
    messages: Any, facts: TemplateFacts | None = FACTS, positions: PositionCache | None = None, **body: Any
) -> Found:
    use = BoundaryFinder(positions if positions is not None else PositionCache(10**6))
    return use.find(chat_request({"messages": messages, **body}), facts, b"renderer")


def shown(found: Found) -> list[tuple[str, Any]]:
    """Kind and entry of each boundary, in no order: that of what has no length yet is not known."""
    return sorted(((boundary.kind, boundary.entry) for boundary in found.boundaries), key=repr)


def explicit(found: Found) -> list[Any]:
    return [boundary.entry for boundary in found.boundaries if boundary.kind == "explicit"]


LOOP = [SYSTEM, user("Tide?"), assistant("I will look."), tool("high at nine")]

MARKED = {"tools": [{**TOOLS[0], **EPHEMERAL}]}

EARLIER = [*CHAT[:2], {**CHAT[2], **EPHEMERAL}, CHAT[3], assistant("I will look."), tool("nine")]

LATER = [*EARLIER, assistant("Nine."), user("And?")]

IN_LOOP = [*LOOP[:2], {**LOOP[2], **EPHEMERAL}, LOOP[3], assistant("And the wind."), tool("west")]

# Of a template that writes tools into the last user message.
MOVED = TemplateFacts({"user": 5}, broken=frozenset({Turn("user", later=False, system=False, tools=True)}))

TOLD = TemplateFacts(
    {"user": 5},
    {("next", True): Opener((8,), "</s>")},
    frozenset(Turn("user", later, system=False, tools=True) for later in (False, True)),
)

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
    "tools that move": ([{**user("Tide?"), **EPHEMERAL}, *CHAT[2:]], {"tools": TOOLS}, MOVED),
    "tools that move, told where": ([user("Tide?</s>"), CHAT[2], user("And?</s>")], {"tools": TOOLS}, TOLD),
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
    ends = f"failure {found.failure}, end {found.end}, prefixes {len(found.prefixes)}"
    lines = [*map(str, shown(found)), f"result {found.result}, {ends}"]
    expect_golden("finder", case, "\n".join(lines))
    assert set(found.entries()) == {entry for _, entry in shown(found)} - {None}
    assert (found.turn_key is None) is ("turn" not in dict(shown(found)))


def test_a_turn_that_is_rendered_anew_once_it_is_answered_is_no_boundary():
    broken = frozenset({Turn("tool", later=True, system=True, tools=False)})
    found = find(LOOP, TemplateFacts(FACTS.ends, FACTS.openers, broken))
    assert ("turn", -7) not in shown(found) and found.end is None  # its length would be that of words that change
    borrowed = find(CHAT, replace(FACTS, ends={"user": 9}, is_own=False))  # another setting's: no good for lengths
    assert ("turn", -9) in shown(borrowed) and borrowed.end is None


def test_a_position_that_an_engine_has_told_stands_in_for_a_fact_and_an_estimate_is_never_sent():
    positions = PositionCache(10**6)
    keys = {boundary.kind: boundary.key for boundary in find(CHAT).boundaries}
    positions.put(keys["system"], 40)
    found = find(CHAT, None, positions)
    assert (found.entries(), found.result, found.failure, found.shared) == ((40,), "head", None, 40)
    assert shown(find(CHAT, positions=positions)) == shown(find(CHAT))  # a fact goes before it
    assert find(CHAT, None).prefixes == find(CHAT).prefixes
    for facts in (None, TemplateFacts(), FACTS):
        sized = BoundaryFinder(PositionCache(10**6)).find(chat_request({"messages": CHAT}), facts, b"r", 4000, 0.25)
        assert all(boundary.estimate > 100 and not boundary.tokens for boundary in sized.boundaries)
        assert not any(isinstance(entry, int) and entry > 0 for entry in sized.entries())


def test_no_hint_is_longer_than_an_engine_takes_and_the_deepest_positions_save_the_most():
    given = [Boundary("turn", b"", each) for each in (None, *range(1, 40), 1)]
    assert Found(tuple(given)).entries() == tuple(range(1, MAX_ENTRIES + 1))
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


DOCUMENT = "The pilot boards two miles off the bar. " * 40


def question(text: str, head: str = "Answer briefly.") -> PromptLayout:
    return layout([system(head), user(text)])


def lengths(learner: DivergenceLearner, of: PromptLayout) -> list[int]:
    """Characters of the beginnings of a question that were shared before."""
    return [len(cut.text) for index, cut in learner.shared_texts(of) if index == 1]


def test_a_document_before_the_question_is_shared_by_the_second_and_known_to_the_third_in_the_same_place():
    learner, nothing = DivergenceLearner(10**7), DivergenceLearner(0)
    found = [lengths(learner, question(DOCUMENT + text)) for text in ("one", "Two", "three")]
    assert found == [[], [len(DOCUMENT)], [len(DOCUMENT)]]
    assert lengths(learner, question(DOCUMENT + "four", "Another system prompt.")) == []
    assert [lengths(nothing, question(DOCUMENT + text)) for text in ("one", "Two", "three")] == [[], [], []]
    halves = "\ud83d" * 600  # of surrogate pairs
    lengths(learner, question(halves + "a"))
    assert lengths(learner, question(halves + "b"))[0] == 600


@pytest.mark.parametrize("systems", [1, 50], ids=["one place", "many places"])
def test_memory_for_texts_is_bounded(systems):
    learner = DivergenceLearner(100_000)
    most = 0
    for number in range(200):
        learner.shared_texts(question(f"{number % 7} {number} " + DOCUMENT, f"You are number {number % systems}."))
        most = max(most, learner.held)
        assert learner.held <= 100_000
    assert most > 2_000


def test_of_the_beginnings_in_one_place_the_least_recently_shared_is_forgotten():
    """Each pair of texts shows one; the first is shown again before the last comes."""
    lengths_shown = [600 + 50 * number for number in range(MAX_CUTS + 1)]
    learner = DivergenceLearner(10**7)
    for number, length in enumerate([*lengths_shown[:-1], lengths_shown[0], lengths_shown[-1]]):
        for ending in "abcdefghijkl"[2 * number : 2 * number + 2]:
            learner.shared_texts(question("x" * length + ending))
    found = lengths(learner, question("x" * 5000))
    assert sorted(found) == [length for length in lengths_shown if length != lengths_shown[1]]
