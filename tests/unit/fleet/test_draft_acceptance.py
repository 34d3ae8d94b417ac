"""When drafts count as guessed worse behind hits, and how seldom that is wrong."""

from __future__ import annotations

import random

from proxy.fleet.draft_acceptance import AcceptedPair, LiveAcceptance, judge_pairs
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


def test_a_head_that_loses_what_public_reports_name_is_worse_at_once():
    draw = random.Random(1)
    assert all(trial(draw, 1.3, lost) == "worse" for lost in (0.9, 0.7, 0.5) for _ in range(50))


def test_equal_heads_are_hardly_ever_called_worse_though_no_two_answers_are_paired():
    draw = random.Random(2)
    results = [trial(draw, 1.3, 1.3) for _ in range(300)]
    assert results.count("worse") <= 6


def test_requests_without_drafts_count_for_nothing():
    live = LiveAcceptance()
    assert not live.add(Accepted(), is_hit=True) and not live.hit.requests
