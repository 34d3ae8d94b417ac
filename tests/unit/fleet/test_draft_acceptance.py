"""When drafts count as guessed worse behind hits, and how seldom that is wrong."""

from __future__ import annotations

import random

import pytest

from proxy.fleet.draft_acceptance import FEWEST_STEPS, SHARE, AcceptedPair, LiveAcceptance, judge_pairs
from proxy.fleet.worker_metrics import Accepted


def drafted(draw: random.Random, rate: float, steps: int) -> Accepted:
    """A request whose steps accept `rate` tokens each on the average, of two drafts."""
    return Accepted(steps, sum(int(draw.random() < rate / 2) + int(draw.random() < rate / 2) for _ in range(steps)))


def pair(draw: random.Random, cold: float, hit: float) -> AcceptedPair:
    return AcceptedPair(drafted(draw, cold, 54), drafted(draw, hit, 36))


def trial(draw: random.Random, cold: float, hit: float, most: int = 24) -> str:
    """The result of a trial that looks behind each prompt from the eighth on."""
    pairs: list[AcceptedPair] = []
    while True:
        pairs.append(pair(draw, cold, hit))
        finding = judge_pairs(pairs, is_last=len(pairs) == most)
        if finding.result == "worse" or (len(pairs) >= 8 and finding.result != "undecided"):
            return finding.result


def test_equal_drafts_are_fine_at_once():
    pairs = [AcceptedPair(Accepted(50, 60 + number), Accepted(50, 60 + number)) for number in range(8)]
    assert judge_pairs(pairs, is_last=False).result == "fine"


def test_a_head_that_loses_what_public_reports_name_is_worse_at_once():
    draw = random.Random(1)
    assert all(trial(draw, 1.3, lost) == "worse" for lost in (0.9, 0.7, 0.5) for _ in range(50))


def test_equal_heads_are_hardly_ever_called_worse_though_no_two_answers_are_paired():
    draw = random.Random(2)
    results = [trial(draw, 1.3, 1.3) for _ in range(300)]
    assert results.count("worse") <= 6


def test_few_pairs_decide_nothing_until_there_will_be_no_more():
    nothing = [AcceptedPair(Accepted(), Accepted())] * 24
    assert judge_pairs(nothing[:8], is_last=False).result == "undecided"
    assert judge_pairs(nothing, is_last=True).result == "fine"


@pytest.mark.parametrize("rate", [0.3, 1.5])
def test_clients_requests_raise_no_false_alarm_in_500_boots(rate):
    draw = random.Random(3)
    for boot in range(500):
        live = LiveAcceptance()
        for _ in range(250):
            one = Accepted(40, round(40 * rate * draw.uniform(0.5, 1.5)))  # requests differ more than steps do
            assert not live.add(one, is_hit=draw.random() < 0.5), boot


def test_a_loss_behind_clients_hits_is_seen_and_not_before_there_is_evidence():
    draw, live, alarms = random.Random(4), LiveAcceptance(), []
    for number in range(600):
        is_hit = number % 2 == 0
        if live.add(drafted(draw, (0.7 if is_hit else 1.0) * 1.3, 20), is_hit=is_hit):
            alarms.append(min(live.hit.steps, live.cold.steps))
            break
    assert alarms and alarms[0] >= FEWEST_STEPS
    assert live.hit.per_step < SHARE * live.cold.per_step


def test_requests_without_drafts_count_for_nothing():
    live = LiveAcceptance()
    assert not live.add(Accepted(), is_hit=True) and not live.hit.requests


def pairs_of(*rates: tuple[int, int]) -> list[AcceptedPair]:
    """Of 100 steps each: accepted tokens recomputed, and from the cache."""
    return [AcceptedPair(Accepted(100, cold), Accepted(100, hit)) for cold, hit in rates]


@pytest.mark.parametrize(
    ("rates", "undecided", "last"),
    [
        ([(100, 95)] * 4, "fine", "fine"),  # just what is wanted, each time
        ([(100, 94)] * 4, "worse", "worse"),
        ([(100, 94)] * 3, "undecided", "fine"),  # too few
        ([(100, 140), (100, 60)] * 2, "undecided", "fine"),  # a mean of 0.05, with a standard error of 0.23
        ([(100, 130), (100, 50)] * 2, "undecided", "worse"),  # a mean of -0.05
        ([(100, 130), (100, 80)] * 2, "undecided", "fine"),  # 0.1, 0.7 standard errors
        ([(100, 130), (100, 90)] * 2, "undecided", "fine"),  # 0.15, 1.3 of 0.115
        ([(100, 140), (100, 100)] * 3, "fine", "fine"),  # 0.25, 2.8 of 0.089
        ([(100, 60), (100, 80)] * 2, "worse", "worse"),  # -0.25, 4.3 of 0.058
        ([(100, 56), (100, 80)] * 2, "undecided", "worse"),  # -0.27, 3.9 of 0.069
    ],
)
def test_a_head_is_judged_by_the_mean_of_pairs_and_its_error_and_by_the_mean_alone_at_the_end(rates, undecided, last):
    assert judge_pairs(pairs_of(*rates), is_last=False).result == undecided
    found = judge_pairs(pairs_of(*rates), is_last=True)
    assert found.result == last
    assert (found.cold, found.hit) == (1.0, pytest.approx(sum(hit for _, hit in rates) / len(rates) / 100))


def test_prompts_in_which_nothing_was_drafted_say_nothing_on_either_side():
    nothing = Accepted()
    some = pairs_of(*[(100, 50)] * 4)
    empty = [AcceptedPair(nothing, Accepted(100, 200)), AcceptedPair(Accepted(100, 9), nothing)] * 5
    assert judge_pairs([*empty, *some], is_last=False) == judge_pairs(some, is_last=False)
    assert judge_pairs(empty, is_last=False) == ("undecided", 0.0, 0.0)


def live_of(requests: int, steps: int, cold: float, hit: float, spread: float = 0.0) -> LiveAcceptance:
    """So many requests of each kind have been counted, which drafted alike but for `spread`."""
    live = LiveAcceptance()
    for number in range(requests):
        apart = spread * steps * (1 if number % 2 else -1)
        for rate, is_hit in ((cold, False), (hit, True)):
            said = live.add(Accepted(steps, round(rate * steps + apart)), is_hit=is_hit)
            assert not said or (number, is_hit) == (requests - 1, True)
    return live


@pytest.mark.parametrize(
    ("requests", "steps", "cold", "hit", "spread", "is_worse"),
    [
        (40, 50, 1.0, 0.9, 0.0, True),  # 2,000 steps
        (40, 49, 1.0, 0.9, 0.0, False),
        (30, 100, 1.0, 0.9, 0.0, True),
        (29, 100, 1.0, 0.9, 0.0, False),  # too few requests
        (40, 50, 1.0, 0.94, 0.0, True),
        (40, 50, 1.0, 0.96, 0.0, False),
        (40, 50, 1.0, 0.7, 0.2, True),  # -0.25, 5.7 standard errors of 0.044
        (40, 50, 1.0, 0.7, 0.3, False),  # 3.8 of 0.066
        (40, 50, 1.0, 1.9, 0.0, False),
    ],
)
def test_clients_hits_are_worse_from_enough_steps_and_requests_on_beyond_what_chance_explains(
    requests, steps, cold, hit, spread, is_worse
):
    live = live_of(requests - 1, steps, cold, hit, spread)
    last = spread * steps * (1 if (requests - 1) % 2 else -1)
    assert not live.add(Accepted(steps, round(cold * steps + last)), is_hit=False)
    assert live.add(Accepted(steps, round(hit * steps + last)), is_hit=True) is is_worse
    assert (live.cold.requests, live.hit.requests) == (requests, requests)
    assert live.hit.per_step == pytest.approx(hit, abs=0.02) and live.cold.steps == live.hit.steps == requests * steps


def test_the_next_look_comes_at_twice_as_many_steps():
    live = live_of(39, 50, 1.0, 1.0)
    assert live.next_look == FEWEST_STEPS
    live.add(Accepted(150, 150), is_hit=False)
    assert live.next_look == FEWEST_STEPS
    live.add(Accepted(50, 50), is_hit=True)  # 2,100 and 2,000
    assert live.next_look == 2 * FEWEST_STEPS == 4000
    for is_hit in (False, True):
        assert not live.add(Accepted(1999, 0 if is_hit else 1999), is_hit=is_hit)
    assert live.next_look == 4000


@pytest.mark.parametrize(
    ("requests", "variance"),
    [
        ([(10, 10)], 0.0),
        ([(10, 10), (30, 30)], 0.0),
        ([(10, 10), (10, 20)], (25 + 25) / 20**2 * 2 / 1),
        ([(10, 10), (10, 20), (10, 30)], (100 + 0 + 100) / 30**2 * 3 / 2),
        ([(10, 10), (30, 50)], (25 + 25) / 40**2 * 2 / 1),
    ],
)
def test_the_variance_of_a_rate_takes_whole_requests_as_what_is_drawn(requests, variance):
    live = LiveAcceptance()
    for steps, tokens in requests:
        live.add(Accepted(steps, tokens), is_hit=True)
    assert live.hit.variance == pytest.approx(variance)
    assert live.cold.per_step == 0.0
