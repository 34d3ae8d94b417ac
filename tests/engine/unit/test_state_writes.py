"""What a step's output teaches, and which of vLLM's own states are let into the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.scheduler import state_writes
from engine_patches.scheduler.state_writes import learn_step_time, write_after_scheduling


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


class Drafting(Scheduler):
    """One whose requests verify three drafts in a step."""

    def __init__(self, monkeypatch) -> None:
        super().__init__(monkeypatch)
        self.verified: list[tuple[str, int]] = []
        self.over: list[str] = []
        self.finishes: set[str] = set()  # with this step
        vars(self.seamark).update(
            verified=4,
            verified_drafts=lambda request, accepted: self.verified.append((request.request_id, accepted)),
            finished=lambda request: self.over.append(request.request_id),
        )
        self.requests = {name: self._request(name) for name in "abc"}
        self._update = learn_step_time(self._vllms)

    def _request(self, name: str) -> SimpleNamespace:
        made = SimpleNamespace(request_id=name, is_over=False)
        made.is_finished = lambda: made.is_over
        return made

    def _vllms(self, scheduler, output, answers) -> str:
        for name in self.finishes:
            self.requests.pop(name).is_over = True
        return "outputs"

    def sampled(self, planned, *tokens: list[int]) -> None:
        index = {name: number for number, name in enumerate(planned.num_scheduled_tokens)}
        answers = SimpleNamespace(sampled_token_ids=list(tokens), req_id_to_index=index)
        assert self._update(self, planned, answers) == "outputs"


@pytest.mark.parametrize("tokens", [[[], [5], []], []])
def test_a_step_whose_tokens_are_not_there_has_verified_nothing(monkeypatch, tokens):
    scheduler = Drafting(monkeypatch)
    scheduler.sampled(scheduler.plan([("a", 3)], a=4, b=1, c=1), *tokens)
    assert scheduler.verified == []


def test_who_has_its_whole_answer_is_told_once_and_who_has_left_before_is_not(monkeypatch):
    scheduler = Drafting(monkeypatch)
    scheduler.requests["a"].is_over = True  # aborted, and still in the step
    del scheduler.requests["b"]
    scheduler.finishes = {"c"}
    scheduler.sampled(scheduler.plan([("a", 3), ("b", 3), ("c", 3)], a=4, b=4, c=4), [5, 6], [5, 6], [5, 6])
    assert scheduler.verified == [("c", 1)] and scheduler.over == ["c"]


@pytest.mark.parametrize(("states", "pinning"), [(True, {"a"}), (True, set()), (False, set())])
def test_what_belongs_to_a_step_is_done_around_its_plan(monkeypatch, states, pinning):
    done: list[str] = []
    monkeypatch.setattr(state_writes, "emit_events", lambda scheduler, output: done.append("events"))
    monkeypatch.setattr(state_writes.time, "monotonic", lambda: 7.0)
    checkpoints = SimpleNamespace(
        begin_step=lambda requests: done.append(f"begin {sorted(requests)}"),
        writes_in_forward=False,
        states=object() if states else None,
        pinning=pinning,
        pin_prompts=lambda requests: done.append(f"pin {sorted(requests)}"),
        last_planned=None,
    )
    scheduler, output = SimpleNamespace(seamark=checkpoints, requests={"a": 1}), SimpleNamespace()

    def schedule(self: Any, *given: Any, **named: Any) -> Any:
        done.append(f"plan {given} {named}")
        return output

    assert write_after_scheduling(schedule)(scheduler, 1, two=3) is output is checkpoints.last_planned
    assert done == ["begin ['a']", "plan (1,) {'two': 3}", *["pin ['a']"] * bool(pinning), *["events"] * states]
    assert output.seamark_planned_at == 7.0 and not hasattr(output, "seamark_writes")
