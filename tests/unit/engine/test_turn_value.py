"""A head's turns are written until enough of them ended for good, and again as soon as one of them goes on."""

import pytest

from engine_patches.scheduler import turn_value
from engine_patches.scheduler.request_state import TurnEnd
from engine_patches.scheduler.turn_value import ENOUGH, JUDGED_AFTER_SECONDS, TurnValue

HEAD, TURN = b"head", TurnEnd(0, 0)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def value(clock):
    return TurnValue(clock)


def end(number):
    return b"end %d" % number


def ended(value, clock, count, head=HEAD, first=0):
    """`count` turns, and nobody comes back to them."""
    written = [value.worth_a_state(head, end(number), TURN) for number in range(first, first + count)]
    clock.now += JUDGED_AFTER_SECONDS
    return written


def test_what_is_remembered_is_bounded(value, clock, monkeypatch):
    monkeypatch.setattr(turn_value, "MAX_HEADS", 10)
    monkeypatch.setattr(turn_value, "MAX_ENDS", 20)
    for number in range(100):
        assert value.worth_a_state(b"head %d" % number, end(number), TURN)
        clock.now += number % 3 * JUDGED_AFTER_SECONDS
    assert len(value._heads) == 10 and len(value._ends) <= 20 and len(value._judged) <= 20
    value.came_back([end(number) for number in range(100)])  # of heads forgotten, too
    assert not value._ends and not value._judged


def test_a_head_that_was_seen_lately_outlives_others(value, clock, monkeypatch):
    monkeypatch.setattr(turn_value, "MAX_HEADS", 2)
    ended(value, clock, ENOUGH)
    value.worth_a_state(b"second", b"an end", TURN)
    assert not value.worth_a_state(HEAD, b"seen again", TURN)
    value.worth_a_state(b"third", b"its end", TURN)  # puts the second one out
    assert not value.worth_a_state(HEAD, b"and again", TURN)
    value.worth_a_state(b"fourth", b"its end, too", TURN)
    value.worth_a_state(b"fifth", b"the last end", TURN)
    assert value.worth_a_state(HEAD, b"as if it were new", TURN)


def test_ends_that_are_too_many_to_be_remembered_are_judged_by_nobody(value, clock, monkeypatch):
    monkeypatch.setattr(turn_value, "MAX_ENDS", ENOUGH)
    for number in range(3 * ENOUGH):
        value.worth_a_state(HEAD, end(number), TURN)
    assert value.came_back([end(0)]) is None and value.came_back([end(3 * ENOUGH - 1)]) == TURN
    clock.now += JUDGED_AFTER_SECONDS
    assert value.worth_a_state(HEAD, b"too few were judged", TURN)


def test_an_end_that_was_judged_is_still_known_and_the_oldest_are_forgotten(value, clock, monkeypatch):
    monkeypatch.setattr(turn_value, "MAX_ENDS", 3)
    for number in range(5):
        value.worth_a_state(HEAD, end(number), TurnEnd(0, number))
        clock.now += JUDGED_AFTER_SECONDS
    value.worth_a_state(b"another head", b"its end", TURN)
    assert [value.came_back([end(number)]) for number in range(5)] == [None, None, *(TurnEnd(0, n) for n in (2, 3, 4))]
