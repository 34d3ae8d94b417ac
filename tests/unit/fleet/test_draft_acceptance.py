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
