"""What prompts cost a worker, as learnt from the seconds to their first tokens."""

from __future__ import annotations

import random

import pytest

from proxy.observability.prefill_cost import ENOUGH, RENEWAL, WINDOW, CostLearner, TokenWork


def test_a_pace_is_learnt_from_requests_of_which_a_third_had_to_wait():
    pace = CostLearner()
    assert pace.model is None
    for number in range(60):
        tokens = 100 + 97 * (number * 7 % 40)
        waited = 3.0 if number % 3 == 0 else 0.0
        pace.observe(tokens, 0, 0.05 + 0.0002 * tokens + waited, alone=number % 2 == 0)
    line = pace.model
    assert line is not None and line.alone
    assert line.token_seconds == pytest.approx(0.0002, rel=0.1)
    assert line.floor_seconds == pytest.approx(0.05, abs=0.03)


def test_that_later_tokens_cost_more_is_learnt_also_from_prompts_that_were_partly_cached():
    pace = CostLearner()
    draw = random.Random(5)
    for number in range(60):
        prompt, cached = draw.randint(2000, 30_000), 1600 * (number % 2)
        work = TokenWork.between(cached, prompt)
        pace.observe(prompt, cached, 0.1 + 1e-4 * work.at(2.0**-14) + draw.uniform(0, 0.02), alone=True)
    assert pace.model.growth == 2.0**-14
    assert pace.model.seconds(TokenWork.between(0, 20_000)) == pytest.approx(1e-4 * (20_000 + 2e8 * 2.0**-14), rel=0.05)


def test_prompts_of_one_length_tell_no_pace():
    pace = CostLearner()
    for number in range(50):
        pace.observe(1000 + number, 0, 0.2, alone=True)
    assert pace.model is None


def learnt(*lengths: int, alone: bool = True, floor: float = 0.5, token: float = 0.001) -> CostLearner:
    """Prompts of so many tokens, which cost a floor and the same for each token."""
    pace = CostLearner()
    for tokens in lengths:
        pace.observe(tokens, 0, floor + token * tokens, alone)
    return pace


def test_the_work_of_tokens_is_their_number_and_the_sum_of_their_positions():
    assert TokenWork.between(0, 4) == TokenWork(4, 8) and TokenWork.between(2, 4) == TokenWork(2, 6)
    assert TokenWork.between(0, 2) + TokenWork.between(2, 4) == TokenWork.between(0, 4)
    assert (TokenWork(4, 8).at(0.0), TokenWork(4, 8).at(0.25)) == (4, 6)


def test_six_prompts_far_enough_apart_are_enough_for_a_line():
    far = [100 * number for number in range(1, ENOUGH + 1)]
    assert ENOUGH == 6 and learnt(*far[:-1]).model is None
    model = learnt(*far).model
    assert model is not None and (model.growth, model.requests, model.alone) == (0.0, ENOUGH, True)
    assert model.token_seconds == pytest.approx(0.001) and model.floor_seconds == pytest.approx(0.5)
    assert model.seconds(TokenWork(1000, 0)) == pytest.approx(1.0)  # without the floor
    near, just = (learnt(*[100] * 3, *[100 + apart] * 3).model for apart in (48, 64))
    assert near is None and just is not None


def test_a_pace_below_nothing_is_none_and_so_is_a_floor():
    assert learnt(*range(100, 1100, 100), floor=5.0, token=-0.001).model is None
    assert learnt(*range(100, 1100, 100), token=0.0).model is None
    model = learnt(*range(1000, 11000, 1000), floor=-0.5).model
    assert model is not None and (model.floor_seconds, model.token_seconds) == (0.0, pytest.approx(0.001))


@pytest.mark.parametrize(
    ("prompt", "cached", "seconds"), [(100, 100, 1.0), (100, 200, 1.0), (100, 0, 0.0), (100, 0, -1.0)]
)
def test_what_was_cached_in_full_or_took_no_time_tells_nothing(prompt, cached, seconds):
    pace = learnt(*range(100, 600, 100))
    for _ in range(10):
        pace.observe(prompt, cached, seconds, alone=True)
    assert pace.model is None
    pace.observe(600, 0, 1.1, alone=True)
    assert pace.model is not None and pace.model.requests == 6


def test_a_known_line_is_drawn_again_after_some_more_requests():
    pace = learnt(*range(100, 700, 100))
    assert pace.model is not None
    for number in range(RENEWAL - 1):
        pace.observe(100 * (number + 7), 0, 0.5 + 0.001 * 100 * (number + 7), alone=True)
        assert pace.model.requests == 6
    pace.observe(2000, 0, 2.5, alone=True)
    assert pace.model.requests == 6 + RENEWAL


def test_requests_that_were_alone_count_before_those_among_others():
    pace = learnt(*range(100, 600, 100))
    for tokens in range(100, 1100, 100):
        pace.observe(tokens, 0, 3.0 + 0.002 * tokens, alone=False)
    model = pace.model
    assert model is not None and (model.alone, model.requests) == (False, 15)
    pace.observe(600, 0, 1.1, alone=True)
    for _ in range(RENEWAL):
        pace.observe(1000, 0, 5.0, alone=False)
    model = pace.model
    assert model is not None and (model.alone, model.requests) == (True, 6)
    assert model.token_seconds == pytest.approx(0.001)


def test_the_last_requests_of_each_kind_count():
    pace = learnt(*range(100, 100 * (WINDOW + 1), 100), token=0.5)
    for tokens in range(100, 100 * (WINDOW + 1), 100):
        pace.observe(tokens, 0, 0.5 + 0.001 * tokens, alone=True)
    model = pace.model
    assert model is not None and model.requests == WINDOW
    assert model.token_seconds == pytest.approx(0.001)


def test_a_line_that_was_known_stays_where_later_requests_tell_none():
    pace = learnt(*range(100, 700, 100))
    known = pace.model
    for _ in range(WINDOW):
        pace.observe(500, 0, 1.0, alone=True)
    assert known is not None and pace.model == known
