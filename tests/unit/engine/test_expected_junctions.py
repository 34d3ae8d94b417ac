"""Places at which new prompts were left lately get a state in the next ones, as long as that pays."""

import pytest

from engine_patches.scheduler import expected_junctions
from engine_patches.scheduler.expected_junctions import ENOUGH, RENEWAL, ExpectedJunctions, SeenPrompt, best_places

SALT = b"salt"

COST = 30.0  # tokens that a state is worth


@pytest.fixture
def learner():
    return ExpectedJunctions()


def document(learner, number, length=1000, resumed=0, group=SALT, cost=COST):
    """A new prompt of `length` and 60 tokens, and a second one that leaves it at `length`."""
    learner.add(group, None, 0, length + 60, 0, cost)
    learner.add(group, b"document %d" % number, length, length + 60, resumed, cost)


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
    learner.add(SALT, None, 0, 1060, 0, COST)
    for _ in range(3 * RENEWAL):
        learner.add(SALT, b"document", 1000, 1060, 0, COST)
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
        document(learner, number, length=160, cost=240.0)
    assert learner.places(SALT, 0, 300) == ()


def test_a_place_that_nobody_leaves_prompts_at_any_more_is_given_up(learner):
    for number in range(ENOUGH):
        document(learner, number)
    for _ in range(expected_junctions.WINDOW):
        learner.add(SALT, None, 0, 1060, 0, COST)
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
        learner.add(group, None, 0, 1060, 0, COST)
    assert learner.places(SALT, 0, 1060) == ()


def test_keys_are_bounded(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MAX_WRITTEN", 2)
    for number in range(3):
        learner.written(b"%d" % number)
    assert [learner.is_expected(b"%d" % number) for number in range(3)] == [False, True, True]


def seen(*shared: int, length: int = 2000, resumed: int = 0) -> list[SeenPrompt]:
    """Prompts that were the first to leave another one there."""
    return [SeenPrompt(place, length, resumed, True) for place in shared]


def new(count: int, length: int = 2000) -> list[SeenPrompt]:
    """Prompts that share nothing."""
    return [SeenPrompt(0, length, 0, False)] * count


@pytest.mark.parametrize(
    ("prompts", "cost", "places"),
    [
        (seen(1000, 1000, 1000), 0.0, (1000,)),
        (seen(1000, 1000), 0.0, ()),  # too few
        ([*seen(1000, 1000, 1000), *new(12)], 0.0, (1000,)),  # one in four is served
        ([*seen(1000, 1000, 1000), *new(13)], 0.0, ()),
        ([*seen(1000, 1000, 1000), *new(13, length=1000)], 0.0, (1000,)),  # too short to be written in
        ([*seen(1000, 1000, 1000), *new(3)], 999.0, (1000,)),
        ([*seen(1000, 1000, 1000), *new(3)], 1000.0, ()),  # all that is saved
        (seen(1000, 1000, 1062), 0.0, (1000,)),  # a sixteenth behind it
        (seen(1000, 1000, 1063), 0.0, ()),
        ([*seen(1000, 1000), *seen(1000, resumed=999)], 0.0, (1000,)),
        ([*seen(1000, 1000), *seen(1000, resumed=1000)], 0.0, ()),
        ([*seen(1000, 1000), SeenPrompt(1000, 2000, 0, False)], 0.0, ()),
        ([*seen(*[1000, 1050] * 3), *new(2)], 0.0, (1000, 1050)),  # by what the second adds to the first
        ([*seen(*[1000, 1050] * 3), *new(2)], 80.0, (1000,)),
        (seen(*[500, 1000, 1500] * 3), 0.0, (1000, 1500)),  # no more than two
        (seen(*[100, 1500] * 3), 0.0, (100, 1500)),
    ],
)
def test_a_place_is_where_enough_were_left_at_a_gain(prompts, cost, places):
    assert best_places(prompts, cost) == places
    assert best_places(iter(prompts), cost) == places


def test_only_the_places_where_prompts_parted_last_are_weighed(monkeypatch):
    monkeypatch.setattr(expected_junctions, "MOST_PLACES", 1)
    assert best_places(seen(1000, 1000, 1000, 500, 500, 500), 0.0) == (500,)
    assert best_places(seen(500, 500, 500, 1000, 1000, 1000, 700), 0.0) == ()


def test_places_are_weighed_when_one_may_come_and_else_now_and_then(learner, monkeypatch):
    weighed: list[int] = []

    def counted(prompts, cost):
        weighed.append(len(prompts))
        return best_places(prompts, cost)

    monkeypatch.setattr(expected_junctions, "best_places", counted)
    learner.add(SALT, None, 0, 2000, 0, COST)
    learner.add(SALT, b"a", 1000, 2000, 1000, COST)  # a state would not have helped
    assert weighed == []
    for number, junction in enumerate((b"b", b"b", b"c")):
        learner.add(SALT, junction, 1000, 2000, 0, COST)
        assert weighed == [[3], [3], [3, 5]][number]
    for _ in range(RENEWAL - 1):
        learner.add(SALT, None, 0, 2000, 0, COST)
    assert weighed == [3, 5]
    learner.add(SALT, None, 0, 2000, 0, COST)
    assert weighed == [3, 5, 5 + RENEWAL]


def test_with_as_many_places_as_a_prompt_has_none_is_looked_for(learner, monkeypatch):
    monkeypatch.setattr(expected_junctions, "MOST_EXPECTED", 1)
    for number in range(ENOUGH):
        document(learner, number)
    assert learner.places(SALT, 0, 1060) == (1000,)
    monkeypatch.setattr(expected_junctions, "best_places", lambda *_: pytest.fail("weighed"))
    document(learner, ENOUGH)


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
