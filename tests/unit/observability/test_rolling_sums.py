"""Sums of the last minute and hour."""

from __future__ import annotations

import pytest

from proxy.observability.rolling_sums import MINUTES, PARTS, SLOTS, RollingSums, Totals


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 100_000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recently(clock) -> RollingSums:
    return RollingSums(clock)


def test_nothing_could_be_shared_yet(recently):
    assert recently.last_minute() == recently.last_hour() == recently.since_start() == Totals(0, 0, 0, 0, 0)
    assert recently.last_minute().efficiency is None and recently.by_minute() == [Totals(0, 0, 0, 0, 0)] * MINUTES


def test_efficiency_is_what_came_of_what_could_be_shared(recently):
    recently.add(prompt=1000, shareable=0, delivered=0)
    recently.add(prompt=1000, shareable=800, delivered=600)
    assert recently.last_minute() == Totals(2, 2000, 800, 600, 600)
    assert recently.last_minute().efficiency == 0.75


def test_more_than_one_request_could_share_hides_no_miss_of_another(recently):
    recently.add(prompt=1000, shareable=100, delivered=900)
    recently.add(prompt=1000, shareable=100, delivered=0)
    assert recently.last_minute().efficiency == 0.5
    assert recently.last_minute().delivered == 900


def test_what_changed_is_summed_apart_and_lowers_no_efficiency(recently, clock):
    recently.add(1000, 16, 16, changed=900)
    clock.seconds += 60
    recently.add(1000, 16, 16)
    assert recently.last_minute().changed == 0 and recently.last_hour().changed == 900
    clock.seconds += 2 * 3600
    recently.add(1000, 16, 16, changed=50)
    assert recently.since_start() == Totals(3, 3000, 48, 48, 48, 950) and recently.since_start().efficiency == 1


def test_what_is_older_than_a_minute_counts_for_the_hour_alone(recently, clock):
    recently.add(100, 96, 96)
    clock.seconds += 54
    assert recently.last_minute().requests == 1
    clock.seconds += 6
    recently.add(100, 96, 0)
    assert recently.last_minute() == Totals(1, 100, 96, 0, 0)
    assert recently.last_hour() == Totals(2, 200, 192, 96, 96)


def test_an_hour_later_only_the_sum_since_the_start_is_left(recently, clock):
    recently.add(100, 96, 96)
    clock.seconds += 3595
    assert recently.last_hour().requests == 1
    clock.seconds += 5
    assert recently.last_hour().requests == 0 and recently.since_start() == Totals(1, 100, 96, 96, 96)


def test_a_slot_whose_turn_comes_again_starts_empty(recently, clock):
    recently.add(100, 96, 96)
    clock.seconds += 3600
    recently.add(50, 48, 0)
    assert recently.last_minute() == Totals(1, 50, 48, 0, 0)
    assert recently.since_start() == Totals(2, 150, 144, 96, 96)
    clock.seconds += 10 * 3600
    assert recently.last_hour().requests == 0


def test_the_minutes_of_the_hour_stand_in_their_order_and_add_up(recently, clock):
    clock.seconds = 120_000.0  # a full minute
    for minute in range(MINUTES):
        recently.add(100, 100, minute)
        clock.seconds += 60 if minute < MINUTES - 1 else 59
    told = recently.by_minute()
    assert [sums.came for sums in told] == list(range(MINUTES))
    assert sum(sums.requests for sums in told) == recently.last_hour().requests == MINUTES


def test_its_size_stays(recently, clock):
    for _ in range(3 * SLOTS):
        recently.add(100, 96, 96)
        clock.seconds += 5
    assert recently.last_hour().requests == SLOTS - 1 and len(recently._slots) == SLOTS


def test_minutes_of_more_than_an_hour_ago_are_empty(recently, clock):
    recently.add(100, 96, 96)
    clock.seconds += 2 * 3600
    assert recently.by_minute() == [Totals(0, 0, 0, 0, 0)] * MINUTES


def test_the_minute_includes_the_slot_that_is_still_filled_and_the_hour_the_minutes_before(recently, clock):
    recently.add(100, 96, 96)
    assert recently.last_minute() == recently.by_minute()[-1] == Totals(1, 100, 96, 96, 96)
    clock.seconds += 3 * 60
    assert recently.by_minute()[-4] == Totals(1, 100, 96, 96, 96)


def test_the_day_is_told_in_parts_of_ten_minutes_and_forgets_the_day_before(recently, clock):
    clock.seconds = 600_000.0  # a full part
    recently.add(100, 96, 48)
    clock.seconds += 599
    recently.add(100, 96, 96)
    clock.seconds += 1
    recently.add(50, 48, 0)
    assert recently.by_ten_minutes()[-2:] == [Totals(2, 200, 192, 144, 144), Totals(1, 50, 48, 0, 0)]
    assert len(recently.by_ten_minutes()) == PARTS
    clock.seconds += 23 * 3600 + 40 * 60
    assert recently.by_ten_minutes()[0].requests == 2
    clock.seconds += 10 * 60
    assert recently.by_ten_minutes()[0].requests == 1
    clock.seconds += 24 * 3600
    recently.add(10, 0, 0)
    assert sum(part.requests for part in recently.by_ten_minutes()) == 1 and len(recently._parts) == PARTS
