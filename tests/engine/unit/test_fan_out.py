"""Followers wait only when it pays, only for what is really coming, and never much longer than expected."""

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from engine_patches.scheduler import fan_out
from engine_patches.scheduler.counters import Counters
from engine_patches.scheduler.planner import Grid, RequestState, Wish
from engine_patches.scheduler.step_time import StepTime

UNIT = 16


class Clock:
    now = 100.0  # seconds; a machine's does not begin at 0

    def __call__(self):
        return self.now


def request(name, shared="s", tokens=4000, status=RequestStatus.WAITING, computed=0):
    hashes = [f"{shared}{number}" if number < 225 else f"{name}{number}" for number in range(tokens // UNIT)]
    known = {"request_id": name, "block_hashes": hashes, "num_tokens": tokens, "num_prompt_tokens": tokens}
    return SimpleNamespace(**known, status=status, num_computed_tokens=computed)


@pytest.fixture
def clock():
    return Clock()


def gate_of(floor, token, clock):
    """Where a pass and a token take so many seconds."""
    step_time = StepTime()
    for tokens in (1, 1001) * 8:
        step_time.step_took(tokens, floor + token * tokens)
    return fan_out.PrefillGate(step_time, Grid(UNIT, UNIT), clock)


@pytest.fixture
def gate(clock):
    return gate_of(0.4, 0.0005, clock)


def scheduler(running=(), waiting=(), budget=8192, slots=256):
    return SimpleNamespace(
        running=list(running),
        waiting=deque(waiting),
        requests={known.request_id: known for known in (*running, *waiting)},
        max_num_scheduled_tokens=budget,
        max_num_running_reqs=slots,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        seamark=SimpleNamespace(verified=1, state_of=lambda request: RequestState(Wish())),
    )


def deepest(gate, follower):
    return next(gate.expected_in(follower), None)


def pays(gate, *waiting, **how):
    """Whether the first of `waiting` is held for the deepest state it could wait for."""
    expected = deepest(gate, waiting[0])
    return gate.pays(expected, scheduler([expected.leader], waiting, **how))


def leading(gate, position=3600, **how):
    leader = request("leader", status=RequestStatus.RUNNING, **how)
    gate.expect(leader, how.get("computed", 0), [position])
    return leader


@pytest.mark.parametrize(
    ("floor", "followers", "is_held"),
    # Many passes are saved: 0.05 s count. Less than four, even with the one that is not needed: 0.2 s are not reached.
    [(0.001, 1, False), (0.001, 2, True), (0.03, 2, False), (0.03, 3, True), (0.02, 2, True)],
)
def test_on_a_fast_engine_all_who_wait_have_to_save_time_that_counts(clock, floor, followers, is_held):
    gate = gate_of(floor, 0.00001, clock)
    leading(gate)
    assert pays(gate, *(request(f"follower{number}") for number in range(followers))) == is_held


def step(gate, follower, expected, computed=None):
    """Whether a follower is held on in the next step, before which its leader may have computed more."""
    gate.drop_gone({"leader", "follower"})
    if computed is not None:
        expected.leader.num_computed_tokens = computed
    return gate.hold(follower, expected)


def test_a_leader_is_waited_for_as_long_as_it_advances_however_slowly(gate, clock):
    leading(gate)
    follower = request("follower")
    expected = deepest(gate, follower)
    for computed in range(0, 3600, 16):
        clock.now += 100.0
        assert step(gate, follower, expected, computed)
    held = [step(gate, follower, expected) for _ in range(fan_out.PATIENCE_STEPS)]
    assert held == [True] * (len(held) - 1) + [False]
    assert gate.release(follower) == pytest.approx(22400) and gate.release(follower) is None


def test_leaders_that_leave_one_after_the_other_are_not_waited_for_for_ever(gate, clock):
    follower = request("follower")
    held = []
    for number in range(fan_out.MAX_LEADERS + 1):
        gate.clear()
        leader = request(f"leader {number}", status=RequestStatus.RUNNING)
        gate.expect(leader, 0, [3600])
        held.append(gate.hold(follower, deepest(gate, follower)))
    assert held == [True] * fan_out.MAX_LEADERS + [False]


def test_no_request_waits_while_states_find_no_room(gate):
    leading(gate)
    expected = deepest(gate, request("follower"))
    gate.pause()
    held = [step(gate, request("follower"), expected) for _ in range(fan_out.PAUSE_STEPS)]
    assert held == [False] * (fan_out.PAUSE_STEPS - 1) + [True]


@pytest.mark.parametrize(("verified", "budget"), [(3, 8), (2, 8), (1, 4)])
def test_a_step_that_is_full_of_requests_that_generate_is_weighed_too(gate, verified, budget):
    """This runs inside vLLM's `schedule()`, where an exception ends the engine."""
    leader, follower = leading(gate), request("follower")
    generating = [request(f"g{n}", shared=f"t{n}", status=RequestStatus.RUNNING, computed=3999) for n in range(4)]
    full = scheduler([leader, *generating], [follower], budget=budget)
    full.seamark.verified = verified
    assert gate.pays(deepest(gate, follower), full) in (True, False)


def test_requests_that_generate_take_their_room_and_are_not_in_the_line(gate):
    leader = leading(gate, position=1600, tokens=1700)
    follower = request("follower", tokens=1700)
    strangers = [request(f"stranger {number}", shared=f"t{number}", tokens=8000) for number in range(2)]
    generating = [request(f"old {number}", f"u{number}", 160, RequestStatus.RUNNING, 159) for number in range(8)]
    busy = scheduler([leader, *generating], [follower, *strangers], budget=3600 + 8, slots=4 + 8)
    assert not gate.pays(deepest(gate, follower), busy)  # as without them


class Engine:
    """A scheduler as its waiting requests meet it, one after the other."""

    def __init__(self, gate, *running):
        self.scheduler, states = scheduler(running), {}
        self.scheduler.seamark.gate, self.scheduler.seamark.counters = gate, Counters()
        self.scheduler.seamark.state_of = lambda each: states.setdefault(each.request_id, RequestState())

    def begins(self, follower):
        """Whether a request may begin, whom vLLM alone would have begin."""
        follower.skip_reading_prefix_cache = False
        if follower not in self.scheduler.waiting:
            self.scheduler.waiting.append(follower)
            self.scheduler.requests[follower.request_id] = follower
        return fan_out.hold_followers(lambda scheduler, request: True)(self.scheduler, follower)


def test_a_follower_gives_a_leader_up_once_and_for_all(gate, clock):
    leader = leading(gate)
    engine, follower = Engine(gate, leader), request("follower")
    assert not engine.begins(follower)
    clock.now += 100.0
    for _ in range(fan_out.PATIENCE_STEPS):
        gate.drop_gone(engine.scheduler.requests)
    assert engine.begins(follower)
    counts = engine.scheduler.seamark.counters.take()
    assert (counts.followers, counts.spent_seconds) == ({"held": 1}, 100.0)
    leader.num_computed_tokens = 1800  # it goes on after all
    gate.drop_gone(engine.scheduler.requests)
    assert engine.begins(follower) and not gate.waiting
    assert not engine.begins(request("another"))
    for begun in (request("begun", computed=16), request("preempted", status=RequestStatus.PREEMPTED)):
        assert engine.begins(begun)
    leader.status = RequestStatus.FINISHED_ABORTED
    gate.drop_gone({})
    assert not gate._expected and not gate.waiting, "nothing is left of those who are gone"
