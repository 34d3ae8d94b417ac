"""What a step's output teaches, and which of vLLM's own states are let into the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.scheduler import state_writes
from engine_patches.scheduler.state_writes import learn_step_time, write_after_scheduling


class Scheduler:
    """As much of vLLM's scheduler as learns from a step in which requests verify three drafts."""

    def __init__(self) -> None:
        self.verified: list[tuple[str, int]] = []
        self.over: list[str] = []
        self.finishes: set[str] = set()  # with this step
        self.seamark = SimpleNamespace(
            step_time=SimpleNamespace(step_took=lambda *_, **__: None),
            states=None,
            step_ended=0.0,
            verified=4,
            verified_drafts=lambda request, accepted: self.verified.append((request.request_id, accepted)),
            finished=lambda request: self.over.append(request.request_id),
        )
        self.requests = {name: self._request(name) for name in "abc"}

    def _request(self, name: str) -> SimpleNamespace:
        made = SimpleNamespace(request_id=name, is_over=False)
        made.is_finished = lambda: made.is_over
        return made

    def _update(self, scheduler: Any, output: Any, answers: Any) -> str:
        for name in self.finishes:
            self.requests.pop(name).is_over = True
        return "outputs"

    def sampled(self, drafts: dict[str, int], *tokens: list[int], **planned: int) -> None:
        self.seamark.last_planned = output = SimpleNamespace(
            num_scheduled_tokens=planned,
            total_num_scheduled_tokens=sum(planned.values()),
            scheduled_spec_decode_tokens={name: [-1] * count for name, count in drafts.items()},
            seamark_planned_at=1.0,
        )
        index = {name: number for number, name in enumerate(planned)}
        answers = SimpleNamespace(sampled_token_ids=list(tokens), req_id_to_index=index)
        assert learn_step_time(self._update)(self, output, answers) == "outputs"


def test_who_has_its_whole_answer_is_told_once_and_who_has_left_before_is_not():
    scheduler = Scheduler()
    scheduler.requests["a"].is_over = True  # aborted, and still in the step
    del scheduler.requests["b"]
    scheduler.finishes = {"c"}
    scheduler.sampled(dict.fromkeys("abc", 3), [5, 6], [5, 6], [5, 6], a=4, b=4, c=4)
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
