"""What a load takes is learnt from loads."""

from __future__ import annotations

import pytest

from engine_patches.disk.load_cost import LoadCost

MB = 1_000_000


def test_a_fixed_part_and_a_rate_are_told_apart():
    cost = LoadCost()
    for num_bytes in (1 * MB, 2 * MB, 50 * MB, 100 * MB) * 4:
        cost.load_took(num_bytes, 0.1 + num_bytes / 1e9)
    assert 0.25 < cost.seconds(200 * MB) < 0.35
    assert 0.09 < cost.seconds(1 * MB) < 0.12


def test_loads_of_one_size_say_what_such_a_load_takes():
    cost = LoadCost()
    cost.load_took(MB, 1.0)
    assert cost.seconds(MB) == 1.0
    assert not cost.pays(MB, 0.9) and cost.pays(MB, 1.1)


def test_what_is_in_memory_already_always_pays():
    cost = LoadCost()
    cost.load_took(MB, 100.0)
    assert cost.pays(0, 1e-6)


def test_one_stalled_load_changes_nothing():
    cost = LoadCost()
    for seconds in (0.1, 0.1, 30.0, 0.1, 0.1):
        cost.load_took(MB, seconds)
    assert cost.seconds(MB) == 0.1


def test_a_disk_that_is_slow_now_is_known_to_be_slow():
    cost = LoadCost()
    for seconds in [0.01] * 40 + [2.0] * 32:
        cost.load_took(MB, seconds)
    assert cost.seconds(MB) == 2.0


def test_until_a_load_was_measured_nothing_is_loaded():
    assert not LoadCost().pays(MB, 1e6)


def test_a_disk_that_is_late_with_one_load_is_not_given_another(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    cost = LoadCost()
    cost.load_took(MB, 0.1)
    cost.load_began(1, 2 * MB)
    now += 0.2  # as long as it should take
    assert cost.pays(MB, 0.2)
    now += 0.6
    cost.load_began(2, MB)
    assert not cost.pays(MB, 0.6) and cost.pays(MB, 0.8)
    cost.load_ended(1)
    assert cost.pays(MB, 0.2)


@pytest.mark.parametrize(("num_bytes", "seconds"), [(0, 0.1), (MB, 0.0), (MB, -0.1)])
def test_what_was_no_load_teaches_nothing(num_bytes, seconds):
    cost = LoadCost()
    cost.load_took(num_bytes, seconds)
    assert not cost.pays(MB, 1e6)


def test_the_smallest_loads_teach_and_a_load_that_saves_no_time_does_not_pay():
    cost = LoadCost()
    cost.load_took(1, 0.5)
    assert cost.seconds(1) == 0.5 and not cost.pays(1, 0.5) and cost.pays(1, 0.51)
    assert cost.seconds(2) == 1.0


def test_the_last_32_loads_are_what_counts():
    cost = LoadCost()
    for seconds in [9.0] + [0.1] * 16 + [0.3] * 15:
        cost.load_took(MB, seconds)
    assert cost.seconds(MB) == pytest.approx((0.1 + 0.3) / 2)
    cost.load_took(MB, 0.3)
    assert cost.seconds(MB) == pytest.approx((0.1 + 0.3) / 2)
    cost.load_took(MB, 0.3)
    assert cost.seconds(MB) == 0.3


def test_one_size_twice_another_is_enough_to_tell_a_rate_and_less_is_not():
    cost = LoadCost()
    cost.load_took(10, 1.0)
    cost.load_took(20, 1.5)
    assert cost.seconds(40) == pytest.approx(0.5 + 40 * 0.05)
    cost = LoadCost()
    cost.load_took(10, 1.0)
    cost.load_took(19, 1.5)
    assert cost.seconds(38) == pytest.approx(38 * (1.0 / 10 + 1.5 / 19) / 2)


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


def test_a_load_is_late_from_when_it_should_be_done(clock):
    cost = LoadCost()
    cost.load_took(10, 1.0)
    cost.load_took(20, 1.5)  # half a second, and 0.05 for each byte
    cost.load_began(1, 30)
    clock.now += 2.0
    assert cost.seconds(10) == pytest.approx(1.0)
    clock.now += 0.25
    assert cost.seconds(10) == pytest.approx(1.25)
    cost.load_began(2, 1000)
    assert cost.seconds(10) == pytest.approx(1.25), "the one that is due first counts"
    cost.load_ended(7)  # nobody knows of it
    cost.load_ended(1)
    assert cost.seconds(10) == pytest.approx(1.0)


def test_the_first_load_is_late_at_once(clock):
    """Nothing is known of its disk."""
    cost = LoadCost()
    cost.load_began(1, 10)
    clock.now += 0.5
    cost.load_took(10, 1.0)
    assert cost.seconds(10) == pytest.approx(1.5) and cost.seconds(0) == 0.0
