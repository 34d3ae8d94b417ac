"""What an engine with the plugin would have learnt of prompts: compared with all prompts before, and bounded."""

from __future__ import annotations

from proxy.observability.shared_tokens import SharedTokens

UNIT = 16

HEAD = list(range(10 * UNIT))


def own(number: int, length: int = 100) -> list[int]:
    return [number * 10_000 + index for index in range(length)]


def looks(prompts: list[list[int]], apart: bytes = b"w") -> list[int]:
    shared = SharedTokens(UNIT)
    return [shared.look(apart, prompt) for prompt in prompts]


def test_the_third_prompt_gets_what_the_second_showed():
    assert looks([HEAD + own(number) for number in range(1, 5)]) == [0, 0, 160, 160]


def test_memory_is_bounded_and_a_beginning_in_use_outlives_strangers():
    shared = SharedTokens(UNIT, most=40)
    found = []
    for number in range(1, 100):
        found.append(shared.look(b"w", HEAD + own(2 * number)))
        assert shared.look(b"w", own(2 * number + 1, 200)) == 0
        assert len(shared._prefixes) <= 40
    assert found == [0, 0, *[160] * 97]
    assert shared.look(b"w", own(3, 200)) == shared.look(b"w", own(3, 200)) == 0  # forgotten meanwhile


def test_a_prompt_whose_beginning_is_forgotten_leads_nowhere():
    shared = SharedTokens(UNIT, most=8)
    assert [shared.look(b"w", HEAD) for _ in range(4)] == [0, 0, 0, 0]
