"""What counts as a different answer, and what is arithmetic."""

from __future__ import annotations

import random

import pytest

from proxy.fleet.answer_compare import LEAST, Greedy, Step, distance, judge


def greedy(*tops: dict[str, float], cached: int = 0) -> Greedy:
    """A continuation with these logprobs at each step, always the likeliest token."""
    return Greedy(tuple(Step(max(top, key=top.get), top) for top in tops), cached)


def rounded(draw: random.Random, grain: float, steps: int = 16) -> list[dict[str, float]]:
    """Logprobs of logits in multiples of `grain`; 0 for exact ones."""
    logits = [[draw.uniform(3, 8) for _ in range(5)] for _ in range(steps)]
    if grain:
        logits = [[round(value / grain) * grain for value in step] for step in logits]
    return [{f"token_id:{index}": value - 9.1234 for index, value in enumerate(step)} for step in logits]


def nudged(tops: list[dict[str, float]], draw: random.Random, most: float, grain: float = 0.0) -> Greedy:
    """The same, each logprob off by up to `most`, by whole grains where there is one."""
    off = (lambda: draw.uniform(-most, most)) if not grain else (lambda: grain * draw.randint(-1, 1))
    return greedy(*({token: value + off() for token, value in top.items()} for top in tops), cached=64)


def test_float32_arithmetic_is_the_same_and_a_wrong_state_differs():
    draw = random.Random(1)
    tops = rounded(draw, 0.0)
    anew = [greedy(*tops)] * 3
    assert judge([nudged(tops, draw, 5e-6)], anew, 0.0).result == "same"
    assert judge([nudged(tops, draw, 0.05)], anew, 0.0).result == "differs"


def test_one_rounding_of_bfloat16_logits_is_noise_even_where_answers_computed_anew_agree():
    draw = random.Random(2)
    tops = rounded(draw, 1 / 32)
    anew = [greedy(*tops)] * 3
    assert anew[0].grain == 1 / 32
    assert judge([nudged(tops, draw, 0.0, grain=1 / 32)], anew, 0.0).result == "noise"
    assert judge([nudged(tops, draw, 2.0)], anew, 0.0).result == "differs"


def test_what_answers_computed_anew_differ_by_is_noise_from_the_cache_too():
    draw = random.Random(3)
    tops = rounded(draw, 0.0)
    assert judge([nudged(tops, draw, 0.02)], [greedy(*tops)] * 3, 0.01).result == "noise"
    assert judge([nudged(tops, draw, 0.5)], [greedy(*tops)] * 3, 0.01).result == "differs"


def test_the_worst_of_the_cached_answers_counts_and_the_nearest_of_the_others():
    draw = random.Random(4)
    tops, others = rounded(draw, 0.0), rounded(draw, 0.0)
    right, wrong = nudged(tops, draw, 0.0), nudged(others, draw, 0.0)
    assert judge([right], [greedy(*others), greedy(*tops)], 0.0).result == "same"
    verdict = judge([right, wrong], [greedy(*tops)] * 3, 0.0)
    assert (verdict.result, verdict.cached) == ("differs", wrong)


def test_a_distance_ends_with_the_first_other_token():
    one = greedy({"a": -0.1, "b": -2.5}, {"a": -0.5, "b": -0.6}, {"c": -0.1, "d": -3.0})
    other = greedy({"a": -0.1, "b": -2.5}, {"a": -0.6, "b": -0.5}, {"x": -0.1, "y": -3.0})
    apart = distance(one, other)
    assert apart.position == 1 and apart.error == pytest.approx(0.1)


def test_a_token_that_the_other_does_not_name_is_off_by_what_it_must_be():
    one, other = greedy({"a": -0.1, "b": -2.0}), greedy({"a": -0.1, "c": -5.0})
    assert distance(one, other).error == pytest.approx(3.0)  # b is at most as likely as c over there
    assert distance(one, one).error < LEAST
