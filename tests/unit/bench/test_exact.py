"""When an answer counts as exact: by the first token that differs, and by the top logprobs up to there."""

from __future__ import annotations

import math

import pytest

from proxy.bench.harness.client import TimedAnswer
from proxy.bench.harness.exact import BFLOAT16, FLOAT32, compare
from proxy.fleet.answer_compare import ContinuedToken

RANKED = {"a": -0.5, "b": -1.5, "c": -2.0, "d": -2.5, "e": -3.0}


def answer(*tops: dict[str, float], chosen: str = "") -> TimedAnswer:
    """An answer of the likeliest token of each step, or of `chosen`."""
    steps = tuple(ContinuedToken(chosen or max(top, key=lambda token: top[token]), top) for top in tops)
    return TimedAnswer(steps, 100, 0, 0.0, 0.1, 0.2)


def test_logprobs_within_the_bound_are_exact_and_beyond_it_are_not():
    close, far = ({**RANKED, "c": -2.0 + error} for error in (0.9e-4, 1.1e-4))
    assert compare(answer(close), answer(RANKED)).exact
    assert not compare(answer(far), answer(RANKED)).exact


def test_another_token_is_exact_only_at_a_tie_of_the_references_two_best():
    tied = {**RANKED, "b": RANKED["a"] - 0.5e-5}
    other = {**tied, "b": RANKED["a"] + 0.5e-5}
    assert compare(answer(RANKED, other), answer(RANKED, tied)).position == 1
    assert compare(answer(RANKED, other), answer(RANKED, tied)).exact
    found = compare(answer({**RANKED, "b": -0.4}), answer(RANKED))
    assert (found.position, found.gap) == (0, pytest.approx(1.0)) and not found.exact


def test_the_fifth_and_sixth_best_may_change_places_within_the_bound_and_no_more_than_they():
    sixth = {token: value for token, value in RANKED.items() if token != "e"} | {"f": -3.00005}
    assert compare(answer(sixth), answer(RANKED)).exact
    too_likely = {**sixth, "f": -2.9}  # where the reference has it behind e, at -3.0 at most
    assert compare(answer(too_likely), answer(RANKED)).largest_error == pytest.approx(0.1)
    two = {"a": -0.5, "b": -1.5, "c": -2.0, "f": -2.5, "g": -3.0}
    assert compare(answer(two), answer(RANKED)).largest_error == math.inf
    assert not BFLOAT16.accepts(compare(answer(two), answer(RANKED)))


def test_a_sampled_token_that_the_engine_names_beside_the_likeliest_is_no_rank():
    sixth = {token: value for token, value in RANKED.items() if token != "e"} | {"f": -3.00005}
    sampled = (answer({**top, "z": -12.0}, chosen="z") for top in (sixth, RANKED))
    assert compare(*sampled).exact


def test_an_answer_longer_than_the_references_differs_behind_its_end():
    assert compare(answer(RANKED, RANKED), answer(RANKED)).position == 1


def test_of_many_answers_only_a_share_may_take_the_other_side_of_a_tie():
    tied = {**RANKED, "b": RANKED["a"] - 0.5e-5}
    parted = compare(answer({**tied, "b": RANKED["a"] + 0.5e-5}), answer(tied))
    same = compare(answer(RANKED), answer(RANKED))
    assert FLOAT32.accepts_all([parted] + [same] * 99)
    assert not FLOAT32.accepts_all([parted] + [same] * 98)
