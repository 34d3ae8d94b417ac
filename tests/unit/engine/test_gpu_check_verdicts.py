"""How `seamark gpu-check` judges: answers beside a reference's, its own scatter, passes, speed, the block copy."""

from __future__ import annotations

from typing import Any

from engine_patches.gpu_check.engine import Answer
from engine_patches.gpu_check.job import Result
from engine_patches.gpu_check.questions import (
    ALIGNED,
    DEFECTS,
    EXACT,
    RESEND,
    SHARED_LENGTHS,
    Geometry,
    Question,
    TokenRange,
    length_section,
    own_sections,
    sections,
)
from engine_patches.gpu_check.speed import WARM, FirstTokens, Passes
from engine_patches.gpu_check.verdicts import (
    NOT_RUN,
    OK,
    STRICT,
    WRONG,
    Difference,
    Rule,
    compare,
    judge_answers,
    judge_block_copy,
    judge_passes,
    judge_speed,
    rule_from,
)

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

    case, last = "warm, 384 shared", "resent, ends after 384"
    assert [hits(ahead)[case] for ahead in (0, 16, 1)] == [384, 368, 368]
    assert [hits(ahead)["warm, 385 shared"] for ahead in (0, 16, 1)] == [384, 368, 384]
    # All of a prompt is shared when it is sent again, but its last token is computed.
    assert [hits(ahead)[last] for ahead in (0, 16, 1)] == [368, 368, 368]
    assert min(hit for hit in hits(16).values() if hit is not None) == 0


def test_an_own_models_questions_share_each_length_and_name_ordinary_tokens():
    ids = TokenRange(1000, 2000)
    asked = own_sections(GEOMETRY, (2000, 163), ids)
    assert list(asked) == [length_section(163), length_section(2000), *DEFECTS]
    for shared in (163, 2000):
        (cold,), (warm, other), (again,) = asked[length_section(shared)]
        assert cold.tokens[:shared] == warm.tokens[:shared] == other.tokens[:shared]
        assert cold.tokens[shared] != warm.tokens[shared] and again.tokens == warm.tokens
        assert (cold.hit, warm.hit, other.hit) == (0, shared // 16 * 16, shared // 16 * 16)
        assert all(1000 <= token < 2000 for token in [*cold.tokens, *warm.tokens, *other.tokens])
    assert SHARED_LENGTHS == (163, 2000, 8000, 32000)


def answer(*tokens: int, second: int = 9, gap: float = 0.5, cached: int = 0) -> Answer:
    """Greedy tokens, each followed by `second` as the next best."""
    return Answer(tokens, [{token: -1.0, second: -1.0 - gap} for token in tokens], cached)


def test_answers_are_compared_up_to_the_first_other_token():
    assert compare(answer(1, 2, 3), answer(1, 2, 3)) == Difference(None, 0.0, 0.0)
    assert compare(answer(1, 9, 3, second=2), answer(1, 2, 3)) == Difference(1, 0.5, 0.5)
    close = compare(answer(1, 9, second=2, gap=0.05), answer(1, 2, gap=0.05))
    assert (close.token, round(close.tie, 6), round(close.error, 6)) == (1, 0.05, 0.05)


def test_another_token_is_let_pass_only_at_a_tie_and_in_few_answers():
    loose = Rule(error=0.1, tie=0.1, share=0.01)
    same, tied, other = Difference(None, 0, 0.02), Difference(3, 0.05, 0.05), Difference(3, 0.3, 0.05)
    assert loose.accepts_all([same] * 99 + [tied])
    assert not loose.accepts_all([same] * 98 + [tied] * 2)
    assert not loose.accepts_all([same] * 99 + [other])
    assert not STRICT.accepts_all([same])


def test_the_references_own_scatter_sets_the_rule():
    steady = Result(answers={EXACT: [answer(1, 2)]}, answers_again={EXACT: [answer(1, 2)]})
    assert rule_from(steady) == Rule(error=0.1, tie=0.1, share=0.01)
    unsteady = Result(answers={EXACT: [answer(1, 2)]}, answers_again={EXACT: [answer(1, 9, second=2)]})
    assert rule_from(unsteady) == Rule(error=1.0, tie=1.0, share=1.0)


def results(warm: Answer, spoiled: Answer) -> tuple[Result, Result]:
    """A patched engine that resumed with `warm`, and `spoiled` with a planted defect; and a reference."""
    cold, right = Question("cold", [1], [], 0), answer(1, 2, 3)
    asked = {name: [[cold], [Question("warm", [1], [], 16)]] for name in (EXACT, ALIGNED, RESEND, *DEFECTS)}
    answers = {name: [right, spoiled if name in DEFECTS else warm] for name in asked}
    return Result(sections=asked, answers=answers), Result(answers={name: [right, right] for name in asked})


def test_a_right_engine_is_found_right():
    patched, reference = results(answer(1, 2, 3, cached=16), answer(9, 9, 9, second=1))
    assert [check.verdict for check in judge_answers("lane", patched, reference, STRICT)] == [OK, OK, OK]


def test_missing_hits_wrong_tokens_and_blindness_are_found_wrong():
    spoiled = answer(9, 9, 9, second=1)
    missed, reference = results(answer(1, 2, 3, cached=0), spoiled)
    assert [check.verdict for check in judge_answers("lane", missed, reference, STRICT)] == [WRONG, WRONG, OK]
    other, reference = results(answer(1, 9, 3, second=2, cached=16), spoiled)
    assert [check.verdict for check in judge_answers("lane", other, reference, STRICT)] == [WRONG, WRONG, OK]
    blind, reference = results(answer(1, 2, 3, cached=16), answer(1, 2, 3))
    assert [check.verdict for check in judge_answers("lane", blind, reference, STRICT)] == [OK, OK, WRONG]


def test_a_second_pass_is_wrong():
    once, twice = Passes("cold", 100, 0, 1, 1), Passes("warm", 100, 64, 2, 1)
    assert judge_passes("lane", {"Seamark": Result(passes=[once, once])}).verdict == OK
    assert judge_passes("lane", {"Seamark": Result(passes=[once, twice])}).verdict == WRONG
    assert judge_passes("lane", {"Seamark": Result()}).verdict == WRONG


def test_a_pass_more_is_only_told_where_states_are_not_written_inside_one():
    slow = Result({"writes_in_forward": False}, passes=[Passes("cold", 100, 0, 2, 1), Passes("warm", 100, 64, 1, 1)])
    assert judge_passes("lane", {"Seamark": slow}).verdict == OK


def test_on_an_own_model_only_other_tokens_are_wrong():
    missed, reference = results(answer(1, 2, 3, cached=0), answer(1, 2, 3))
    verdicts = [check.verdict for check in judge_answers("lane", missed, reference, STRICT, own_model=True)]
    assert verdicts == [NOT_RUN, NOT_RUN, NOT_RUN]
    other, reference = results(answer(1, 9, 3, second=2, cached=16), answer(9, 9, 9, second=1))
    assert judge_answers("lane", other, reference, STRICT, own_model=True)[0].verdict == WRONG


def test_defects_that_nobody_had_time_to_plant_prove_nothing():
    patched, reference = results(answer(1, 2, 3, cached=16), answer(9, 9, 9, second=1))
    del patched.answers[DEFECTS[1]]
    assert judge_answers("lane", patched, reference, STRICT)[-1].verdict == NOT_RUN


def test_the_block_copy_is_wrong_only_if_its_cure_fails():
    pages: dict[str, Any] = {"pages_at_one_address": [512, 1024]}
    right, spoiled = [answer(1, 2), answer(1, 2, cached=16)], [answer(1, 2), answer(9, 9, second=1, cached=16)]
    good, bad = Result(pages, answers={RESEND: right}), Result(pages, answers={RESEND: spoiled})
    bites = judge_block_copy("lane", bad, good, good, STRICT)
    assert bites.verdict == OK and "1 of 1 resent answers wrong" in bites.says and "512 and 1024" in bites.says
    assert judge_block_copy("lane", bad, bad, good, STRICT).verdict == WRONG


def timed(seconds: float, cached: int) -> Result:
    return Result(first_tokens=[FirstTokens(WARM, 163, 9.0, 160, 1), FirstTokens(WARM, 2000, seconds, cached, 1)])


def test_hits_save_time_only_if_the_longest_prefix_that_both_were_asked_for_is_clearly_sooner():
    def saves(mine: Result, alone: Result) -> bool:
        check = judge_speed("lane", mine, alone, "vLLM alone")
        assert check.verdict == OK and check.numbers is not None
        return bool(check.numbers["hits_save_time"])

    assert saves(timed(1.0, 1984), timed(1.2, 0))
    assert not saves(timed(1.0, 1984), timed(1.01, 0))
    assert not saves(timed(1.0, 0), timed(2.0, 0))  # faster, but by no hit
    shorter = Result(first_tokens=timed(1.0, 0).first_tokens[:1])
    assert not saves(timed(0.1, 1984), shorter)
