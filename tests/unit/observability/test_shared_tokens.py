"""What an engine with the plugin would have learnt of prompts: compared with all prompts before, and bounded."""

from __future__ import annotations

import random

from proxy.observability.shared_tokens import MIN_SHARED, SharedTokens

UNIT = 16

HEAD = list(range(10 * UNIT))


def own(number: int, length: int = 100) -> list[int]:
    return [number * 10_000 + index for index in range(length)]


def looks(prompts: list[list[int]], apart: bytes = b"w") -> list[int]:
    shared = SharedTokens(UNIT)
    return [shared.look(apart, prompt) for prompt in prompts]


def test_the_third_prompt_gets_what_the_second_showed():
    assert looks([HEAD + own(number) for number in range(1, 5)]) == [0, 0, 160, 160]


def test_a_prompt_gets_the_deepest_state_that_it_leads_to():
    pairs = [HEAD + own(1), HEAD + own(2), HEAD + own(3, 64) + own(4), HEAD + own(3, 64) + own(5)]
    assert looks([*pairs, HEAD + own(3, 64) + own(6), HEAD + own(3, 63) + own(7), HEAD + own(8)])[4:] == [224, 160, 160]


def test_little_in_common_is_not_learnt():
    little, enough = HEAD[: MIN_SHARED - UNIT], HEAD[:MIN_SHARED]
    assert looks([little + own(number) for number in range(1, 5)]) == [0, 0, 0, 0]
    assert looks([enough + own(number) for number in range(1, 5)]) == [0, 0, MIN_SHARED, MIN_SHARED]


def test_a_prompts_last_token_is_always_computed():
    assert looks([HEAD] * 4) == [0, 0, 144, 144]
    assert looks([[*HEAD, 1]] * 4) == [0, 0, 160, 160]


def test_the_same_tokens_behind_another_beginning_are_another_prefix():
    assert looks([[number, *HEAD[1:], *own(1)] for number in range(1, 6)]) == [0] * 5


def test_other_salts_and_other_boots_share_nothing():
    shared, prompts = SharedTokens(UNIT), [HEAD + own(number) for number in range(1, 4)]
    assert [shared.look(b"one", prompt) for prompt in prompts] == [0, 0, 160]
    assert [shared.look(b"another", prompt) for prompt in prompts] == [0, 0, 160]


def test_a_prompt_below_the_unit_shares_nothing():
    assert looks([[], [1], HEAD[:UNIT], HEAD[:UNIT]]) == [0, 0, 0, 0]


def test_what_is_shared_is_what_comparing_all_prompts_finds():
    """Units of 64 tokens, so that few of them are learnt, and prompts of few units, so that many part anywhere."""
    draw, unit, deep = random.Random(2), 64, 0
    for _ in range(100):
        shared, prompts, learnt = SharedTokens(unit), [], set()
        for _ in range(20):
            prompt = [token for _ in range(draw.randrange(8)) for token in [draw.randrange(2)] * unit]
            prompt += own(draw.randrange(1, 3), draw.randrange(unit))
            usable = prompt[:-1]
            cuts = range(unit, len(usable) + 1, unit)
            parting = max((cut for cut in cuts if any(prompt[:cut] == each[:cut] for each in prompts)), default=0)
            expected = max((cut for cut in cuts if tuple(prompt[:cut]) in learnt), default=0)
            assert shared.look(b"w", prompt) == expected, (prompt, prompts)
            if parting >= MIN_SHARED:
                learnt.add(tuple(prompt[:parting]))
            prompts.append(usable)
            deep += expected >= 3 * unit
    assert deep > 100


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
