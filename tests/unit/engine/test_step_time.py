"""Step times are learnt from what steps took, and a stalled one does not count."""

import pytest

from engine_patches.scheduler.step_time import ASSUMED_TOKENS_PER_PASS, StepTime


def learnt(floor=0.4, per_token=0.0005, steps=8):
    pace = StepTime()
    for number in range(steps):
        pace.step_took(1 + number % 3, floor + per_token * (1 + number % 3))
        pace.step_took(100 * (number + 1), floor + per_token * 100 * (number + 1))
    return pace


def test_nothing_is_believed_before_enough_was_seen():
    pace = learnt(steps=3)
    assert not pace.known
    assert pace.tokens_per_pass == ASSUMED_TOKENS_PER_PASS
    assert pace.seconds(1000, 3) == 0


def test_floor_and_cost_per_token_are_found():
    pace = learnt()
    assert pace.floor_seconds == pytest.approx(0.4, rel=0.01)
    assert pace.token_seconds == pytest.approx(0.0005, rel=0.01)
    assert pace.tokens_per_pass == pytest.approx(800, rel=0.02)
    assert pace.seconds(2000, 2) == pytest.approx(1.8, rel=0.02)


def test_stalled_steps_do_not_count():
    pace = learnt(steps=20)
    for _ in range(5):
        pace.step_took(1, 30.0)
        pace.step_took(500, 30.0)
    assert pace.tokens_per_pass == pytest.approx(800, rel=0.05)


def test_a_change_of_load_is_followed():
    pace = learnt(steps=64)
    for number in range(64):
        pace.step_took(1, 0.01)
        pace.step_took(500 + number, 0.01 + 0.001 * (500 + number))
    assert pace.tokens_per_pass == pytest.approx(9, rel=0.2)


def test_many_requests_that_decode_together_are_no_prompt():
    pace = learnt()
    for _ in range(64):
        pace.step_took(200, 0.41, prefill=False)
    assert pace.token_seconds == pytest.approx(0.0005, rel=0.01)


def test_steps_without_tokens_or_time_are_no_news():
    pace = StepTime()
    pace.step_took(0, 1.0)
    pace.step_took(5, 0.0)
    assert pace.seconds(100, 1) == 0
