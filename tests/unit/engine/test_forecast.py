"""The next steps are played through as vLLM fills them: what runs first, then the line, up to the budget."""

from engine_patches.scheduler.forecast import MAX_STEPS, ForecastEngine, ForecastJob, first_tokens

ENGINE = ForecastEngine(budget=8192, chunk=8192, alignment=16, slots=256, tokens_per_pass=800)


def both(jobs, missing, engine=ENGINE, running=1, leader=0):
    """Sums of times to the first token: followers held, and running along."""
    return [first_tokens(jobs, running, leader, missing, engine, hold) for hold in (True, False)]


def test_long_lines_cost_a_bounded_number_of_steps():
    engine = ENGINE._replace(budget=16)
    jobs = [ForecastJob(100_000), *[ForecastJob(100_000, shared=50_000)] * 3]
    held, along = both(jobs, 50_000, engine)
    assert held == along > 4 * MAX_STEPS * 816
