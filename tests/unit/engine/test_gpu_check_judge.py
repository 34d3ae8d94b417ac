"""How `seamark gpu-check` judges: what is asked, answers beside a reference's, the reference's own scatter, speed."""

from __future__ import annotations

import pytest

from engine_patches.gpu_check import judge
from engine_patches.gpu_check.engine import CheckedAnswer
from engine_patches.gpu_check.job import WARM, FirstTokens, LaneResult
from engine_patches.gpu_check.judge import (
    EXACT,
    NOT_RUN,
    OK,
    ROUNDED,
    WRONG,
    Differences,
    Discrepancy,
    Scatter,
    compare,
)
from engine_patches.gpu_check.questions import (
    DEFECTS,
    FIRST,
    RESEND,
    SHARED_LENGTHS,
    Question,
    length_section,
    own_sections,
    sections,
)

LENGTHS = {"block": 384, "alignment": 16, "budget": 2048}


def test_questions_are_the_same_each_time_and_the_few_that_prove_most_come_first():
    asked = sections(LENGTHS, few=False)
    assert asked == sections(LENGTHS, few=False)
    assert list(asked)[:4] == [FIRST, *DEFECTS] and len([q for waves in asked.values() for w in waves for q in w]) > 100
    assert asked.keys() > sections(LENGTHS, few=True).keys() == {FIRST, *DEFECTS, RESEND}


@pytest.mark.parametrize(
    ("ahead", "hits"),
    [
        (0, {"warm, 384 shared": 384, "warm, 385 shared": 384, "resent, ends after 384": 368}),
        # Beside drafts a hit is what also shares what comes next.
        (16, {"warm, 384 shared": 368, "warm, 385 shared": 368, "resent, ends after 384": 368}),
        (1, {"warm, 384 shared": 368, "warm, 385 shared": 384, "resent, ends after 384": 368}),
    ],
)
def test_a_question_owes_the_last_aligned_state_before_what_it_computes(ahead, hits):
    waves = sections(LENGTHS, few=True)[FIRST]
    facts = {"ahead": ahead, "alignment": 16}
    owed = {question.case: question.hit(facts) for wave in waves for question in wave}
    assert hits == {case: owed[case] for case in hits}
    assert all(hit is None or hit % 16 == 0 for hit in owed.values())


def test_an_own_models_questions_share_each_length_and_name_ordinary_tokens():
    asked = own_sections(LENGTHS, (2000, 163), range(1000, 2000))
    assert list(asked) == [length_section(163), *DEFECTS, length_section(2000)]
    for shared in (163, 2000):
        (cold,), (warm, other), (again,) = asked[length_section(shared)]
        assert cold.tokens[:shared] == warm.tokens[:shared] == other.tokens[:shared]
        assert cold.tokens[shared] != warm.tokens[shared] and again.tokens == warm.tokens
        assert all(1000 <= token < 2000 for token in [*cold.tokens, *warm.tokens, *other.tokens])
    assert SHARED_LENGTHS == (163, 2000, 8000, 32000) and not {*own_sections(LENGTHS, (163,), range(9), False)} & {
        *DEFECTS
    }


def answer(*tokens: int, second: int = 9, gap: float = 0.5) -> CheckedAnswer:
    """Greedy tokens, each followed by `second` as the next best."""
    return CheckedAnswer(tokens, [{token: -1.0, second: -1.0 - gap} for token in tokens], 0)


def test_answers_are_compared_up_to_the_first_other_token():
    assert compare(answer(1, 2, 3), answer(1, 2, 3)) == Discrepancy(None, 0.0)
    assert compare(answer(1, 9, 3, second=2), answer(1, 2, 3)) == Discrepancy(1, 0.5)
    close = compare(answer(1, 9, second=2, gap=0.05), answer(1, 2, gap=0.05))
    assert (close.token, round(close.error, 6)) == (1, 0.05)
    assert compare(answer(1, second=8, gap=2.0), answer(1, second=9, gap=3.0)) == Discrepancy(None, 1.0)


SAME, TIED, OFF, FAR = Discrepancy(None, 0.02), Discrepancy(3, 0.1), Discrepancy(None, 0.4), Discrepancy(3, 2.0)


@pytest.mark.parametrize(
    ("bound", "own", "differences", "verdict"),
    [
        (ROUNDED, [], [SAME, *[TIED] * 9], OK),
        (ROUNDED, [], [SAME, OFF], NOT_RUN),  # beyond the bound, and not clearly
        (ROUNDED, [], [OFF] * 4, WRONG),  # more often than chance has it
        (ROUNDED, [SAME, OFF], [OFF] * 4, NOT_RUN),  # vLLM alone is no steadier
        (ROUNDED, [SAME] * 9, [SAME, FAR], WRONG),
        (ROUNDED, [FAR], [SAME, FAR], NOT_RUN),
        (EXACT, [], [SAME], WRONG),
    ],
)
def test_beyond_the_bound_only_what_is_clearly_beyond_vllms_own_scatter_is_wrong(bound, own, differences, verdict):
    scatter = Scatter(LaneResult({"exact": bound == EXACT}))
    scatter.own.extend(own)
    asked = Differences([], [])
    asked.extend(differences)
    assert scatter.verdict(asked) == verdict


def test_the_scatter_is_what_vllm_alone_answers_otherwise_the_second_time():
    again = LaneResult({"exact": False}, {}, {FIRST: [answer(1, 2)]}, {FIRST: [answer(1, 9, second=2)]})
    assert Scatter(again).own == [Discrepancy(1, 0.5)]
    assert str(Scatter(again)).startswith("vLLM alone differs from itself so: 1 of 1 answers with another token")


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
