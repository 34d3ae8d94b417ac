"""Text shared inside messages: the second request of a kind shows where it ends, the third finds it known."""

from __future__ import annotations

import pytest

from proxy.boundaries.divergence import MAX_CUTS, DivergenceLearner
from proxy.boundaries.layout import PromptLayout, layout_of
from proxy.chat.chat import Chat
from proxy.chat.reader import chat_request

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


def test_a_document_before_the_question_is_shared_by_the_second_and_known_to_the_third_in_the_same_place():
    learner, nothing = DivergenceLearner(10**7), DivergenceLearner(0)
    found = [lengths(learner, question(DOCUMENT + text), 1) for text in ("one", "Two", "three")]
    assert found == [[], [len(DOCUMENT)], [len(DOCUMENT)]]
    assert lengths(learner, question(DOCUMENT + "four", "Another system prompt."), 1) == []
    assert [lengths(nothing, question(DOCUMENT + text), 1) for text in ("one", "Two", "three")] == [[], [], []]
    halves = "\ud83d" * 600  # of surrogate pairs
    lengths(learner, question(halves + "a"), 1)
    assert lengths(learner, question(halves + "b"), 1)[0] == 600


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
    found = lengths(learner, question("x" * 5000), 1)
    assert sorted(found) == [length for length in lengths_shown if length != lengths_shown[1]]
