"""Who waits for whom: only when it pays, only for what is really coming, never longer than foreseen."""

from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from engine_patches.scheduler.fan_out import MIN_PATIENCE_SECONDS, SHUT_SECONDS, PrefillGate
from engine_patches.scheduler.step_time import StepTime

UNIT = 16


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def request(name, shared="s", tokens=4000, status=RequestStatus.WAITING, computed=0):
    hashes = [f"{shared}{number}" if number < 225 else f"{name}{number}" for number in range(tokens // UNIT)]
    return SimpleNamespace(
        request_id=name, block_hashes=hashes, num_tokens=tokens, status=status, num_computed_tokens=computed
    )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def gate(clock):
    pace = StepTime()
    for _ in range(8):  # a pass costs 0.4 s, a token 0.5 ms
        pace.step_took(1, 0.4005)
        pace.step_took(1000, 0.9)
    return PrefillGate(pace, UNIT, clock)


def leading(gate, position=3600, **how):
    leader = request("leader", status=RequestStatus.RUNNING, **how)
    gate.will_write(leader, how.get("computed", 0), [position])
    return leader


def test_a_follower_waits_for_what_a_running_request_will_write(gate):
    leading(gate)
    coming = gate.deepest_coming(request("follower"))
    assert coming.position == 3600 and gate.pays(coming) and gate.holds(request("follower"), coming)


def test_another_prefix_another_salt_or_a_shorter_prompt_do_not_wait(gate):
    leading(gate)
    assert gate.deepest_coming(request("other", shared="t")) is None
    assert gate.deepest_coming(request("short", tokens=3600)) is None


def test_a_prefix_that_costs_less_than_a_pass_is_not_waited_for(gate):
    leading(gate, position=800)
    assert not gate.pays(gate.deepest_coming(request("follower")))
    leading(gate, position=1600, computed=1000)  # only the part that is not cached yet counts
    assert not gate.pays(gate.deepest_coming(request("follower")))


def test_what_nobody_would_feel_is_not_waited_for(clock):
    fast = StepTime()
    for _ in range(8):  # a pass costs 1 ms, a token 0.01 ms: 3,600 tokens are 36 ms
        fast.step_took(1, 0.001)
        fast.step_took(1000, 0.011)
    gate = PrefillGate(fast, UNIT, clock)
    leading(gate)
    assert not gate.pays(gate.deepest_coming(request("follower")))


@pytest.mark.parametrize(
    "gone",
    [{"status": RequestStatus.PREEMPTED}, {"status": RequestStatus.FINISHED_ABORTED}, {"num_computed_tokens": 3600}],
)
def test_nobody_waits_for_a_leader_that_is_gone_or_done(gate, gone):
    leader = leading(gate)
    vars(leader).update(gone)
    assert gate.deepest_coming(request("follower")) is None
    gate.forget_gone({})
    assert not gate._expected


def test_another_leader_takes_over(gate):
    leader = leading(gate)
    leader.status = RequestStatus.FINISHED_ABORTED
    second = request("second", status=RequestStatus.RUNNING)
    gate.will_write(second, 0, [3600])
    assert gate.deepest_coming(request("follower")).leader is second


def test_waiting_ends_at_three_times_what_was_foreseen(gate, clock):
    leading(gate)  # 3,600 tokens and a pass: 2.2 s
    coming = gate.deepest_coming(request("follower"))
    assert gate.holds(request("follower"), coming)
    clock.now = 6.5
    assert gate.holds(request("follower"), coming)
    clock.now = 6.7
    assert not gate.holds(request("follower"), coming)
    assert gate.release(request("follower")) == pytest.approx(6.7)
    assert gate.release(request("follower")) is None


def test_a_slow_leader_is_waited_for_a_stuck_one_is_not(gate, clock):
    leader = leading(gate)
    coming = gate.deepest_coming(request("follower"))
    assert gate.holds(request("follower"), coming)
    clock.now, leader.num_computed_tokens = 6.7, 1800
    assert gate.holds(request("follower"), coming)  # 1,800 tokens and a pass: 1.3 s, three times
    clock.now = 10.5
    assert gate.holds(request("follower"), coming)
    clock.now, leader.num_computed_tokens = 10.7, 2600
    assert not gate.holds(request("follower"), coming)


def test_the_wait_for_another_leader_begins_anew(gate, clock):
    leading(gate)
    follower = request("follower")
    gate.holds(follower, gate.deepest_coming(follower))
    clock.now = 6.0
    second = request("second", status=RequestStatus.RUNNING)
    gate._expected.clear()
    gate.will_write(second, 0, [3600])
    assert gate.holds(follower, gate.deepest_coming(follower))
    clock.now = 12.5
    assert gate.holds(follower, gate.deepest_coming(follower))
    assert gate.release(follower) == pytest.approx(12.5)


def test_leaders_that_leave_one_after_the_other_are_not_waited_for_for_ever(gate, clock):
    follower = request("follower")
    held = []
    for number in range(5):
        gate.clear()
        leader = request(f"leader {number}", status=RequestStatus.RUNNING)
        gate.will_write(leader, 0, [3600])
        held.append(gate.holds(follower, gate.deepest_coming(follower)))
    assert held == [True] * 4 + [False]


def test_a_follower_that_is_gone_is_forgotten(gate):
    leading(gate)
    gate.holds(request("follower"), gate.deepest_coming(request("follower")))
    gate.forget_gone({"leader", "follower"})
    assert list(gate.waiting) == ["follower"]
    gate.forget_gone({"leader"})
    assert not gate.waiting


def test_nobody_waits_while_states_find_no_room(gate, clock):
    leading(gate)
    coming = gate.deepest_coming(request("follower"))
    gate.room_is_short()
    assert not gate.holds(request("follower"), coming)
    clock.now += SHUT_SECONDS
    assert gate.holds(request("follower"), coming)


def test_patience_has_a_least(clock):
    gate = PrefillGate(StepTime(), UNIT, clock)
    leading(gate)
    coming = gate.deepest_coming(request("follower"))
    clock.now = 100.0
    assert gate.holds(request("follower"), coming)
    clock.now += MIN_PATIENCE_SECONDS + 0.01
    assert not gate.holds(request("follower"), coming)
