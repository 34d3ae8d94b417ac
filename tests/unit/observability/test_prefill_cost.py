"""What prompts cost a worker, as learnt from the seconds to their first tokens."""

from __future__ import annotations

import pytest

from proxy.observability.prefill_cost import RENEWAL, CostLearner


def learnt(*lengths: int, floor: float = 0.5, token: float = 0.001) -> CostLearner:
    """Prompts of so many tokens, which cost a floor and the same for each token."""
    pace = CostLearner()
    for tokens in lengths:
        pace.observe(tokens, 0, floor + token * tokens, alone=True)
    return pace


def test_a_pace_below_nothing_is_none_and_so_is_a_floor():
    assert learnt(*range(100, 1100, 100), floor=5.0, token=-0.001).model is None
    assert learnt(*range(100, 1100, 100), token=0.0).model is None
    model = learnt(*range(1000, 11000, 1000), floor=-0.5).model
    assert model is not None and (model.floor_seconds, model.token_seconds) == (0.0, pytest.approx(0.001))


def test_what_was_cached_in_full_or_took_no_time_tells_nothing():
    pace = learnt(*range(100, 600, 100))
    for _ in range(10):
        pace.observe(100, 100, 1.0, alone=True)
        pace.observe(100, 0, 0.0, alone=True)
    assert pace.model is None
    pace.observe(600, 0, 1.1, alone=True)
    assert pace.model is not None and pace.model.requests == 6


def test_requests_that_were_alone_count_before_those_among_others():
    pace = learnt(*range(100, 600, 100))
    for tokens in range(100, 1100, 100):
        pace.observe(tokens, 0, 3.0 + 0.002 * tokens, alone=False)
    assert pace.model is not None and (pace.model.alone, pace.model.requests) == (False, 15)
    pace.observe(600, 0, 1.1, alone=True)
    for _ in range(RENEWAL):
        pace.observe(1000, 0, 5.0, alone=False)
    model = pace.model
    assert (model.alone, model.requests, model.token_seconds) == (True, 6, pytest.approx(0.001))
