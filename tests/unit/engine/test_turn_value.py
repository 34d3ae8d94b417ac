"""A head's turns are written until enough of them ended for good, and again as soon as one of them goes on."""

import pytest

from engine_patches.scheduler import turn_value
from engine_patches.scheduler.request_state import TurnEnd
from engine_patches.scheduler.turn_value import ENOUGH, JUDGED_AFTER_SECONDS, PROBE, TurnValue

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


def test_a_head_is_written_until_enough_of_its_turns_ended_for_good(value, clock):
    assert ended(value, clock, ENOUGH - 1) == [True] * (ENOUGH - 1)
    assert value.worth_a_state(HEAD, b"one more", TURN)
    clock.now += JUDGED_AFTER_SECONDS
    assert not value.worth_a_state(HEAD, b"too many", TURN)
    assert value.worth_a_state(b"another head", b"its first", TURN)


def test_turns_that_may_still_go_on_are_not_counted(value, clock):
    assert all(value.worth_a_state(HEAD, end(number), TURN) for number in range(10 * ENOUGH))
    clock.now += JUDGED_AFTER_SECONDS - 1
    assert value.worth_a_state(HEAD, b"later", TURN)


def test_a_head_of_which_one_turn_in_seven_goes_on_is_always_written(value, clock):
    for number in range(0, 70, ENOUGH - 1):
        value.came_back([b"no end", end(number - 1)])
        assert all(ended(value, clock, ENOUGH - 1, first=number))


def test_a_turn_of_which_no_state_was_written_shows_all_the_same_that_its_head_goes_on(value, clock):
    ended(value, clock, ENOUGH)
    assert not value.worth_a_state(HEAD, b"not written", TURN)
    value.came_back([b"not written"])
    assert all(ended(value, clock, ENOUGH))


def test_a_client_that_comes_back_late_counts(value, clock):
    ended(value, clock, ENOUGH)
    assert not value.worth_a_state(HEAD, b"not written", TURN)
    clock.now += 100 * JUDGED_AFTER_SECONDS
    value.worth_a_state(b"another head", b"its end", TURN)
    value.came_back([end(3)])
    assert value.worth_a_state(HEAD, b"written again", TURN)


def test_who_comes_back_is_told_the_last_turn_it_goes_on_from_once(value):
    for number in (1, 2):
        value.worth_a_state(HEAD, end(number), TurnEnd(10, 100 * number))
    assert value.came_back([b"no end"]) is None
    assert value.came_back([end(1), b"no end", end(2)]) == TurnEnd(10, 200)
    assert value.came_back([end(1), end(2)]) is None


def test_now_and_then_a_turn_is_written_all_the_same(value, clock):
    ended(value, clock, ENOUGH)
    written = [value.worth_a_state(HEAD, b"probe %d" % number, TURN) for number in range(3 * PROBE)]
    assert sum(written) == 3


def test_what_is_remembered_is_bounded(value, clock, monkeypatch):
    monkeypatch.setattr(turn_value, "MAX_HEADS", 10)
    monkeypatch.setattr(turn_value, "MAX_ENDS", 20)
    for number in range(100):
        assert value.worth_a_state(b"head %d" % number, end(number), TURN)
        clock.now += number % 3 * JUDGED_AFTER_SECONDS
    assert len(value._heads) == 10 and len(value._ends) <= 20 and len(value._judged) <= 20
    value.came_back([end(number) for number in range(100)])  # of heads forgotten, too
    assert not value._ends and not value._judged


@pytest.mark.parametrize(("tokens", "clients"), [(100, 8), (1000, 8), (6000, 25), (24_000, 100)])
def test_what_saves_more_is_written_for_longer(value, clock, tokens, clients):
    for number in range(clients):
        assert value.worth_a_state(HEAD, end(number), TurnEnd(10, 10 + tokens), 240.0)
        clock.now += JUDGED_AFTER_SECONDS
    assert not value.worth_a_state(HEAD, b"too many", TurnEnd(10, 10 + tokens), 240.0)


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


def test_an_end_that_is_repeated_is_one_and_waits_from_its_last_time_on(value, clock):
    for _ in range(ENOUGH + 1):
        assert value.worth_a_state(HEAD, b"the same", TURN)
        clock.now += JUDGED_AFTER_SECONDS - 1
    assert value.worth_a_state(HEAD, b"another", TURN)


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
