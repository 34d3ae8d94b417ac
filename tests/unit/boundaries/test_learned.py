"""Text shared inside messages: the third request of a kind finds a checkpoint."""

from __future__ import annotations

import random

from proxy.boundaries.candidates import layout_of
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.learned import DivergenceLearner
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT
from proxy.chat.reader import chat_request, completions_request

DOCUMENT = "The pilot boards two miles off the bar. " * 40


class Characters:
    """A renderer whose tokens are characters."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self, body, path=CHAT) -> TokenIds:
        self.asked += 1
        if "prompt" in body:
            return TokenIds.of(map(ord, body["prompt"]))
        text = "".join(f"<{message['role']}>{message['content']}" for message in body["messages"])
        return TokenIds.of(map(ord, text + ("<assistant>" if body.get("add_generation_prompt", True) else "")))


def finder(size: int = 10_000_000) -> BoundaryFinder:
    return BoundaryFinder(PositionCache(1_000_000), DivergenceLearner(size))


async def learned(use, renderer, request) -> list[int]:
    found = await use.find(request, renderer, b"r")
    return [boundary.tokens for boundary in found.boundaries if boundary.kind == "learned"]


def question(text: str, system: str = "Answer briefly."):
    return chat_request({"messages": [{"role": "system", "content": system}, {"role": "user", "content": text}]})


async def test_a_document_before_the_question_is_found_by_the_second_and_known_to_the_third():
    use, renderer = finder(), Characters()
    end = len("<system>Answer briefly.<user>" + DOCUMENT)
    assert await learned(use, renderer, question(DOCUMENT + "When is high tide?")) == []
    assert end in await learned(use, renderer, question(DOCUMENT + "and the wind?"))
    asked = renderer.asked
    assert end in await learned(use, renderer, question(DOCUMENT + "Is there ice?"))
    assert renderer.asked == asked


async def test_what_was_learned_is_found_again_among_the_prefixes():
    use, renderer = finder(), Characters()
    for text in ("When is high tide?", "and the wind?", "Is there ice?"):
        found = await use.find(question(DOCUMENT + text), renderer, b"r")
    assert "learned" in {boundary.kind for boundary in found.boundaries}
    assert {boundary.key for boundary in found.boundaries} <= set(found.prefixes)


async def test_a_system_prompt_whose_last_line_changes_is_shared_up_to_that_line():
    use, renderer = finder(), Characters()
    hits = [
        await learned(use, renderer, question("Tide?", f"{DOCUMENT}\nNow it is {clock}."))
        for clock in ("10:01", "10:02", "11:13")
    ]
    line = len("<system>" + DOCUMENT + "\n")
    assert hits[0] == [] and line in hits[1] and line in hits[2]


async def test_a_prompt_of_text_or_token_ids_is_learned_from_too():
    use, renderer = finder(), Characters()
    for number in range(3):
        found = await learned(use, renderer, completions_request({"prompt": f"{DOCUMENT}{number} knots"}))
    assert found == [len(DOCUMENT)]
    asked = renderer.asked
    shared = [random.Random(0).randrange(150_000) for _ in range(700)]
    for number in range(3):
        found = await learned(use, renderer, completions_request({"prompt": [*shared, number, 7]}))
    assert found == [700] and renderer.asked == asked


async def test_short_or_differing_texts_teach_nothing():
    use, renderer = finder(), Characters()
    for text in ("same start, one", "same start, two", "x" * 600, "y" * 600):
        assert await learned(use, renderer, question(text)) == []


async def test_without_memory_for_texts_nothing_is_learned():
    use, renderer = finder(0), Characters()
    for text in ("one", "two", "three"):
        assert await learned(use, renderer, question(DOCUMENT + text)) == []


def test_memory_for_texts_is_bounded():
    learner = DivergenceLearner(100_000)
    for number in range(200):
        learner.shared_texts(layout_of(question(f"{number % 7} {number} " + DOCUMENT), b"r"))
        assert learner.held <= 100_000
    assert learner.held > 0
