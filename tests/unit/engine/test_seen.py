"""How far a prompt is like those before it, and that memory is bounded from the deep end."""

import random

from engine_patches.scheduler.seen import SeenPrefixes


def hashes(prompt):
    """Of each beginning of a prompt."""
    return [repr(prompt[: end + 1]).encode() for end in range(len(prompt))]


def common(one, other):
    """Units that two prompts have in common."""
    units = 0
    while units < min(len(one), len(other)) and one[units] == other[units]:
        units += 1
    return units


def test_with_bounded_memory_it_is_what_is_left_and_always_a_beginning():
    draw, forgotten = random.Random(1), 0
    for _ in range(200):
        seen, prompts = SeenPrefixes(max_hashes=25), []
        for _ in range(30):
            prompt = [draw.randrange(2) for _ in range(draw.randrange(0, 12))]
            known = [prefix in seen._hashes for prefix in hashes(prompt)]
            assert known == sorted(known, reverse=True)
            assert seen.deepest(hashes(prompt)) == sum(known)
            assert len(seen) <= 25
            forgotten += sum(known) < max((common(prompt, earlier) for earlier in prompts), default=0)
            prompts.append(prompt)
    assert forgotten > 100


def test_what_many_prompts_share_outlives_what_follows_it():
    seen = SeenPrefixes(max_hashes=40)
    for number in range(100):
        shared = seen.deepest(hashes([0] * 10 + [number + 1] * 10))
        assert shared == (10 if number else 0)


def test_a_prompt_longer_than_the_memory_is_known_by_its_beginning():
    seen = SeenPrefixes(max_hashes=5)
    assert seen.deepest(hashes([0] * 9)) == 0 and seen.deepest(hashes([0] * 9)) == 5
