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


CLOSE, FAR = ({**RANKED, "c": -2.0 + error} for error in (0.9e-4, 1.1e-4))

TIED = {**RANKED, "b": RANKED["a"] - 0.5e-5}

OTHER_SIDE = {**TIED, "b": RANKED["a"] + 0.5e-5}

SIXTH = {token: value for token, value in RANKED.items() if token != "e"} | {"f": -3.00005}


@pytest.mark.parametrize(
    ("ours", "reference", "exact"),
    [
        ([CLOSE], [RANKED], True),
        ([FAR], [RANKED], False),
        ([RANKED, OTHER_SIDE], [RANKED, TIED], True),  # another token at a tie of the reference's two best
        ([{**RANKED, "b": -0.4}], [RANKED], False),
        ([SIXTH], [RANKED], True),  # the fifth and the sixth best have changed places
        ([{**SIXTH, "f": -2.9}], [RANKED], False),  # too likely: the reference has it behind e, at -3.0 at most
        ([{"a": -0.5, "b": -1.5, "c": -2.0, "f": -2.5, "g": -3.0}], [RANKED], False),
    ],
)
def test_an_answer_is_exact_within_the_bound_and_at_ties_alone(ours, reference, exact):
    assert compare(answer(*ours), answer(*reference)).exact is exact


def test_a_difference_says_where_and_how_much():
    found = compare(answer({**RANKED, "b": -0.4}), answer(RANKED))
    assert (found.position, found.gap) == (0, pytest.approx(1.0))
    assert compare(answer(RANKED, RANKED), answer(RANKED)).position == 1  # behind the reference's end
    assert compare(answer({**SIXTH, "f": -2.9}), answer(RANKED)).largest_error == pytest.approx(0.1)
    two = compare(answer({"a": -0.5, "b": -1.5, "c": -2.0, "f": -2.5, "g": -3.0}), answer(RANKED))
    assert two.largest_error == math.inf and not BFLOAT16.accepts(two)


def test_a_sampled_token_that_the_engine_names_beside_the_likeliest_is_no_rank():
    assert compare(*(answer({**top, "z": -12.0}, chosen="z") for top in (SIXTH, RANKED))).exact


def test_of_many_answers_only_a_share_may_take_the_other_side_of_a_tie():
    parted = compare(answer(OTHER_SIDE), answer(TIED))
    same = compare(answer(RANKED), answer(RANKED))
    assert FLOAT32.accepts_all([parted] + [same] * 99)
    assert not FLOAT32.accepts_all([parted] + [same] * 98)
