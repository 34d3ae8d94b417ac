"""The next steps are played through as vLLM fills them: what runs first, then the line, up to the budget."""

import pytest

from engine_patches.scheduler.forecast import MAX_STEPS, ForecastEngine, ForecastJob, first_tokens

ENGINE = ForecastEngine(budget=8192, chunk=8192, alignment=16, slots=256, tokens_per_pass=800)


def both(jobs, missing, engine=ENGINE, running=1, leader=0):
    """Sums of times to the first token: followers held, and running along."""
    return [first_tokens(jobs, running, leader, missing, engine, hold) for hold in (True, False)]


def test_a_lone_follower_waits_a_pass_and_saves_its_prefix():
    held, along = both([ForecastJob(1060), ForecastJob(1060, shared=1000)], 1000)
    assert along == 2 * (800 + 2 * 1060)
    assert held == (800 + 1060) + (2 * 800 + 1060 + 60)


def test_followers_that_a_step_has_no_room_for_find_the_state_in_the_next_one():
    engine = ENGINE._replace(budget=2120)
    held, along = both([ForecastJob(1060), *[ForecastJob(1060, shared=1000)] * 3], 1000, engine)
    assert along == 2 * (800 + 2120) + 2 * (2 * 800 + 2120 + 2 * 60)
    assert held == (800 + 1060) + 3 * (2 * 800 + 1060 + 3 * 60)


def test_held_followers_leave_the_step_to_those_behind_them_who_then_run_first():
    engine = ENGINE._replace(budget=2000)
    held, along = both([ForecastJob(1000), ForecastJob(1000, shared=992), ForecastJob(3000)], 992, engine)
    assert along == 2 * (800 + 2000) + (3 * 800 + 2000 + 3000)
    assert held == (800 + 1992) + 2 * (3 * 800 + 1992 + 2000 + 2 * 8) > along


def test_a_leader_in_the_midst_of_its_prefix_is_done_earlier():
    early, _ = both([ForecastJob(1060), ForecastJob(1060, shared=1000)], 1000)
    late, _ = both([ForecastJob(560), ForecastJob(1060, shared=1000)], 500)
    assert late == early - 2 * 500


def test_a_chunk_ends_on_a_multiple_of_the_alignment_and_leaves_the_rest_to_the_next():
    engine = ENGINE._replace(budget=1000, alignment=64)
    (_, along) = both([ForecastJob(990), ForecastJob(900), ForecastJob(8)], 990, engine)
    assert along == (800 + 1000) + 2 * (1600 + 1000 + 898)


@pytest.mark.parametrize("hold", [True, False])
def test_few_slots_let_few_requests_run(hold):
    engine = ENGINE._replace(slots=2)
    jobs = [ForecastJob(100), ForecastJob(100), ForecastJob(100)]
    assert first_tokens(jobs, 1, 0, 96, engine, hold) == 2 * (800 + 200) + (1000 + 100 * (1 + 800 / 8192))


def test_long_lines_cost_a_bounded_number_of_steps():
    engine = ENGINE._replace(budget=16)
    jobs = [ForecastJob(100_000), *[ForecastJob(100_000, shared=50_000)] * 3]
    held, along = both(jobs, 50_000, engine)
    assert held == along > 4 * MAX_STEPS * 816
