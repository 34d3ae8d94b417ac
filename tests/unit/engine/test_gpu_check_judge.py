"""How `seamark gpu-check` judges: what is asked, answers beside a reference's, the reference's own scatter, speed."""

from __future__ import annotations

import pytest

from engine_patches.gpu_check import judge
from engine_patches.gpu_check.engine import CheckedAnswer
from engine_patches.gpu_check.job import WARM, FirstTokens, LaneResult
from engine_patches.gpu_check.judge import OK, WRONG
from engine_patches.gpu_check.questions import DEFECTS, FIRST, RESEND, Question, sections

LENGTHS = {"block": 384, "alignment": 16, "budget": 2048}


def test_questions_are_the_same_each_time_and_the_few_that_prove_most_come_first():
    asked = sections(LENGTHS, few=False)
    assert asked == sections(LENGTHS, few=False)
    assert list(asked)[:4] == [FIRST, *DEFECTS] and len([q for waves in asked.values() for w in waves for q in w]) > 100
    assert asked.keys() > sections(LENGTHS, few=True).keys() == {FIRST, *DEFECTS, RESEND}


def answer(*tokens: int, second: int = 9, gap: float = 0.5) -> CheckedAnswer:
    """Greedy tokens, each followed by `second` as the next best."""
    return CheckedAnswer(tokens, [{token: -1.0, second: -1.0 - gap} for token in tokens], 0)


def test_the_block_copy_is_wrong_only_if_its_cure_fails():
    asked = {RESEND: [[Question("cold", [1], [], 0), Question("resent", [1], [], None)]]}
    facts = {"exact": True, "ahead": 0, "alignment": 16, "windows": False}
    right, spoiled = answer(1, 2), answer(9, 9, second=1)._replace(cached=16)
    alone = LaneResult(facts, asked, {RESEND: [right, right]}, from_cache=[right, spoiled])
    bites = judge.block_copy("lane", alone, alone)
    assert bites.verdict == OK and "1 of 1 resent answers wrong" in bites.says
    assert judge.block_copy("lane", LaneResult(facts, asked, {RESEND: [right, spoiled]}), alone).verdict == WRONG


def timed(*measured: tuple[int, float, int]) -> LaneResult:
    return LaneResult(
        first_tokens=[FirstTokens(WARM, shared, 1, seconds, cached, 1, 0) for shared, seconds, cached in measured]
    )


@pytest.mark.parametrize(
    ("mine", "alone", "saves"),
    [
        ([(163, 9.0, 160), (2000, 1.0, 1984)], [(163, 9.0, 160), (2000, 1.2, 0)], True),
        ([(163, 9.0, 160), (2000, 1.0, 1984)], [(163, 9.0, 160), (2000, 1.01, 0)], False),
        ([(2000, 1.0, 0)], [(2000, 2.0, 0)], False),  # faster, but by no hit
        ([(163, 9.0, 160), (2000, 0.1, 1984)], [(163, 9.0, 160)], False),
    ],
)
def test_hits_save_time_only_if_the_longest_prefix_that_both_were_asked_for_is_clearly_sooner(mine, alone, saves):
    check = judge.speed("lane", timed(*mine), timed(*alone))
    assert check.verdict == OK and check.numbers is not None and check.numbers["hits_save_time"] == saves
