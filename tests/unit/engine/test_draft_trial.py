"""The trial of drafts: what it finds, when it asks, and what comes of it."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from engine_patches.answers import compare
from engine_patches.scheduler.counters import Counters
from engine_patches.scheduler.drafts import (
    CLOSED,
    ON,
    ON_TRIAL,
    OPEN,
    AcceptedDrafts,
    AcceptedPair,
    DraftGate,
    LiveAcceptance,
    judge_pairs,
)
from engine_patches.trial import own_requests
from engine_patches.trial import trial as trials
from engine_patches.trial.own_requests import ATTEMPTS, Turns
from engine_patches.trial.trial import (
    ANSWER,
    LONGEST_EDGE,
    NoAnswer,
    PromptEnded,
    Trial,
    TrialAnswer,
    TrialVerdict,
    question_of,
)
from tests.harness.drafting_engine import FACTS, DraftingEngine

WORSE = "drafts a step are accepted behind hits"


def tried(engine: DraftingEngine, *, beside: bool = False) -> tuple[Trial, TrialVerdict]:
    trial, verdict = Trial(engine, FACTS, random.Random(7)), None
    while verdict is None:
        assert trial.asked + trial.unanswered < trials.MOST
        try:
            verdict = trial.ask(one_at_a_time=beside)
        except NoAnswer:
            engine.under_way = 0
    return trial, verdict


@pytest.mark.parametrize(
    ("fault", "result", "why"),
    [
        ({}, "open", ""),
        ({"scores_prompts": False}, "open", ""),
        ({"refuses_from": 400}, "open", ""),  # two kinds of six, of whose length no trial depends
        ({"refuses_from": 1}, "no_hits", trials.NO_ANSWERS),
        ({"hits_off": 0.25}, "closed", trials.DIFFERS),
        ({"hits_off": 2.0, "gap": 4.0, "noise": 0.05}, "closed", trials.DIFFERS),  # three times the noise is more
        ({"hits_off": 0.35, "gap": 0.3, "noise": 0.02}, "closed", trials.DIFFERS),  # other tokens, within the noise
        ({"hits_off": math.nan}, "closed", trials.DIFFERS),
        ({"drafts_off": 0.25}, "closed", trials.DRAFTS),
        ({"drafts_off": 0.25, "scores_prompts": False}, "closed", trials.DRAFTS),
        ({"noise": 2.0}, "closed", trials.DRAFTS),  # as where answers depend on which drafts were right
        ({"accepts_on_hits": 0.2}, "closed", WORSE),
        ({"finds_hits": False}, "no_hits", trials.NO_HITS),
    ],
    ids=str,
)
@pytest.mark.parametrize("beside", [False, True])
def test_a_right_engine_is_opened_and_each_fault_keeps_hints_closed_with_its_reason(fault, result, why, beside):
    engine = DraftingEngine(**fault)
    trial, verdict = tried(engine, beside=beside)
    assert verdict.result == result and why in verdict.why, trial.figures
    assert (engine.most == 1) is beside or "refuses_from" in fault
    scored = [len(each.prompt) for each in engine.asked if each.scored]
    assert max(scored, default=0) <= trials.MOST_SCORED  # the memory for more of them is not the engine's to spare


def test_an_engine_that_rounds_at_random_is_opened_and_its_faults_are_seen():
    for seed, (off, result) in itertools.product(range(8), ((0.0, "open"), (0.25, "closed"))):
        _, verdict = tried(DraftingEngine(noise=0.002, hits_off=off, draw=random.Random(seed)))
        assert verdict.result == result, (seed, off)


def test_prompts_fit_the_engine_and_the_edge_ones_answer_crosses_a_blocks_end():
    draw = random.Random(1)
    for block in (16, 384, 1648, 4176):
        question = question_of("edge", FACTS._replace(block=block), draw)
        edges = [at for at in range(block, 20_000, block) if len(question.prompt) < at < len(question.prompt) + ANSWER]
        assert edges and len(question.prompt) == question.hint + 1 >= 160
    assert question_of("edge", FACTS._replace(block=10 * LONGEST_EDGE, longest=10**6), draw).hint == 162
    for longest, cache, vocabulary, tokens in ((268, 0, 4096, 100), (8192, 400, 300, 100), (8192, 0, 200_000, 448)):
        ids = question_of("long", FACTS._replace(longest=longest, cache=cache, vocabulary=vocabulary), draw).prompt
        assert len(ids) == tokens and min(1000, vocabulary // 4) <= min(ids) and max(ids) < min(vocabulary, 30_000)


def test_what_came_from_a_cache_is_no_recomputed_answer(monkeypatch):
    monkeypatch.setattr("tests.harness.drafting_engine.fresh_salt", lambda: "one for all")
    with pytest.raises(NoAnswer, match="came from a cache"):
        Trial(DraftingEngine(), FACTS).ask()


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ({1: -0.1, 2: -2.0}, {1: -0.1, 3: -5.0}, 3.0),
        ({1: math.nan}, {1: -1.0}, float("inf")),
        ({1: 0.0}, {1: 0.0}, 0.0),
    ],
)
def test_what_the_other_does_not_name_is_at_most_as_likely_as_its_last_and_no_number_is_far_from_all(one, other, error):
    assert compare(TrialAnswer([1], [one]), TrialAnswer([1], [other])).error == pytest.approx(error)


class Over(BaseException):
    """Hints are open, and no doubt comes."""


class Scene(Turns):
    """Trials whose prompts come to what a test says and take a second each, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *script: Any, busy_until: float = 0.0) -> None:
        self.now, self.script, self.trials, self.asked, self.doubts = 0.0, list(script), 0, [], []
        scene = self

        class Scripted:
            figures = "figures"

            def __init__(self, own: Any, facts: Any) -> None:
                scene.trials += 1

            def ask(self, *, one_at_a_time: bool) -> TrialVerdict | None:
                scene.asked.append((scene.now, one_at_a_time))
                scene.now += 1.0
                come = scene.script.pop(0)
                if isinstance(come, Exception):
                    raise come
                return come

        class Own(SimpleNamespace):
            may_ask = True
            busy_at = property(lambda _: min(scene.now, busy_until))

        gate = self.gate = DraftGate(ON_TRIAL)
        gate.doubted = SimpleNamespace(wait=self.doubt, clear=lambda: None)
        self.own = Own(facts=FACTS, **dict.fromkeys(("begin", "end", "wait", "send", "keep_only"), lambda *_: None))
        super().__init__(self.own, SimpleNamespace(drafts=gate, counters=Counters(), refusal=None, own=None))
        monkeypatch.setattr(own_requests, "Trial", Scripted)
        monkeypatch.setattr(
            own_requests, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=lambda s: self.sleep(s))
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def doubt(self) -> None:
        if not self.doubts:
            raise Over
        self.gate.doubt = self.doubts.pop()

    def play(self) -> Scene:
        with contextlib.suppress(Over):
            self.run()
        assert not self.script
        return self


NO_HITS, WRONG, RIGHT = (
    TrialVerdict("no_hits", "too few"),
    TrialVerdict("closed", "answers differ"),
    TrialVerdict("open"),
)


@pytest.mark.parametrize(
    ("script", "state", "why", "count"),
    [
        ((None, PromptEnded(), None, RIGHT), OPEN, "", 1),
        ((None, WRONG), CLOSED, "answers differ", 1),
        ((NO_HITS, NO_HITS, RIGHT), OPEN, "", 3),
        ((NO_HITS,) * ATTEMPTS, CLOSED, "too few", ATTEMPTS),
        ((None, RuntimeError("a prompt")), CLOSED, "their trial failed (RuntimeError)", 1),
    ],
    ids=str,
)
def test_an_engine_is_opened_or_closed_by_itself_with_a_reason(monkeypatch, script, state, why, count):
    scene = Scene(monkeypatch, *script).play()
    assert (scene.gate.state, scene.gate.why, scene.trials) == (state, why, count)
    refusal = scene._checkpoints.refusal
    assert refusal == scene.gate.refusal and (refusal is not None) is (state == CLOSED)
    assert scene._checkpoints.counters.report_due


def test_it_asks_when_the_engine_is_idle_and_beside_clients_after_ten_minutes_in_a_tenth_of_the_time(monkeypatch):
    assert Scene(monkeypatch, None, RIGHT).play().asked == [(3.0, False), (4.0, False)]
    assert Scene(monkeypatch, PromptEnded(), RIGHT, busy_until=50.0).play().asked == [(53.0, False), (54.0, False)]
    ended = Scene(monkeypatch, *[PromptEnded()] * 597, None, RIGHT).play()  # by a client who comes whenever one begins
    assert ended.asked[-3:] == [(599.0, False), (600.0, True), (610.0, False)]
    beside = Scene(monkeypatch, None, None, RIGHT, busy_until=1e9).play()
    assert beside.asked == [(600.0, True), (610.0, True), (620.0, True)]
    evicting = Scene(monkeypatch, *[NO_HITS] * (ATTEMPTS + 2), RIGHT, busy_until=1e9).play()
    assert evicting.gate.state == OPEN, "no client closes hints by emptying the cache"
    assert [at for at, _ in Scene(monkeypatch, *[NoAnswer("x")] * 3, RIGHT).play().asked] == [3.0, 8.0, 17.0, 34.0]
    asleep = Scene(monkeypatch, RIGHT)
    asleep.own.may_ask, asleep.sleep = False, Mock(side_effect=[None] * 99 + [Over])
    with pytest.raises(AssertionError):
        asleep.play()
    assert not asleep.asked


@pytest.mark.parametrize(("again", "state"), [(RIGHT, OPEN), (NO_HITS, OPEN), (WRONG, CLOSED)], ids=str)
def test_what_clients_requests_show_makes_the_trial_be_repeated_which_alone_closes_hints(monkeypatch, again, state):
    scene = Scene(monkeypatch, RIGHT, None, again)
    scene.doubts = ["worse"]
    scene.play()
    assert (scene.gate.state, scene.trials) == (state, 2)
    if state == OPEN:
        assert not scene.gate.doubt and scene.gate.live.next_look == own_requests.LOOKS_AFTER_DOUBT


@pytest.mark.parametrize(("state", "doubts"), [(OPEN, True), (ON, True), (ON_TRIAL, False), (CLOSED, False)])
def test_drafts_that_are_worse_behind_clients_hits_raise_a_doubt_where_hints_are_in_use(caplog, state, doubts):
    gate = DraftGate(state)
    for _ in range(30):
        assert not gate.doubt
        gate.count(AcceptedDrafts(100, 100), is_hit=False)
        gate.count(AcceptedDrafts(100, 50), is_hit=True)
    assert (WORSE in gate.doubt) is gate.doubted.is_set() is doubts and (WORSE in caplog.text) is (state == ON)


def looked(draw: random.Random, cold: float, hit: float) -> str:
    """The result of a trial that looks behind each of 24 prompts from the eighth on. A step has two drafts."""

    def drafted(rate: float, steps: int) -> AcceptedDrafts:
        return AcceptedDrafts(steps, sum(draw.random() < rate / 2 for _ in range(2 * steps)))

    pairs: list[AcceptedPair] = []
    while True:
        pairs.append(AcceptedPair(drafted(cold, 54), drafted(hit, 36)))
        finding = judge_pairs(pairs, is_last=len(pairs) == 24)
        if finding.result == "worse" or (len(pairs) >= 8 and finding.result != "undecided"):
            return finding.result


def test_a_head_that_loses_what_public_reports_name_is_worse_at_once_and_an_equal_one_hardly_ever():
    draw = random.Random(1)
    assert all(looked(draw, 1.3, lost) == "worse" for lost in (0.9, 0.7, 0.5) for _ in range(50))
    draw = random.Random(2)
    assert [looked(draw, 1.3, 1.3) for _ in range(300)].count("worse") <= 6  # though no two answers are paired
    live = LiveAcceptance()
    assert not live.add(AcceptedDrafts(), is_hit=True) and not live.hit.requests  # without drafts it counts for nothing
    for tokens, variance in ((10, 0.0), (10, 0.0), (20, 1 / 9)):  # between whole requests
        live.add(AcceptedDrafts(10, tokens), is_hit=True)
        assert live.hit.variance == pytest.approx(variance)
