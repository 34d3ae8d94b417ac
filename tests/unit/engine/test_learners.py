"""What the engine learns online: of passes, loads, turns, junctions and shared beginnings. All memory is bounded."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_patches.disk.files import LoadCost
from engine_patches.scheduler import earlier_prompts
from engine_patches.scheduler.earlier_prompts import (
    ENOUGH,
    PROBE,
    ExpectedJunctions,
    SeenPrefixes,
    SeenPrompt,
    TurnValue,
)
from engine_patches.scheduler.fan_out import ForecastEngine, ForecastJob, first_tokens
from engine_patches.scheduler.planner import TurnEnd
from engine_patches.scheduler.step_time import ASSUMED_TOKENS_PER_PASS, MOST_TOKENS_PER_PASS, StepTime


@given(st.lists(st.text("ab", max_size=12), max_size=30), st.integers(1, 40))
@settings(max_examples=200)
def test_the_longest_beginning_seen_is_found_and_the_deep_end_is_forgotten_first(prompts, most):
    seen = SeenPrefixes(max_hashes=most)
    for number, prompt in enumerate(prompts):
        prefixes = [prompt[: end + 1].encode() for end in range(len(prompt))]
        known = [prefix in seen._hashes for prefix in prefixes]
        deepest = seen.deepest(prefixes)
        assert deepest == sum(known) and known == sorted(known, reverse=True), "always a beginning"
        assert len(seen._hashes) <= most and (seen.deepest(prefixes) == min(len(prompt), most))
        if sum(map(len, prompts)) <= most:
            shared = [prefix for prefix in prefixes if any(p.encode().startswith(prefix) for p in prompts[:number])]
            assert deepest == len(shared), "where all is remembered, it is the longest"


MB = 1_000_000


@pytest.mark.parametrize(
    ("loads", "num_bytes", "seconds"),
    [
        ([(size * MB, 0.1 + size / 1000) for size in (1, 2, 50, 100)] * 4, 200 * MB, 0.3),
        ([(MB, 0.1)] * 2 + [(MB, 30.0)] + [(MB, 0.1)] * 2, MB, 0.1),  # one that stalled
        ([(10, 1.0), (19, 1.5)], 38, 19 * (1.0 / 10 + 1.5 / 19)),  # too much alike to tell a rate
        ([(10, 2.0), (100, 1.0)], 1000, 2.0),  # no time by the byte
        ([(10, 0.1), (20, 1.1)], 10, 1.0),  # no fixed part below nothing
        ([(0, 0.1), (MB, 0.0), (MB, -0.1)], MB, float("inf")),  # these were none
    ],
)
def test_a_load_takes_a_fixed_part_and_a_rate(loads, num_bytes, seconds):
    cost = LoadCost()
    for load in loads:
        cost.load_took(*load)
    assert cost.seconds(num_bytes) == pytest.approx(seconds, rel=0.15)
    assert cost.pays(num_bytes, seconds + 1.0) is (seconds < 1e9) and not cost.pays(num_bytes, cost.seconds(num_bytes))


def test_a_disk_that_is_late_with_one_load_will_be_as_late_with_another(monkeypatch):
    clock, cost = SimpleNamespace(now=100.0), LoadCost()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    cost.load_took(10, 1.0)
    cost.load_took(20, 1.5)  # half a second, and 0.05 for each byte
    cost.load_began(1, 30)
    clock.now += 2.0
    assert cost.seconds(10) == pytest.approx(1.0)
    clock.now += 0.25
    cost.load_began(2, 1000)
    assert cost.seconds(10) == pytest.approx(1.25), "the one that is due first counts"
    cost.load_ended(7)  # nobody knows of it
    cost.load_ended(1)
    assert cost.seconds(10) == pytest.approx(1.0)
    unknown = LoadCost()
    unknown.load_began(1, 10)  # late at once
    clock.now += 0.5
    unknown.load_took(10, 1.0)
    assert unknown.seconds(10) == pytest.approx(1.5) and unknown.seconds(0) == 0.0


def learnt(floor, token, lengths, state=0.0, generating=(), most=0, passes=400, step_time=None):
    """A learner of passes whose times scatter by 3 %, each behind passes that generate."""
    draw, step_time = random.Random(1), step_time or StepTime()
    for _ in range(passes):
        tokens, states = draw.randint(*lengths), draw.randint(0, most)
        seconds = (floor + token * tokens + state * states) * draw.uniform(0.97, 1.03)
        step_time.step_took(tokens, seconds, states=states)
        for each in generating:
            step_time.step_took(1, each * draw.uniform(0.97, 1.03), prefill=False)
    return step_time


@pytest.mark.parametrize("lengths", [(64, 200), (1000, 4000)], ids=["suffixes behind hits", "whole prompts"])
@pytest.mark.parametrize(
    ("generating", "floor", "token", "state"),
    [(0.0046, 0.025, 12e-6, 0.003), (0.05, 0.08, 350e-6, 0.001), (0.05, 0.052, 1.5e-3, 0.015)],
    ids=["an H100", "a Spark", "a CPU"],
)
def test_floor_token_and_state_are_found_whatever_prompts_are_usual(generating, floor, token, state, lengths):
    step_time = learnt(floor, token, lengths, state, [generating] * 8, most=3)
    assert step_time.pace.token == pytest.approx(token, rel=0.1, abs=0.1 * floor / 2000)
    assert step_time.pace.state == pytest.approx(state, rel=0.25, abs=0.02 * floor + 0.01 * token * 2000)
    assert step_time.pace.floor == pytest.approx(floor, rel=0.25, abs=0.02 * token * lengths[1])
    worth = step_time.tokens_worth(passes=2, states=1, decodes=3) * step_time.pace.token
    assert worth == pytest.approx(2 * step_time.pace.floor + step_time.pace.state + 3 * step_time.pace.decode)
    assert step_time.pace.decode == pytest.approx(generating, rel=0.03)
    for _ in range(5):  # stalled passes do not count, nor those that show nothing
        step_time.step_took(500, 1000 * floor)
        step_time.step_took(500, -1.0)
        step_time.step_took(200, 1000 * floor, prefill=False)
    learnt(floor, token, lengths, state, [generating], most=3, passes=60, step_time=step_time)
    assert step_time.seconds(2000, 1) == pytest.approx(floor + 2000 * token, rel=1.0)


@pytest.mark.parametrize(("generating", "floor"), [([0.1], 0.1), ([], ASSUMED_TOKENS_PER_PASS / 2800 * 0.66)])
def test_where_all_prompts_have_one_length_the_floor_is_that_of_generating_or_assumed(generating, floor):
    step_time = learnt(0.26, 0.0002, (2000, 2000), generating=generating, passes=7)
    assert not step_time.known and step_time.seconds(1000, 3) == 0
    assert step_time.tokens_worth(3, 0, 1) == 4 * ASSUMED_TOKENS_PER_PASS
    learnt(0.26, 0.0002, (2000, 2000), generating=generating, step_time=step_time)
    assert step_time.pace.floor == pytest.approx(floor, rel=0.03)
    assert step_time.seconds(2000, 1) == pytest.approx(0.66, rel=0.03)
    free = learnt(0.4, 0.0, (64, 200))  # short prompts take as long as shorter ones, and long ones may not
    assert 0 < free.tokens_worth(passes=1) <= MOST_TOKENS_PER_PASS * 1.001
    assert {type(each) for each in (*step_time.pace, *free.pace)} == {float}, "a report has room for no other"


ENGINE = ForecastEngine(budget=8192, chunk=8192, alignment=16, slots=256, tokens_per_pass=800)


@pytest.mark.parametrize(
    ("engine", "jobs", "missing", "held", "along"),
    [
        ({}, [(1060, 0), (1060, 1000)], 1000, (800 + 1060) + (2 * 800 + 1060 + 60), 2 * (800 + 2 * 1060)),
        # Followers that a step has no room for find the state in the next one.
        ({"budget": 2120}, [(1060, 0), *[(1060, 1000)] * 3], 1000, 1860 + 3 * 2840, 2 * 2920 + 2 * 3840),
        # Held, they leave the step to those behind them, who then run first.
        ({"budget": 2000}, [(1000, 0), (1000, 992), (3000, 0)], 992, 2792 + 2 * 6408, 2 * 2800 + 7400),
        # A chunk ends on a multiple of the alignment and leaves the rest to the next one.
        ({"budget": 1000, "alignment": 64}, [(990, 0), (900, 0), (8, 0)], 990, 1800 + 2 * 3498, 1800 + 2 * 3498),
        ({"slots": 2}, [(100, 0)] * 3, 96, 3109.765625, 3109.765625),
    ],
)
def test_the_next_steps_are_played_through_as_vllm_fills_them(engine, jobs, missing, held, along):
    played = [ForecastJob(*job) for job in jobs], 1, 0, missing, ENGINE._replace(**engine)
    assert [first_tokens(*played, hold) for hold in (True, False)] == [held, along]


def left(*shared: int) -> list[SeenPrompt]:
    """Prompts of 2,000 tokens that were the first to leave another one there."""
    return [SeenPrompt(place, 2000, 0, True) for place in shared]


def new(count: int, length: int = 2000) -> list[SeenPrompt]:
    """Prompts that share nothing."""
    return [SeenPrompt(0, length, 0, False)] * count


THREE = left(1000, 1000, 1000)


@pytest.mark.parametrize(
    ("prompts", "cost", "places"),
    [
        (THREE, 0.0, (1000,)),
        ([*THREE, *new(12)], 0.0, (1000,)),  # one in four is served
        ([*THREE, *new(13)], 0.0, ()),
        ([*THREE, *new(13, length=1000)], 0.0, (1000,)),  # too short to be written in
        ([*THREE, *new(3)], 1000.0, ()),  # all that is saved
        (left(1000, 1000, 1063), 0.0, ()),
        ([*left(1000, 1000), SeenPrompt(1000, 2000, 1000, True), SeenPrompt(1000, 2000, 0, False)], 0.0, ()),
        ([*left(*[1000, 1050] * 3), *new(2)], 0.0, (1000, 1050)),  # by what the second adds to the first
        (left(*[500, 1000, 1500] * 3), 0.0, (1000, 1500)),  # no more than two
    ],
)
def test_a_place_is_where_enough_were_left_at_a_gain(prompts, cost, places):
    assert earlier_prompts.best_places(iter(prompts), cost) == places


def document(learner, number, group=b"salt", resumed=0):
    """A new prompt of 1,060 tokens, and a second one that leaves it at 1,000."""
    learner.add(group, None, 0, 1060, 0, 30.0)
    learner.add(group, b"document %d" % number, 1000, 1060, resumed, 30.0)


def test_places_are_learned_for_each_group_and_forgotten_at_a_bound(monkeypatch):
    for name, value in {"MAX_GROUPS": 2, "MAX_PARTED": 1, "MAX_WRITTEN": 2, "WINDOW": 40}.items():
        monkeypatch.setattr(earlier_prompts, name, value)
    learner = ExpectedJunctions()
    for number in (0, 1) * ENOUGH:  # each is a stranger when it comes again
        document(learner, number)
    assert learner.places(b"salt", 0, 1060) == (1000,) and learner.places(b"other", 0, 1060) == ()
    assert learner.places(b"salt", 1000, 1060) == () == learner.places(b"salt", 0, 1000), "what is not new"
    for group in (b"other", b"salt", b"third"):
        learner.add(group, None, 0, 1060, 0, 30.0)
    assert learner.places(b"salt", 0, 1060) == (1000,), "it was seen lately"
    for _ in range(40 + earlier_prompts.RENEWAL):
        learner.add(b"salt", None, 0, 1060, 0, 30.0)
    assert learner.places(b"salt", 0, 1060) == (), "nobody leaves prompts there any more"
    for number in range(2 * ENOUGH):
        document(learner, number, b"anyhow", resumed=1000)
    assert learner.places(b"anyhow", 0, 1060) == () == learner.places(b"other", 0, 1060)
    for _ in range(3 * earlier_prompts.RENEWAL):  # only the first to leave a prompt counts
        learner.add(b"again", b"document", 1000, 1060, 0, 30.0)
    assert learner.places(b"again", 0, 1060) == ()
    for number in range(3):
        learner.written[b"%d" % number] = None
    assert [b"%d" % number in learner.written for number in range(3)] == [False, True, True]


class Turns:
    """Ends of turns, by a clock of their own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.value = TurnValue(lambda: self.now)

    def end(self, *numbers: int, head: str = "head", turn: Any = (0, 0), cost: float = 0.0) -> list[bool]:
        """Whether each is written."""
        return [self.value.worth_a_state(head.encode(), b"end %d" % number, TurnEnd(*turn), cost) for number in numbers]

    def back_to(self, *numbers: int) -> TurnEnd | None:
        return self.value.came_back([b"no end", *(b"end %d" % number for number in numbers)])


@pytest.mark.parametrize(("tokens", "enough"), [(0, 8), (1000, 8), (6000, 25), (24_000, 100)])
def test_a_heads_turns_are_written_until_enough_ended_for_good_and_again_once_one_goes_on(tokens, enough):
    turns, how = Turns(), {"turn": TurnEnd(10, 10 + tokens), "cost": 240.0}
    assert all(turns.end(*range(enough), **how))
    turns.now += earlier_prompts.JUDGED_AFTER_SECONDS - 1
    assert turns.end(0, **how) == [True], "none is judged yet, and one waits from its last time on"
    turns.now += 1
    assert turns.end(enough, **how) == [True], "one is missing"
    turns.now += earlier_prompts.JUDGED_AFTER_SECONDS
    assert sum(turns.end(*range(1000, 1000 + 3 * PROBE), **how)) == 3, "now and then one is, all the same"
    assert turns.end(1, head="another", **how) == [True]
    assert turns.back_to(1000) == how["turn"], "though it was not written"
    assert turns.end(2000, **how) == [True]


def test_who_comes_back_is_told_the_last_turn_it_goes_on_from_once():
    turns = Turns()
    for number in (1, 2):
        turns.end(number, turn=TurnEnd(10, 100 * number))
    turns.now += 100 * earlier_prompts.JUDGED_AFTER_SECONDS  # late
    turns.end(3)
    assert turns.back_to(7) is None and turns.back_to(1, 7, 2) == TurnEnd(10, 200) and turns.back_to(1, 2) is None


def test_no_more_heads_and_ends_are_remembered_than_some(monkeypatch):
    most = earlier_prompts.ENDS_TO_JUDGE
    monkeypatch.setattr(earlier_prompts, "MAX_HEADS", 2)
    monkeypatch.setattr(earlier_prompts, "MAX_ENDS", most)
    turns = Turns()
    for number in range(4 * most):
        turns.end(number, head=f"head {number // most}")
        turns.now += earlier_prompts.JUDGED_AFTER_SECONDS / 3
    assert len(turns.value._ends) <= most >= len(turns.value._judged) and len(turns.value._heads) == 2
