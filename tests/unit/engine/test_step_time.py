"""The pace of passes with prompts is learnt from these alone; a stalled one does not count."""

import random

import pytest

from engine_patches.scheduler.step_time import (
    ASSUMED_STATE_PASSES,
    ASSUMED_TOKENS_PER_PASS,
    ENOUGH,
    MOST_TOKENS_PER_PASS,
    StepTime,
)

# Seconds of a pass that generates; floor and seconds a token of one with a prompt; seconds of a state.
ENGINES = {
    "an H200, launched": (0.0046, 0.060, 6e-6, 0.0003),
    "an H100, launch half hidden": (0.0046, 0.025, 12e-6, 0.003),
    "graphs for prompts, too": (0.0046, 0.006, 12e-6, 0.0),
    "a Spark": (0.050, 0.080, 350e-6, 0.001),
    "a CPU": (0.050, 0.052, 1.5e-3, 0.015),
}
LENGTHS = {
    "suffixes behind hits": lambda draw: draw.randint(64, 200),
    "whole prompts": lambda draw: draw.randint(1000, 4000),
    "few whole prompts among suffixes": lambda draw: draw.choice([100] * 9 + [8000]) + draw.randint(0, 64),
}


def learnt(floor=0.4, token=0.0005, state=0.0, passes=400, lengths=LENGTHS["whole prompts"], generating=(), most=0):
    """A learner of so many passes, whose times scatter by 3 %, each behind passes that generate."""
    draw, step_time = random.Random(1), StepTime()
    for _ in range(passes):
        tokens, states = lengths(draw), draw.randint(0, most)
        seconds = (floor + token * tokens + state * states) * draw.uniform(0.97, 1.03)
        step_time.step_took(tokens, seconds, states=states)
        for each in generating:
            step_time.step_took(1, each * draw.uniform(0.97, 1.03), prefill=False)
    return step_time


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_floor_token_and_state_are_found_whatever_prompts_are_usual(engine, lengths):
    generating, floor, token, state = engine
    step_time = learnt(floor, token, state, lengths=lengths, generating=[generating] * 8, most=3)
    # Where launches take so long that their scatter hides the tokens, 2,000 of them are within a tenth of a pass.
    assert step_time.token_seconds == pytest.approx(token, rel=0.1, abs=0.1 * floor / 2000)
    assert step_time.pace.state == pytest.approx(state, rel=0.25, abs=0.02 * floor + 0.01 * token * 2000)
    # A floor is told apart as well as the shortest prompts show it.
    assert step_time.floor_seconds == pytest.approx(floor, rel=0.25, abs=0.02 * token * lengths(random.Random(3)))
    assert step_time.pace.decode == pytest.approx(generating, rel=0.03)
    worth = step_time.tokens_worth(passes=2, states=1, decodes=3)
    seconds = 2 * step_time.floor_seconds + step_time.pace.state + 3 * step_time.pace.decode
    assert worth == pytest.approx(seconds / step_time.token_seconds)
    assert step_time.seconds(2000, 3) == pytest.approx(3 * step_time.floor_seconds + 2000 * step_time.token_seconds)


@pytest.mark.parametrize(("generating", "floor"), [([0.1], 0.1), ([], ASSUMED_TOKENS_PER_PASS / 2800 * 0.66)])
def test_where_all_prompts_have_one_length_the_floor_is_that_of_generating_or_assumed(generating, floor):
    step_time = learnt(0.26, 0.0002, lengths=lambda draw: 2000, generating=generating)
    assert step_time.floor_seconds == pytest.approx(floor, rel=0.03)
    assert step_time.seconds(2000, 1) == pytest.approx(0.66, rel=0.03)


def test_nothing_is_believed_before_enough_was_seen():
    step_time = learnt(passes=ENOUGH - 1, generating=[0.4] * 9)
    assert not step_time.known and step_time.seconds(1000, 3) == 0
    assert step_time.tokens_worth(3, 2, 1) == ASSUMED_TOKENS_PER_PASS * (4 + 2 * ASSUMED_STATE_PASSES)
    step_time.step_took(1000, 0.9)
    assert step_time.known and step_time.tokens_per_pass == pytest.approx(800, rel=0.25)


def test_stalled_passes_do_not_count_nor_do_those_that_show_nothing():
    step_time = learnt()
    before = step_time.pace
    for tokens, seconds in ((0, 1.0), (5, 0.0), (500, -1.0)):
        step_time.step_took(tokens, seconds)
    assert step_time.pace is before
    for _ in range(5):
        step_time.step_took(500, 30.0)
        step_time.step_took(200, 50.0, prefill=False)  # many requests that generate together are no prompt
        for tokens in (100, 500, 1500, 4000):
            step_time.step_took(tokens, 0.4 + 0.0005 * tokens)
    assert list(step_time.pace[:3]) == pytest.approx(list(before[:3]), rel=0.1, abs=0.01)


@pytest.mark.parametrize("factor", [0.25, 4])
def test_a_change_of_load_is_followed(factor):
    draw, step_time = random.Random(2), learnt()
    for _ in range(160):
        tokens = draw.randint(60, 4000)
        step_time.step_took(tokens, (0.4 + 0.0005 * tokens) * factor)
    assert step_time.floor_seconds == pytest.approx(0.4 * factor, rel=0.2)
    assert step_time.token_seconds == pytest.approx(0.0005 * factor, rel=0.2)


def test_prompts_that_take_as_long_as_shorter_ones_say_nothing_of_long_ones():
    step_time = learnt(token=0.0, lengths=LENGTHS["suffixes behind hits"])
    assert 0 < step_time.tokens_per_pass <= MOST_TOKENS_PER_PASS * 1.001
