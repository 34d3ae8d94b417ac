"""Places at which new prompts were left lately get a state in the next ones, as long as that pays."""

import pytest

from engine_patches.scheduler import expected_junctions
from engine_patches.scheduler.expected_junctions import ENOUGH, ExpectedJunctions, SeenPrompt

SALT = b"salt"

COST = 30.0  # tokens that a state is worth


@pytest.fixture
def learner():
    return ExpectedJunctions()


def document(learner, number, length=1000, resumed=0, group=SALT, cost=COST):
    """A new prompt of `length` and 60 tokens, and a second one that leaves it at `length`."""
    learner.add(group, None, 0, length + 60, 0, cost)
    learner.add(group, b"document %d" % number, length, length + 60, resumed, cost)


def test_groups_are_apart_and_bounded(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MAX_GROUPS", 2)
    for number in range(ENOUGH):
        document(learner, number)
    assert learner.places(b"other", 0, 1060) == ()
    for group in (b"other", b"third"):
        learner.add(group, None, 0, 1060, 0, COST)
    assert learner.places(SALT, 0, 1060) == ()


def test_keys_are_bounded(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MAX_WRITTEN", 2)
    for number in range(3):
        learner.written(b"%d" % number)
    assert [learner.is_expected(b"%d" % number) for number in range(3)] == [False, True, True]


def new(count: int, length: int = 2000) -> list[SeenPrompt]:
    """Prompts that share nothing."""
    return [SeenPrompt(0, length, 0, False)] * count


def test_who_left_where_is_forgotten_at_a_bound(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MAX_PARTED", 1)
    for number in (0, 1) * ENOUGH:  # each is a stranger when it comes again
        document(learner, number)
    assert learner.places(SALT, 0, 1060) == (1000,)


def test_a_group_that_was_seen_lately_outlives_others(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MAX_GROUPS", 2)
    for number in range(ENOUGH):
        document(learner, number)
    for group in (b"other", SALT, b"third"):
        learner.add(group, None, 0, 1060, 0, COST)
    assert learner.places(SALT, 0, 1060) == (1000,)
