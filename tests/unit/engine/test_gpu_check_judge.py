"""How `seamark gpu-check` judges: what is asked, answers beside a reference's, its scatter, speed, the block copy."""

from __future__ import annotations

import pytest

from engine_patches.gpu_check import judge
from engine_patches.gpu_check.draft_oracle import place_of
from engine_patches.gpu_check.engine import CheckedAnswer
from engine_patches.gpu_check.job import LaneResult
from engine_patches.gpu_check.judge import NOT_RUN, OK, STRICT, WRONG, Discrepancy, JudgeRule, compare, rule_from
from engine_patches.gpu_check.questions import (
    DEFECTS,
    EXACT,
    NO_ROWS,
    RESEND,
    SHARED_LENGTHS,
    Geometry,
    Question,
    TokenRange,
    length_section,
    own_sections,
    sections,
)
from engine_patches.gpu_check.speed import WARM, FirstTokens

GEOMETRY = Geometry(block=384, alignment=16, budget=2048)


def test_questions_are_the_same_each_time_and_owe_hits_on_the_alignment():
    asked = sections(GEOMETRY, quick=False)
    assert asked == sections(GEOMETRY, quick=False)
    questions = [question for waves in asked.values() for wave in waves for question in wave]
    assert len(questions) > 100
    assert all(question.hit % 16 == 0 and question.hit < len(question.tokens) for question in questions if question.hit)


def test_beside_drafts_a_hit_is_what_also_shares_what_comes_next():
    def hits(ahead: int) -> dict[str, int | None]:
        asked = sections(GEOMETRY._replace(ahead=ahead), quick=True)
        return {question.case: question.hit for waves in asked.values() for wave in waves for question in wave}

    assert [hits(ahead)["warm, 384 shared"] for ahead in (0, 16, 1)] == [384, 368, 368]
    assert [hits(ahead)["warm, 385 shared"] for ahead in (0, 16, 1)] == [384, 368, 384]
    # All of a prompt is shared when it is sent again, but its last token is computed.
    assert [hits(ahead)["resent, ends after 384"] for ahead in (0, 16, 1)] == [368, 368, 368]
    assert min(hit for hit in hits(16).values() if hit is not None) == 0


def test_an_own_models_questions_share_each_length_and_name_ordinary_tokens():
    asked = own_sections(GEOMETRY, (2000, 163), TokenRange(1000, 2000))
    assert list(asked) == [length_section(163), length_section(2000), *DEFECTS]
    for shared in (163, 2000):
        (cold,), (warm, other), (again,) = asked[length_section(shared)]
        assert cold.tokens[:shared] == warm.tokens[:shared] == other.tokens[:shared]
        assert cold.tokens[shared] != warm.tokens[shared] and again.tokens == warm.tokens
        assert (cold.hit, warm.hit, other.hit) == (0, shared // 16 * 16, shared // 16 * 16)
        assert all(1000 <= token < 2000 for token in [*cold.tokens, *warm.tokens, *other.tokens])
    assert SHARED_LENGTHS == (163, 2000, 8000, 32000)


def answer(*tokens: int, second: int = 9, gap: float = 0.5, cached: int = 0) -> CheckedAnswer:
    """Greedy tokens, each followed by `second` as the next best."""
    return CheckedAnswer(tokens, [{token: -1.0, second: -1.0 - gap} for token in tokens], cached)


def test_answers_are_compared_up_to_the_first_other_token():
    assert compare(answer(1, 2, 3), answer(1, 2, 3)) == Discrepancy(None, 0.0, 0.0)
    assert compare(answer(1, 9, 3, second=2), answer(1, 2, 3)) == Discrepancy(1, 0.5, 0.5)
    close = compare(answer(1, 9, second=2, gap=0.05), answer(1, 2, gap=0.05))
    assert (close.token, round(close.tie, 6), round(close.error, 6)) == (1, 0.05, 0.05)


SAME, TIED, OTHER = Discrepancy(None, 0, 0.02), Discrepancy(3, 0.05, 0.05), Discrepancy(3, 0.3, 0.05)


@pytest.mark.parametrize(
    ("rule", "differences", "same"),
    [
        (JudgeRule(error=0.1, tie=0.1, share=0.01), [SAME] * 99 + [TIED], True),
        (JudgeRule(error=0.1, tie=0.1, share=0.01), [SAME] * 98 + [TIED] * 2, False),
        (JudgeRule(error=0.1, tie=0.1, share=0.01), [SAME] * 99 + [OTHER], False),
        (STRICT, [SAME], False),
    ],
)
def test_another_token_is_let_pass_only_at_a_tie_and_in_few_answers(rule, differences, same):
    assert rule.accepts_all(differences) == same


def test_the_references_own_scatter_sets_the_rule():
    steady = LaneResult(answers={EXACT: [answer(1, 2)]}, answers_again={EXACT: [answer(1, 2)]})
    assert rule_from(steady) == JudgeRule(error=0.1, tie=0.1, share=0.01)
    unsteady = LaneResult(answers={EXACT: [answer(1, 2)]}, answers_again={EXACT: [answer(1, 9, second=2)]})
    assert rule_from(unsteady) == JudgeRule(error=1.0, tie=1.0, share=1.0)


def test_a_heads_own_drafts_are_compared_where_they_were_made_and_planted_rows_have_to_show():
    asked = {EXACT: [[Question("asked", [1], [], 0)]], NO_ROWS: [[], [Question("warm", [2], [], 0)]]}
    one, two, three = (place_of([1], count) for count in (1, 2, 3))
    warm = place_of([2], 1)
    cold = LaneResult({}, asked, proposed={EXACT: {one: [5], two: [6]}, NO_ROWS: {warm: [7]}})

    def result(at_two: int, at_warm: int) -> LaneResult:
        proposed = {EXACT: {one: [5], two: [at_two], three: [4]}, NO_ROWS: {warm: [at_warm]}}
        return LaneResult({}, asked, proposed=proposed)

    for found, equal in ((result(6, 7), 2), (result(9, 7), 1)):
        check = judge.acceptance("lane", found, cold, cold, STRICT, own_model=False)
        assert check.numbers is not None and check.numbers["own drafts"] == {"equal": equal, "compared": 2}
    verdicts = [
        check.verdict
        for drafts, own in ((8, False), (7, False), (7, True))
        for check in judge.rows_of_heads("lane", result(6, drafts), cold, own)
    ]
    assert verdicts == [OK, WRONG, NOT_RUN]
    assert not list(judge.rows_of_heads("lane", LaneResult(), cold, False))


def test_the_block_copy_is_wrong_only_if_its_cure_fails():
    asked = {RESEND: [[Question("cold", [1], [], 0), Question("resent", [1], [], 16)]]}
    right, spoiled = [answer(1, 2), answer(1, 2, cached=16)], [answer(1, 2), answer(9, 9, second=1, cached=16)]
    good, bad = (
        LaneResult({"pages_at_one_address": [512, 1024]}, asked, {RESEND: answers}) for answers in (right, spoiled)
    )
    bites = judge.block_copy("lane", bad, good, good, STRICT)
    assert bites.verdict == OK and "1 of 1 resent answers wrong" in bites.says and "512 and 1024" in bites.says
    assert judge.block_copy("lane", bad, bad, good, STRICT).verdict == WRONG


def timed(*measured: tuple[int, float, int]) -> LaneResult:
    return LaneResult(
        first_tokens=[FirstTokens(WARM, shared, seconds, cached, 1) for shared, seconds, cached in measured]
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
    check = judge.speed("lane", timed(*mine), timed(*alone), "vLLM alone")
    assert check.verdict == OK and check.numbers is not None and check.numbers["hits_save_time"] == saves
