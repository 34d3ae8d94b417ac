"""Step times are learnt from what steps took, and a stalled one does not count."""

import pytest

from engine_patches.scheduler.step_time import (
    ASSUMED_TOKENS_PER_PASS,
    ENOUGH,
    LONG_STEP,
    RENEWAL,
    WINDOW,
    StepTime,
)


def learnt(floor=0.4, per_token=0.0005, steps=8):
    step_time = StepTime()
    for number in range(steps):
        step_time.step_took(1 + number % 3, floor + per_token * (1 + number % 3))
        step_time.step_took(100 * (number + 1), floor + per_token * 100 * (number + 1))
    return step_time


def test_nothing_is_believed_before_enough_was_seen():
    step_time = learnt(steps=3)
    assert not step_time.known
    assert step_time.tokens_per_pass == ASSUMED_TOKENS_PER_PASS
    assert step_time.seconds(1000, 3) == 0


def test_floor_and_cost_per_token_are_found():
    step_time = learnt()
    assert step_time.floor_seconds == pytest.approx(0.4, rel=0.01)
    assert step_time.token_seconds == pytest.approx(0.0005, rel=0.01)
    assert step_time.tokens_per_pass == pytest.approx(800, rel=0.02)
    assert step_time.seconds(2000, 2) == pytest.approx(1.8, rel=0.02)
    assert step_time.seconds(2000) == pytest.approx(1.0, rel=0.02)


def test_stalled_steps_do_not_count():
    step_time = learnt(steps=20)
    for _ in range(5):
        step_time.step_took(1, 30.0)
        step_time.step_took(500, 30.0)
    assert step_time.tokens_per_pass == pytest.approx(800, rel=0.05)


def test_a_change_of_load_is_followed():
    step_time = learnt(steps=64)
    for number in range(64):
        step_time.step_took(1, 0.01)
        step_time.step_took(500 + number, 0.01 + 0.001 * (500 + number))
    assert step_time.tokens_per_pass == pytest.approx(9, rel=0.2)


def test_many_requests_that_decode_together_are_no_prompt():
    step_time = learnt()
    for _ in range(64):
        step_time.step_took(200, 0.41, prefill=False)
    assert step_time.token_seconds == pytest.approx(0.0005, rel=0.01)


def test_steps_without_tokens_or_time_do_not_count():
    step_time = StepTime()
    step_time.step_took(0, 1.0)
    step_time.step_took(5, 0.0)
    assert step_time.seconds(100, 1) == 0


def test_short_steps_of_decodes_show_the_floor():
    step_time = StepTime()
    for number in range(8):
        step_time.step_took(1 + number % 3, 0.4, prefill=False)
        step_time.step_took(1000, 0.9)
    assert step_time.known and step_time.floor_seconds == pytest.approx(0.4, rel=0.01)


def test_a_step_of_just_the_length_shows_the_cost_of_a_token():
    for tokens, known in ((LONG_STEP, True), (LONG_STEP - 1, False)):
        step_time = StepTime()
        for _ in range(8):
            step_time.step_took(1, 0.4)
            step_time.step_took(tokens, 0.9)
        assert step_time.known is known


def test_enough_steps_of_both_sorts_are_believed_at_once():
    step_time = learnt(steps=ENOUGH - 1)
    assert not step_time.known
    step_time.step_took(1, 0.4005)
    step_time.step_took(1000, 0.9)
    assert step_time.known and step_time.tokens_per_pass == pytest.approx(800, rel=0.02)


def test_a_known_rate_is_computed_again_after_some_steps_and_not_at_each():
    step_time = learnt(steps=RENEWAL // 2)
    assert step_time.token_seconds == pytest.approx(0.0005, rel=0.01)
    for _ in range(RENEWAL - 1):
        step_time.step_took(1000, 2.4)
    assert step_time.token_seconds == pytest.approx(0.0005, rel=0.01)
    for _ in range(WINDOW):
        step_time.step_took(1000, 2.4)
    assert step_time.token_seconds == pytest.approx(0.002, rel=0.01)
