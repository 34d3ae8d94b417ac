"""Followers wait only when it pays, only for what is really coming, and never much longer than expected."""

from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from engine_patches.scheduler.fan_out import MIN_PATIENCE_SECONDS, PAUSE_SECONDS, PrefillGate
from engine_patches.scheduler.step_time import StepTime

UNIT = 16

START = 100.0  # seconds; a machine's clock does not begin at 0


class Clock:
    now = START

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
    step_time = StepTime()
    for _ in range(8):  # a pass costs 0.4 s, a token 0.5 ms
        step_time.step_took(1, 0.4005)
        step_time.step_took(1000, 0.9)
    return PrefillGate(step_time, UNIT, clock)


def leading(gate, position=3600, **how):
    leader = request("leader", status=RequestStatus.RUNNING, **how)
    gate.expect(leader, how.get("computed", 0), [position])
    return leader


def test_a_follower_waits_for_what_a_running_request_will_write(gate):
    leading(gate)
    expected = gate.deepest_expected(request("follower"))
    assert expected.position == 3600 and gate.pays(expected) and gate.hold(request("follower"), expected)


def test_the_deepest_state_of_a_leader_is_waited_for(gate):
    leader = request("leader", status=RequestStatus.RUNNING)
    gate.expect(leader, 0, [800, 3600])
    assert gate.deepest_expected(request("follower")).position == 3600
    assert gate.deepest_expected(request("short", tokens=3600)).position == 800


def test_a_state_that_the_leader_found_in_the_cache_is_not_expected(gate):
    leader = request("leader", status=RequestStatus.RUNNING)  # vLLM counts its hit only when the step is planned
    gate.expect(leader, 800, [800])
    assert gate.deepest_expected(request("follower")) is None


def test_another_prefix_another_salt_or_a_shorter_prompt_do_not_wait(gate):
    leading(gate)
    assert gate.deepest_expected(request("other", shared="t")) is None
    assert gate.deepest_expected(request("short", tokens=3600)) is None


def test_a_prefix_that_costs_less_than_a_pass_is_not_waited_for(gate):
    leading(gate, position=800)
    assert not gate.pays(gate.deepest_expected(request("follower")))
    leading(gate, position=1600, computed=1000)  # only the part that is not cached yet counts
    assert not gate.pays(gate.deepest_expected(request("follower")))


def test_a_prefill_that_is_not_felt_is_not_waited_for(clock):
    fast = StepTime()
    for _ in range(8):  # a pass costs 1 ms, a token 0.01 ms: 3,600 tokens are 36 ms
        fast.step_took(1, 0.001)
        fast.step_took(1000, 0.011)
    gate = PrefillGate(fast, UNIT, clock)
    leading(gate)
    assert not gate.pays(gate.deepest_expected(request("follower")))


@pytest.mark.parametrize(
    "gone",
    [{"status": RequestStatus.PREEMPTED}, {"status": RequestStatus.FINISHED_ABORTED}, {"num_computed_tokens": 3600}],
)
def test_no_request_waits_for_a_leader_that_is_gone_or_done(gate, gone):
    leader = leading(gate)
    vars(leader).update(gone)
    assert gate.deepest_expected(request("follower")) is None
    gate.drop_gone({})
    assert not gate._expected


def test_another_leader_takes_over(gate):
    leader = leading(gate)
    leader.status = RequestStatus.FINISHED_ABORTED
    second = request("second", status=RequestStatus.RUNNING)
    gate.expect(second, 0, [3600])
    assert gate.deepest_expected(request("follower")).leader is second


def test_waiting_ends_at_three_times_what_was_foreseen(gate, clock):
    leading(gate)  # 3,600 tokens and a pass: 2.2 s
    expected = gate.deepest_expected(request("follower"))
    assert gate.hold(request("follower"), expected)
    clock.now = START + 6.5
    assert gate.hold(request("follower"), expected)
    clock.now = START + 6.7
    assert not gate.hold(request("follower"), expected)
    assert gate.release(request("follower")) == pytest.approx(6.7)
    assert gate.release(request("follower")) is None


def test_a_slow_leader_is_waited_for_a_stuck_one_is_not(gate, clock):
    leader = leading(gate)
    expected = gate.deepest_expected(request("follower"))
    assert gate.hold(request("follower"), expected)
    clock.now, leader.num_computed_tokens = START + 6.7, 1800
    assert gate.hold(request("follower"), expected)  # 1,800 tokens and a pass: 1.3 s, three times
    clock.now = START + 10.5
    assert gate.hold(request("follower"), expected)
    clock.now, leader.num_computed_tokens = START + 10.7, 2600
    assert not gate.hold(request("follower"), expected)


def test_the_wait_for_another_leader_begins_again(gate, clock):
    leading(gate)
    follower = request("follower")
    gate.hold(follower, gate.deepest_expected(follower))
    clock.now = START + 6.0
    second = request("second", status=RequestStatus.RUNNING)
    gate._expected.clear()
    gate.expect(second, 0, [3600])
    assert gate.hold(follower, gate.deepest_expected(follower))
    clock.now = START + 12.5
    assert gate.hold(follower, gate.deepest_expected(follower))
    assert gate.release(follower) == pytest.approx(12.5)


def test_leaders_that_leave_one_after_the_other_are_not_waited_for_for_ever(gate, clock):
    follower = request("follower")
    held = []
    for number in range(5):
        gate.clear()
        leader = request(f"leader {number}", status=RequestStatus.RUNNING)
        gate.expect(leader, 0, [3600])
        held.append(gate.hold(follower, gate.deepest_expected(follower)))
    assert held == [True] * 4 + [False]


def test_a_follower_that_is_gone_is_forgotten(gate):
    leading(gate)
    gate.hold(request("follower"), gate.deepest_expected(request("follower")))
    gate.drop_gone({"leader", "follower"})
    assert list(gate.waiting) == ["follower"]
    gate.drop_gone({"leader"})
    assert not gate.waiting


def test_no_request_waits_while_states_find_no_room(gate, clock):
    leading(gate)
    expected = gate.deepest_expected(request("follower"))
    gate.pause()
    assert not gate.hold(request("follower"), expected)
    clock.now += PAUSE_SECONDS
    assert gate.hold(request("follower"), expected)


def test_patience_has_a_least(clock):
    gate = PrefillGate(StepTime(), UNIT, clock)
    leading(gate)
    expected = gate.deepest_expected(request("follower"))
    clock.now = START + 100.0
    assert gate.hold(request("follower"), expected)
    clock.now += MIN_PATIENCE_SECONDS + 0.01
    assert not gate.hold(request("follower"), expected)
