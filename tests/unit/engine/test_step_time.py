"""The pace of passes with prompts is learnt from these alone; a stalled one does not count."""

import random

import pytest

from engine_patches.scheduler.step_time import (
    ASSUMED_TOKENS_PER_PASS,
    StepTime,
)

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


@pytest.mark.parametrize(("generating", "floor"), [([0.1], 0.1), ([], ASSUMED_TOKENS_PER_PASS / 2800 * 0.66)])
def test_where_all_prompts_have_one_length_the_floor_is_that_of_generating_or_assumed(generating, floor):
    step_time = learnt(0.26, 0.0002, lengths=lambda draw: 2000, generating=generating)
    assert step_time.floor_seconds == pytest.approx(floor, rel=0.03)
    assert step_time.seconds(2000, 1) == pytest.approx(0.66, rel=0.03)
