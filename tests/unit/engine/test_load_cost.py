"""What a load takes is learnt from loads."""

from __future__ import annotations

import pytest

from engine_patches.disk.load_cost import LoadCost

MB = 1_000_000


def test_what_is_in_memory_already_always_pays():
    cost = LoadCost()
    cost.load_took(MB, 100.0)
    assert cost.pays(0, 1e-6)


def test_until_a_load_was_measured_nothing_is_loaded():
    assert not LoadCost().pays(MB, 1e6)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 0.1), (MB, 0.0), (MB, -0.1)])
def test_what_was_no_load_teaches_nothing(num_bytes, seconds):
    cost = LoadCost()
    cost.load_took(num_bytes, seconds)
    assert not cost.pays(MB, 1e6)


def test_small_loads_that_take_longer_than_large_ones_cost_no_time_by_the_byte():
    cost = LoadCost()
    cost.load_took(10, 2.0)
    cost.load_took(100, 1.0)
    assert cost.seconds(1) == cost.seconds(1000) == 2.0


def test_a_fixed_part_below_nothing_is_none():
    cost = LoadCost()
    cost.load_took(10, 0.1)
    cost.load_took(20, 1.1)
    assert cost.seconds(10) == pytest.approx(10 * 0.1)


class Clock:
    """In place of `time`."""

    now = 100.0


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("time.monotonic", lambda: found.now)
    return found


def test_the_first_load_is_late_at_once(clock):
    """Nothing is known of its disk."""
    cost = LoadCost()
    cost.load_began(1, 10)
    clock.now += 0.5
    cost.load_took(10, 1.0)
    assert cost.seconds(10) == pytest.approx(1.5) and cost.seconds(0) == 0.0
