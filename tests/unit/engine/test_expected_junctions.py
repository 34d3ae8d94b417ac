"""Places at which new prompts were left lately get a state in the next ones, as long as that pays."""

import pytest

from engine_patches.scheduler import expected_junctions
from engine_patches.scheduler.expected_junctions import ENOUGH, RENEWAL, ExpectedJunctions, SeenPrompt, best_places

SALT = b"salt"

PASS = 100.0  # tokens


@pytest.fixture
def learner():
    return ExpectedJunctions()


def document(learner, number, length=1000, resumed=0, group=SALT, tokens_per_pass=PASS):
    """A new prompt of `length` and 60 tokens, and a second one that leaves it at `length`."""
    learner.add(group, None, 0, length + 60, 0, tokens_per_pass)
    learner.add(group, b"document %d" % number, length, length + 60, resumed, tokens_per_pass)


def test_prompts_that_were_left_at_one_place_have_the_next_ones_keep_a_state_there(learner):
    for number in range(ENOUGH):
        assert learner.places(SALT, 0, 1060) == ()
        document(learner, number)
    assert learner.places(SALT, 0, 1060) == (1000,)


def test_a_state_is_kept_in_what_is_new_and_nowhere_else(learner):
    for number in range(ENOUGH):
        document(learner, number)
    assert learner.places(SALT, 999, 1001) == (1000,)
    assert learner.places(SALT, 1000, 1060) == () == learner.places(SALT, 0, 1000)


def test_only_the_first_to_leave_a_prompt_counts(learner):
    learner.add(SALT, None, 0, 1060, 0, PASS)
    for _ in range(3 * RENEWAL):
        learner.add(SALT, b"document", 1000, 1060, 0, PASS)
    assert learner.places(SALT, 0, 1060) == ()


def test_who_would_have_gone_on_from_there_anyhow_does_not_count(learner):
    for number in range(2 * ENOUGH):
        document(learner, number, resumed=1000)
    assert learner.places(SALT, 0, 1060) == ()


def test_lengths_that_differ_a_little_have_a_state_at_the_shortest(learner):
    for number in range(2 * ENOUGH):
        document(learner, number, length=1000 + 16 * (number % 3))
    assert min(learner.places(SALT, 0, 1100)) == 1000


def test_lengths_of_all_kinds_have_none(learner):
    for number in range(30):
        document(learner, number, length=round(500 * 1.15**number))
    assert learner.places(SALT, 0, 70_000) == ()


def test_what_costs_more_than_it_saves_is_not_kept(learner):
    for number in range(2 * ENOUGH):
        document(learner, number, length=160, tokens_per_pass=800.0)
    assert learner.places(SALT, 0, 300) == ()


def test_a_place_that_nobody_leaves_prompts_at_any_more_is_given_up(learner):
    for number in range(ENOUGH):
        document(learner, number)
    for _ in range(expected_junctions.WINDOW):
        learner.add(SALT, None, 0, 1060, 0, PASS)
    assert learner.places(SALT, 0, 1060) == ()


def test_two_lengths_have_a_state_each():
    prompts = [SeenPrompt(0, 3060, 0, False), SeenPrompt(1000, 1060, 0, True), SeenPrompt(3000, 3060, 0, True)] * ENOUGH
    assert best_places(prompts, 60.0) == (1000, 3000)


def test_groups_are_apart_and_bounded(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MAX_GROUPS", 2)
    for number in range(ENOUGH):
        document(learner, number)
    assert learner.places(b"other", 0, 1060) == ()
    for group in (b"other", b"third"):
        learner.add(group, None, 0, 1060, 0, PASS)
    assert learner.places(SALT, 0, 1060) == ()


def test_keys_are_bounded(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MAX_WRITTEN", 2)
    for number in range(3):
        learner.written(b"%d" % number)
    assert [learner.is_expected(b"%d" % number) for number in range(3)] == [False, True, True]
