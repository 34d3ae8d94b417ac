"""`python -m tests.bench.boundaries`: what it measures does what it says."""

from __future__ import annotations

import asyncio

import pytest

from tests.bench.boundaries import measure, measure_fast


def test_a_known_prefix_is_not_rendered():
    cost = asyncio.run(measure(2_000, 4, rounds=3))
    assert cost.renders == 0 and 0 < cost.known < cost.new


@pytest.mark.parametrize("growing", [False, True])
def test_on_the_fast_path_nobody_is_asked(model, growing):
    fast = asyncio.run(measure_fast(model, 2_000, 4, growing, rounds=3))
    assert fast.renders == 0 and fast.ratio > 1
    assert (fast.new < fast.size) == growing
