"""Text shared inside messages: the second request of a kind shows where it ends, the third finds it known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getsizeof

import pytest

from proxy.boundaries.divergence import MAX_CUTS, MIN_CHARACTERS, PLACE_BYTES, DivergenceLearner
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
