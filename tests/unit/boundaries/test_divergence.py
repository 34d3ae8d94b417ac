"""Text shared inside messages: the second request of a kind shows where it ends, the third finds it known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getsizeof

import pytest

from proxy.boundaries.divergence import (
    LINE_CHARACTERS,
    MAX_CUTS,
    MAX_TEXTS,
    MIN_CHARACTERS,
    PLACE_BYTES,
    DivergenceLearner,
)
from proxy.boundaries.layout import PromptLayout, layout_of
from proxy.chat.chat import Chat
from proxy.chat.reader import chat_request, completions_request

DOCUMENT = "The pilot boards two miles off the bar. " * 40


def layout(chat: Chat | None) -> PromptLayout:
    found = layout_of(chat, b"r") if chat is not None else None
    assert found is not None
    return found


def question(text: str, system: str = "Answer briefly.") -> PromptLayout:
    return layout(
        chat_request({"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]})
    )


def lengths(learner: DivergenceLearner, of: PromptLayout, message: int) -> list[int]:
    """Characters of the beginnings of a message's text that were shared before."""
    return [len(cut.text) for index, cut in learner.shared_texts(of) if index == message]


def test_a_document_before_the_question_is_found_by_the_second_and_known_to_the_third():
    learner = DivergenceLearner(10**7)
    found = [lengths(learner, question(DOCUMENT + text), 1) for text in ("When is high tide?", "and?", "Is there ice?")]
    assert found == [[], [len(DOCUMENT)], [len(DOCUMENT)]]


def test_a_text_that_is_the_shared_beginning_itself_shares_nothing_inside():
    learner = DivergenceLearner(10**7)
    for text in ("When is high tide?", "and?"):
        learner.shared_texts(question(DOCUMENT + text))
    assert lengths(learner, question(DOCUMENT), 1) == []


def test_a_system_prompt_whose_last_line_changes_is_shared_up_to_that_line():
    learner = DivergenceLearner(10**7)
    hits = [
        lengths(learner, question("Tide?", f"{DOCUMENT}\nNow it is {clock}."), 0)
        for clock in ("10:01", "10:02", "11:13")
    ]
    line = len(DOCUMENT + "\n")
    assert hits[0] == [] and line in hits[1] and line in hits[2]


def test_a_prompt_of_text_or_token_ids_is_learned_from_too():
    learner = DivergenceLearner(10**7)
    shared = [7, 9] * MIN_CHARACTERS
    for number in range(3):
        text = lengths(learner, layout(completions_request({"prompt": f"{DOCUMENT}{number} knots"})), 0)
        ids = lengths(learner, layout(completions_request({"prompt": [*shared, number, 7]})), 0)
    assert (text, ids) == ([len(DOCUMENT)], [len(shared)])


def test_only_texts_that_follow_the_same_beginning_are_compared():
    learner = DivergenceLearner(10**7)
    learner.shared_texts(question(DOCUMENT + "One?"))
    assert lengths(learner, question(DOCUMENT + "Two?", "Another system prompt."), 1) == []


def test_short_or_differing_texts_teach_nothing():
    learner = DivergenceLearner(10**7)
    for text in ("same start, one", "same start, two", "x" * 600, "y" * 600):
        assert learner.shared_texts(question(text)) == []


def test_a_place_remembers_a_few_beginnings():
    learner = DivergenceLearner(10**7)
    for length in range(600, 600 + 20 * (MAX_CUTS + 4), 20):
        learner.shared_texts(question("x" * length + str(length)))
    assert len(lengths(learner, question("x" * 5000), 1)) == MAX_CUTS


def test_without_memory_for_texts_nothing_is_learned():
    learner = DivergenceLearner(0)
    assert [learner.shared_texts(question(DOCUMENT + text)) for text in ("one", "two", "three")] == [[], [], []]


def in_memory(learner: DivergenceLearner) -> int:
    """Bytes of all the texts that it can reach."""
    seen: set[int] = set()

    def of(value: object) -> int:
        if id(value) in seen:
            return 0
        seen.add(id(value))
        if isinstance(value, str):
            return getsizeof(value)
        if isinstance(value, Mapping):
            return sum(of(part) for part in value.values())
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return sum(of(part) for part in value)
        slots = getattr(type(value), "__slots__", ())
        return sum(of(getattr(value, name)) for name in slots) + of(getattr(value, "__dict__", {}))

    return of(learner)


@pytest.mark.parametrize("systems", [1, 50], ids=["one place", "many places"])
def test_memory_for_texts_is_bounded(systems):
    learner = DivergenceLearner(100_000)
    most = 0
    for number in range(200):
        learner.shared_texts(question(f"{number % 7} {number} " + DOCUMENT, f"You are number {number % systems}."))
        most = max(most, in_memory(learner))
        assert learner.held <= 100_000
    assert 2_000 < most <= 100_000
    assert 0 <= learner.held - in_memory(learner) <= systems * PLACE_BYTES  # what it counts is what it holds


def learner_of(*texts: str) -> DivergenceLearner:
    learner = DivergenceLearner(10**7)
    for text in texts:
        learner.shared_texts(question(text))
    return learner


@pytest.mark.parametrize(("shared", "is_learned"), [(MIN_CHARACTERS - 1, False), (MIN_CHARACTERS, True)])
def test_a_beginning_is_worth_a_state_from_some_length_on(shared, is_learned):
    text = "x" * shared
    wanted = [shared] if is_learned else []
    assert lengths(learner_of(text + "a" * 100), question(text + "b" * 100), 1) == wanted
    assert lengths(learner_of(text), question(text + "b" * 100), 1) == wanted  # the shorter text is the beginning
    assert lengths(learner_of(text + "a"), question(text), 1) == []


def test_a_text_is_compared_with_the_one_it_is_most_alike_whenever_that_came():
    for texts in (
        ("y" * 900, DOCUMENT + "one"),
        (DOCUMENT + "one", "y" * 900),
        (DOCUMENT + "one", DOCUMENT[:700] + "?"),
    ):
        assert len(DOCUMENT) in lengths(learner_of(*texts), question(DOCUMENT + "two"), 1)


def test_of_the_texts_in_one_place_the_least_recently_used_is_forgotten():
    texts = [f"{number} " * 400 for number in range(MAX_TEXTS + 1)]

    def knows(learner: DivergenceLearner, text: str) -> bool:
        return bool(lengths(learner, question(text + "and more"), 1))

    assert [knows(learner_of(*texts), text) for text in (texts[0], texts[1], texts[-1])] == [False, True, True]
    used_again = (*texts[:-1], texts[0], texts[-1])
    assert [knows(learner_of(*used_again), text) for text in (texts[0], texts[1], texts[-1])] == [True, False, True]


def test_of_the_beginnings_in_one_place_the_least_recently_shared_is_forgotten():
    """Each pair of texts shows one; the first is shown again before the last comes."""
    lengths_shown = [600 + 50 * number for number in range(MAX_CUTS + 1)]
    learner = DivergenceLearner(10**7)
    for number, length in enumerate([*lengths_shown[:-1], lengths_shown[0], lengths_shown[-1]]):
        for ending in "abcdefghijkl"[2 * number : 2 * number + 2]:
            learner.shared_texts(question("x" * length + ending))
    found = lengths(learner, question("x" * 5000), 1)
    assert sorted(found) == [length for length in lengths_shown if length != lengths_shown[1]]


def test_the_least_recently_used_place_is_forgotten_first():
    def ask(learner: DivergenceLearner, system: str, text: str) -> list[int]:
        return lengths(learner, question(DOCUMENT + text, system), 1)

    one = DivergenceLearner(10**7)
    ask(one, "one", "a")
    room = 2 * one.held + 100  # for two places of one text each
    learner = DivergenceLearner(room)
    ask(learner, "one", "a")
    ask(learner, "two", "a")
    ask(learner, "one", "a")  # in use again
    ask(learner, "three", "a")
    assert ask(learner, "two", "b") == []
    learner = DivergenceLearner(10 * one.held)
    for system in ("one", "two"):
        ask(learner, system, "a")
    assert [ask(learner, system, "b") for system in ("one", "two")] == [[len(DOCUMENT)], [len(DOCUMENT)]]


def test_a_text_that_is_larger_than_the_bound_is_not_kept_and_nothing_else_breaks():
    learner = DivergenceLearner(1000)
    for text in ("a", "b", "c"):
        assert lengths(learner, question(DOCUMENT + text), 1) == [] and learner.held == 0


def test_a_line_break_is_looked_for_a_little_way_back_only():
    for behind, found in ((LINE_CHARACTERS, True), (LINE_CHARACTERS + 1, False)):
        head = "x" * 1000 + "\n" + "y" * (behind - 1)
        shown = lengths(learner_of(head + "a"), question(head + "b"), 1)
        assert shown == ([1001, len(head)] if found else [len(head)])


def test_texts_of_all_messages_are_looked_at_but_none_behind_the_last_question():
    learner = DivergenceLearner(10**7)
    for ending in "ab":
        messages = [
            {"role": "system", "content": "short"},
            {"role": "user", "content": [{"type": "image_url"}]},
            {"role": "assistant", "content": DOCUMENT},
            {"role": "user", "content": DOCUMENT + ending},
            {"role": "system", "content": DOCUMENT + ending},
        ]
        found = learner.shared_texts(layout(chat_request({"messages": messages})))
    assert [(index, len(cut.text)) for index, cut in found] == [(3, len(DOCUMENT))]


def test_halves_of_surrogate_pairs_are_shared_too():
    text = "\ud83d" * 600
    assert lengths(learner_of(text + "a"), question(text + "b"), 1) == [600]
