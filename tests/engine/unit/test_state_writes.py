"""What a step's output teaches, and which of vLLM's own states are let into the cache."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine_patches.scheduler import state_writes
from engine_patches.scheduler.state_writes import keep_only_true_states, learn_step_time, write_after_scheduling


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


def test_blocks_are_given_back_by_whoever_has_states(scheduler):
    scheduler.seamark.states = None
    scheduler.output(scheduler.plan(a=1))
    assert scheduler.released == 0


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


def test_drafts_that_were_right_are_counted_of_each_request_that_drafted(monkeypatch):
    scheduler = Drafting(monkeypatch)
    scheduler.sampled(scheduler.plan([("a", 3), ("c", 3)], a=4, b=1, c=4), [5, 6, 7], [5], [8])
    assert scheduler.verified == [("a", 2), ("c", 0)] and scheduler.over == []


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


def test_without_drafts_nothing_is_counted(monkeypatch):
    scheduler = Drafting(monkeypatch)
    scheduler.seamark.verified = 1
    scheduler.finishes = {"c"}
    scheduler.sampled(scheduler.plan([("a", 3)], a=4), [5, 6])
    assert scheduler.verified == [] and scheduler.over == []


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


class States:
    """A manager of states in blocks of 64 tokens, as far as it registers those of a request with four blocks."""

    block_size = 64

    def __init__(self, *, inside: bool = True, start: int = 0, verified: int = 1, cached: int = 0) -> None:
        self._null_block = "null"
        self.req_to_blocks = {"r": ["b0", "b1", "b2", "b3"]}
        self.num_cached_block = {"r": cached} if cached else {}
        self.seen: list[list[str]] = []
        state = SimpleNamespace(chunk_start=start)
        self.seamark = SimpleNamespace(writes_in_forward=inside, state_of=lambda request: state, verified=verified)

    def registers(self, num_tokens: int, error: Exception | None = None) -> list[str]:
        """The blocks that vLLM sees as it registers a chunk up to so many tokens of a prompt of 200."""

        def vllms(manager, request, tokens, interval, *, replay_boundaries):
            assert (tokens, interval, replay_boundaries) == (num_tokens, 2, (64,))
            self.seen.append(list(self.req_to_blocks["r"]))
            if error is not None:
                raise error
            return "registered"

        request = SimpleNamespace(request_id="r", num_prompt_tokens=200)
        assert keep_only_true_states(vllms)(self, request, num_tokens, 2, replay_boundaries=(64,)) == "registered"
        assert self.req_to_blocks["r"] == ["b0", "b1", "b2", "b3"]
        return self.seen[-1]


ALL = ["b0", "b1", "b2", "b3"]


@pytest.mark.parametrize(
    ("how", "num_tokens", "seen"),
    [
        ({}, 150, ["null", "null", "b2", "b3"]),  # no chunk has ended at either edge
        ({}, 128, ["null", "b1", "b2", "b3"]),  # it ends at the second one
        ({}, 64, ALL),
        ({}, 63, ALL),
        ({"cached": 1}, 150, ["b0", "null", "b2", "b3"]),  # what was registered is left alone
        ({"cached": 2}, 150, ALL),
        ({"inside": False}, 150, ALL),
        # A step that generates, which with drafts may pass an edge: vLLM puts the edge's state there itself.
        ({"cached": 2, "verified": 4, "start": 200}, 201, ALL),
        ({"cached": 2, "verified": 1, "start": 200}, 201, ["b0", "b1", "null", "b3"]),
        ({"cached": 2, "verified": 4, "start": 199}, 200, ["b0", "b1", "null", "b3"]),
        ({"cached": 2, "verified": 4, "start": 200}, 202, ["b0", "b1", "null", "b3"]),  # it computes again
    ],
)
def test_only_a_block_whose_edge_is_a_chunks_end_is_registered(how, num_tokens, seen):
    assert States(**how).registers(num_tokens) == seen


def test_blocks_are_back_in_their_places_if_vllm_breaks():
    states = States()
    with pytest.raises(ValueError, match="full"):
        states.registers(150, ValueError("full"))
    assert states.seen == [["null", "null", "b2", "b3"]] and states.req_to_blocks["r"] == ALL


def test_before_a_scheduler_is_set_up_vllm_registers_what_it_does_alone():
    states = States()
    del states.seamark
    assert states.registers(150) == ALL
