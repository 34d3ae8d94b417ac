"""Text shared inside messages: the second request of a kind shows where it ends, the third finds it known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getsizeof

import pytest

from proxy.boundaries.divergence import (
    MAX_CUTS,
    PLACE_BYTES,
    DivergenceLearner,
)
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


def test_of_the_beginnings_in_one_place_the_least_recently_shared_is_forgotten():
    """Each pair of texts shows one; the first is shown again before the last comes."""
    lengths_shown = [600 + 50 * number for number in range(MAX_CUTS + 1)]
    learner = DivergenceLearner(10**7)
    for number, length in enumerate([*lengths_shown[:-1], lengths_shown[0], lengths_shown[-1]]):
        for ending in "abcdefghijkl"[2 * number : 2 * number + 2]:
            learner.shared_texts(question("x" * length + ending))
    found = lengths(learner, question("x" * 5000), 1)
    assert sorted(found) == [length for length in lengths_shown if length != lengths_shown[1]]


def test_halves_of_surrogate_pairs_are_shared_too():
    text = "\ud83d" * 600
    assert lengths(learner_of(text + "a"), question(text + "b"), 1) == [600]
