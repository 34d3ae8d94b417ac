"""What an engine with the plugin would have learnt of prompts: compared with all prompts before, and bounded."""

from __future__ import annotations

import random

from proxy.observability.shared_tokens import MIN_SHARED, SharedTokens


def own(number: int, length: int = 100) -> list[int]:
    return [number * 10_000 + index for index in range(length)]


def test_what_is_shared_is_what_comparing_all_prompts_of_the_same_finds():
    """Units of 64 tokens, so that few of them are learnt, and prompts of few units, so that many part anywhere."""
    draw, unit, deep = random.Random(2), 64, 0
    for _ in range(100):
        shared, prompts, learnt = SharedTokens(unit), {b"v": [], b"w": []}, {b"v": set(), b"w": set()}
        for _ in range(20):
            prompt = [token for _ in range(draw.randrange(8)) for token in [draw.randrange(2)] * unit]
            prompt += own(draw.randrange(1, 3), draw.randrange(unit))
            apart, usable = draw.choice([b"v", b"w", b"w"]), prompt[:-1]
            cuts = range(unit, len(usable) + 1, unit)
            parting = max(
                (cut for cut in cuts if any(prompt[:cut] == each[:cut] for each in prompts[apart])), default=0
            )
            expected = max((cut for cut in cuts if tuple(prompt[:cut]) in learnt[apart]), default=0)
            assert shared.look(apart, prompt) == expected, (prompt, prompts)
            if parting >= MIN_SHARED:
                learnt[apart].add(tuple(prompt[:parting]))
            prompts[apart].append(usable)
            deep += expected >= 3 * unit
    assert deep > 50


def test_memory_is_bounded_and_a_beginning_in_use_outlives_strangers():
    shared, found, head = SharedTokens(16, most=40), [], list(range(160))
    for number in range(1, 100):
        found.append(shared.look(b"w", head + own(2 * number)))
        assert shared.look(b"w", own(2 * number + 1, 200)) == 0
        assert len(shared._prefixes) <= 40
    assert found == [0, 0, *[160] * 97]
    assert shared.look(b"w", own(3, 200)) == shared.look(b"w", own(3, 200)) == 0  # forgotten meanwhile
    small = SharedTokens(16, most=8)
    assert [small.look(b"w", head) for _ in range(4)] == [0, 0, 0, 0], "its beginning is forgotten"
