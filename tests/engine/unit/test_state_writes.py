"""What the time between a step's plan and its output teaches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine_patches.scheduler import state_writes
from engine_patches.scheduler.state_writes import learn_step_time


class Scheduler:
    """As much of vLLM's scheduler as learns from steps; the clock is set by hand."""

    def __init__(self, monkeypatch) -> None:
        self.now = 100.0
        self.steps: list[tuple[int, float, bool]] = []
        self.released = 0
        monkeypatch.setattr(state_writes.time, "monotonic", lambda: self.now)
        states = SimpleNamespace(release=self._release)
        learner = SimpleNamespace(step_took=self._took)
        self.seamark = SimpleNamespace(step_time=learner, states=states, step_ended=0.0, last_planned=None, verified=1)
        self._update = learn_step_time(lambda *_: "outputs")

    def _took(self, num_tokens, seconds, prefill):
        self.steps.append((num_tokens, pytest.approx(seconds), prefill))

    def _release(self):
        self.released += 1

    def plan(self, drafts=(), **tokens):
        self.seamark.last_planned = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={name: [-1] * count for name, count in drafts},
            seamark_planned_at=self.now,
        )
        return self.seamark.last_planned

    def output(self, planned):
        assert self._update(self, planned, None) == "outputs"


@pytest.fixture
def scheduler(monkeypatch) -> Scheduler:
    return Scheduler(monkeypatch)


def test_a_step_takes_from_its_plan_to_its_output(scheduler):
    step = scheduler.plan(a=300, b=1)
    scheduler.now += 0.5
    scheduler.output(step)
    assert scheduler.steps == [(301, 0.5, True)]  # a prompt among decodes is a prefill


def test_a_step_of_single_tokens_is_no_prefill(scheduler):
    step = scheduler.plan(a=1, b=1)
    scheduler.now += 0.25
    scheduler.output(step)
    assert scheduler.steps == [(2, 0.25, False)]


def test_a_step_of_tokens_and_their_drafts_is_no_prefill(scheduler):
    scheduler.output(scheduler.plan([("a", 3)], a=4, b=1))
    scheduler.output(scheduler.plan([("a", 3)], a=4, b=2))
    assert [prefill for *_, prefill in scheduler.steps] == [False, True]


def test_overlapping_steps_count_once(scheduler):
    first = scheduler.plan(a=100)
    scheduler.now += 0.125
    second = scheduler.plan(a=1)
    scheduler.now += 0.375
    scheduler.output(first)
    scheduler.now += 0.25
    scheduler.output(second)
    assert scheduler.steps == [(100, 0.5, True), (1, 0.25, False)]


def test_time_between_steps_does_not_count(scheduler):
    scheduler.output(scheduler.plan(a=1))
    scheduler.now += 60
    step = scheduler.plan(a=1)
    scheduler.now += 0.25
    scheduler.output(step)
    assert scheduler.steps[-1] == (1, 0.25, False)


def test_an_empty_step_teaches_nothing(scheduler):
    scheduler.output(scheduler.plan())
    assert scheduler.steps == []


def test_only_the_last_planned_step_releases_its_blocks(scheduler):
    first = scheduler.plan(a=1)
    second = scheduler.plan(a=1)
    scheduler.output(first)
    assert scheduler.released == 0
    scheduler.output(second)
    assert scheduler.released == 1
