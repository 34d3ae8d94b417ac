"""Followers wait only when it pays, only for what is really coming, and never much longer than expected."""

from collections import deque
from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from engine_patches.scheduler import fan_out
from engine_patches.scheduler.counters import Counters
from engine_patches.scheduler.fan_out import (
    MAX_LEADERS,
    PATIENCE_STEPS,
    PAUSE_STEPS,
    ExpectedState,
    PrefillGate,
    hold_followers,
)
from engine_patches.scheduler.grid import Grid
from engine_patches.scheduler.request_state import RequestState, Wish
from engine_patches.scheduler.step_time import StepTime

UNIT = 16

GRID = Grid(UNIT, UNIT)

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
    return PrefillGate(step_time, GRID, clock)


def scheduler(running=(), waiting=(), budget=8192, slots=256, held=(), seen=0):
    return SimpleNamespace(
        running=list(running),
        waiting=deque(waiting),
        requests={known.request_id: known for known in (*running, *waiting, *held)},
        max_num_scheduled_tokens=budget,
        max_num_running_reqs=slots,
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        seamark=SimpleNamespace(verified=1, state_of=lambda request: RequestState(Wish(shared=seen))),
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


def test_a_follower_waits_for_what_a_running_request_will_write(gate):
    leading(gate)
    expected = deepest(gate, request("follower"))
    assert expected.position == 3600 and pays(gate, request("follower")) and gate.hold(request("follower"), expected)


def test_the_deepest_state_of_a_leader_is_waited_for(gate):
    leader = request("leader", status=RequestStatus.RUNNING)
    gate.expect(leader, 0, [800, 3600])
    assert deepest(gate, request("follower")).position == 3600
    assert deepest(gate, request("short", tokens=3600)).position == 800


def test_a_state_that_the_leader_found_in_the_cache_is_not_expected(gate):
    leader = request("leader", status=RequestStatus.RUNNING)  # vLLM counts its hit only when the step is planned
    gate.expect(leader, 800, [800])
    assert deepest(gate, request("follower")) is None


def test_another_prefix_another_salt_or_a_shorter_prompt_do_not_wait(gate):
    leading(gate)
    assert deepest(gate, request("other", shared="t")) is None
    assert deepest(gate, request("short", tokens=3600)) is None


def test_the_shallower_states_of_a_leader_come_after_the_deepest(gate):
    leader = request("leader", status=RequestStatus.RUNNING)
    gate.expect(leader, 0, [800, 3600])
    assert [expected.position for expected in gate.expected_in(request("follower"))] == [3600, 800]


def test_a_leader_that_lacks_its_last_token_is_in_the_line(clock):
    step_time = StepTime()
    for _ in range(8):  # a pass costs no more than its tokens
        step_time.step_took(1, 0.0005)
        step_time.step_took(1000, 0.5)
    assert step_time.tokens_per_pass < 1
    gate = PrefillGate(step_time, GRID, clock)
    leader = request("leader", tokens=3600, status=RequestStatus.RUNNING, computed=3599)
    assert gate.pays(ExpectedState(leader, 3600, 0), scheduler([leader], [request("follower")]))


@pytest.mark.parametrize(
    ("floor", "followers", "is_held"),
    # Many passes are saved: 0.05 s count. Less than four, even with the one that is not needed: 0.2 s are not reached.
    [(0.001, 1, False), (0.001, 2, True), (0.03, 2, False), (0.03, 3, True), (0.02, 2, True)],
)
def test_on_a_fast_engine_all_who_wait_have_to_save_time_that_counts(clock, floor, followers, is_held):
    step_time = StepTime()
    for _ in range(8):  # 10 us a token
        step_time.step_took(1, floor + 0.00001)
        step_time.step_took(1001, floor + 0.01001)
    gate = PrefillGate(step_time, GRID, clock)
    leading(gate)
    assert pays(gate, *(request(f"follower{number}") for number in range(followers))) == is_held


@pytest.mark.parametrize(("position", "is_held"), [(240, False), (256, True)])
def test_a_wave_of_short_prompts_is_not_held_for_little_time_however_many_passes_it_saves(clock, position, is_held):
    step_time = StepTime()
    for _ in range(8):  # 50 us a token, 20 tokens a pass
        step_time.step_took(1, 0.00105)
        step_time.step_took(1001, 0.05105)
    gate = PrefillGate(step_time, GRID, clock)
    leader = leading(gate, position)
    line = [request(f"follower{number}") for number in range(8)]
    assert gate.pays(ExpectedState(leader, position, 0), scheduler([leader], line)) == is_held


def test_in_one_step_no_more_than_some_decisions_are_made(gate):
    leaders = [request(f"l{number}", f"s{number}.", status=RequestStatus.RUNNING) for number in range(20)]
    for leader in leaders:
        gate.expect(leader, 0, [3600])
    line = [request(f"f{number}", f"s{number}.") for number in range(20)]
    at_once = scheduler(leaders, line)
    assert [gate.pays(deepest(gate, follower), at_once) for follower in line] == [True] * 16 + [False] * 4
    gate.drop_gone(at_once.requests)  # the next step
    assert gate.pays(deepest(gate, line[-1]), at_once)


def test_one_follower_does_not_wait_for_a_prefix_that_costs_less_than_a_pass(gate):
    leading(gate, position=800)
    assert not pays(gate, request("follower"))
    leading(gate, position=1600, computed=1000)  # only the part that is not cached yet counts
    assert not pays(gate, request("follower"))


def test_followers_that_save_more_than_a_pass_together_wait(gate):
    leading(gate, position=800, tokens=850)
    followers = [request(f"follower {number}", tokens=850) for number in range(2)]
    assert pays(gate, *followers)


def test_followers_are_counted_once_a_step(gate):
    leading(gate, position=800, tokens=850)
    followers = [request(f"follower {number}", tokens=850) for number in range(2)]
    assert not pays(gate, followers[0])
    assert not pays(gate, *followers)
    gate.drop_gone({"leader", *(follower.request_id for follower in followers)})
    assert pays(gate, *followers)


def test_a_follower_that_is_held_counts_with_those_that_come_later(gate):
    leading(gate, position=800, tokens=850)
    early, late = (request(name, tokens=850) for name in ("early", "late"))
    gate.hold(early, deepest(gate, early))
    assert not pays(gate, late)
    gate.drop_gone({"leader", "early", "late"})
    assert pays(gate, late, held=[early])


def test_a_follower_does_not_leave_its_step_to_strangers_who_gain_less_than_it_loses(gate):
    leading(gate, position=1600, tokens=1700)
    follower = request("follower", tokens=1700)
    strangers = [request(f"stranger {number}", shared=f"t{number}", tokens=8000) for number in range(2)]
    assert pays(gate, follower)
    gate.drop_gone({"leader", "follower"})
    assert not pays(gate, follower, *strangers, budget=3600)
    gate.drop_gone({"leader", "follower"})
    assert pays(gate, follower, *strangers, budget=3600, seen=7900)  # most of them is in the cache


def test_requests_that_generate_take_their_room_and_are_not_in_the_line(gate):
    leader = leading(gate, position=1600, tokens=1700)
    follower = request("follower", tokens=1700)
    strangers = [request(f"stranger {number}", shared=f"t{number}", tokens=8000) for number in range(2)]
    generating = [request(f"old {number}", f"u{number}", 160, RequestStatus.RUNNING, 159) for number in range(8)]
    busy = scheduler([leader, *generating], [follower, *strangers], budget=3600 + 8, slots=4 + 8)
    assert not gate.pays(deepest(gate, follower), busy)  # as without them


def test_a_fast_engine_shares_what_many_wait_for(clock):
    fast = StepTime()
    for _ in range(8):  # a pass costs 1 ms, a token 0.01 ms
        fast.step_took(1, 0.00101)
        fast.step_took(1000, 0.011)
    gate = PrefillGate(fast, GRID, clock)
    leading(gate)
    assert pays(gate, *(request(f"follower {number}") for number in range(31)))


@pytest.mark.parametrize(
    "gone",
    [{"status": RequestStatus.PREEMPTED}, {"status": RequestStatus.FINISHED_ABORTED}, {"num_computed_tokens": 3600}],
)
def test_no_request_waits_for_a_leader_that_is_gone_or_done(gate, gone):
    leader = leading(gate)
    vars(leader).update(gone)
    assert deepest(gate, request("follower")) is None
    gate.drop_gone({})
    assert not gate._expected


def test_another_leader_takes_over(gate):
    leader = leading(gate)
    leader.status = RequestStatus.FINISHED_ABORTED
    second = request("second", status=RequestStatus.RUNNING)
    gate.expect(second, 0, [3600])
    assert deepest(gate, request("follower")).leader is second


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
    assert [step(gate, follower, expected) for _ in range(PATIENCE_STEPS)] == [True] * (PATIENCE_STEPS - 1) + [False]
    assert gate.release(follower) == pytest.approx(22400) and gate.release(follower) is None


def test_the_wait_for_another_leader_begins_again(gate, clock):
    leading(gate)
    follower = request("follower")
    assert all(step(gate, follower, deepest(gate, follower)) for _ in range(PATIENCE_STEPS))
    second = request("second", status=RequestStatus.RUNNING)
    gate._expected.clear()
    gate.expect(second, 0, [3600])
    clock.now += 12.5
    assert all(step(gate, follower, deepest(gate, follower)) for _ in range(PATIENCE_STEPS))
    assert gate.release(follower) == pytest.approx(12.5)


def test_leaders_that_leave_one_after_the_other_are_not_waited_for_for_ever(gate, clock):
    follower = request("follower")
    held = []
    for number in range(MAX_LEADERS + 1):
        gate.clear()
        leader = request(f"leader {number}", status=RequestStatus.RUNNING)
        gate.expect(leader, 0, [3600])
        held.append(gate.hold(follower, deepest(gate, follower)))
    assert held == [True] * MAX_LEADERS + [False]


def test_a_follower_that_is_gone_is_forgotten(gate):
    leading(gate)
    gate.hold(request("follower"), deepest(gate, request("follower")))
    gate.drop_gone({"leader", "follower"})
    assert list(gate.waiting) == ["follower"]
    gate.drop_gone({"leader"})
    assert not gate.waiting


@pytest.mark.parametrize(
    ("transfer", "begins"), [(None, False), ({"do_remote_decode": True}, False), ({"do_remote_prefill": True}, True)]
)
def test_a_request_whose_states_are_loaded_from_elsewhere_does_not_wait(gate, transfer, begins):
    leader = leading(gate)
    follower = request("follower")
    follower.kv_transfer_params, follower.skip_reading_prefix_cache = transfer, False
    engine = scheduler([leader], [follower])
    engine.seamark.gate, engine.seamark.counters = gate, Counters()
    state = RequestState()
    engine.seamark.state_of = lambda _: state
    assert hold_followers(lambda *_: True)(engine, follower) is begins


def test_no_request_waits_while_states_find_no_room(gate):
    leading(gate)
    expected = deepest(gate, request("follower"))
    gate.pause()
    held = [step(gate, request("follower"), expected) for _ in range(PAUSE_STEPS)]
    assert held == [False] * (PAUSE_STEPS - 1) + [True]


def test_beside_a_draft_head_a_follower_has_to_share_a_unit_more_than_it_saves(clock):
    gate = PrefillGate(StepTime(), Grid(UNIT, UNIT, UNIT, UNIT), clock)
    leading(gate, 3584)
    assert deepest(gate, request("other", shared="t")) is None
    (expected,) = gate.expected_in(request("follower"))
    assert (expected.position, expected.saved) == (3600, 3584)
    # The same prompt again computes the unit that it shares, and so needs no further token.
    assert deepest(gate, request("same", tokens=3600)) is not None
    assert deepest(gate, request("short", tokens=3599)) is None


@pytest.mark.parametrize(("verified", "budget"), [(3, 8), (2, 8), (1, 4)])
def test_a_step_that_is_full_of_requests_that_generate_is_weighed_too(gate, verified, budget):
    """This runs inside vLLM's `schedule()`, where an exception ends the engine."""
    leading(gate)
    follower = request("follower")
    expected = deepest(gate, follower)
    generating = [request(f"g{n}", shared=f"t{n}", status=RequestStatus.RUNNING, computed=3999) for n in range(4)]
    full = scheduler([expected.leader, *generating], [follower], budget=budget)
    full.seamark.verified = verified
    assert gate.pays(expected, full) in (True, False)


class Engine:
    """A scheduler as its waiting requests meet it, one after the other."""

    def __init__(self, gate, *running, **how):
        self.states = {}
        self.scheduler = scheduler(running, **how)
        self.scheduler.seamark.gate, self.scheduler.seamark.counters = gate, Counters()
        self.scheduler.seamark.state_of = lambda each: self.states.setdefault(each.request_id, RequestState())

    def begins(self, follower, vllm=True):
        """Whether a request may begin, whom vLLM alone would have begin or not."""
        follower.skip_reading_prefix_cache = getattr(follower, "skip_reading_prefix_cache", False)
        if follower not in self.scheduler.waiting:
            self.scheduler.waiting.append(follower)
            self.scheduler.requests[follower.request_id] = follower
        return hold_followers(lambda scheduler, request: vllm)(self.scheduler, follower)

    @property
    def counted(self):
        counts = self.scheduler.seamark.counters.take()
        return dict(counts.followers), counts.spent_seconds


def test_a_follower_is_held_until_its_leader_has_written_the_state(gate, clock):
    leader = leading(gate)
    engine, follower = Engine(gate, leader), request("follower")
    assert not engine.begins(follower) and not engine.begins(follower)
    clock.now += 2.5
    leader.num_computed_tokens = 3600
    assert engine.begins(follower) and not gate.waiting
    assert engine.counted == ({"held": 1}, 2.5)
    assert engine.begins(follower) and engine.counted == ({}, 0.0)


@pytest.mark.parametrize(
    "changed", [{"status": RequestStatus.PREEMPTED}, {"num_computed_tokens": 16}, {"skip_reading_prefix_cache": True}]
)
def test_a_request_that_finds_nothing_or_has_begun_before_is_not_held(gate, changed):
    engine, follower = Engine(gate, leading(gate)), request("follower")
    vars(follower).update(changed)
    assert engine.begins(follower) and not gate.waiting and engine.counted == ({}, 0.0)


def test_a_request_that_vllm_itself_holds_is_not_looked_at(gate):
    engine = Engine(gate, leading(gate))
    assert not engine.begins(request("follower"), vllm=False) and not gate.waiting


def test_without_a_gate_nobody_is_held(gate):
    engine = Engine(None, leading(gate))
    assert engine.begins(request("follower")) and engine.counted == ({}, 0.0)


def test_one_that_would_not_be_spared_enough_runs_along_and_is_counted_once(gate):
    engine, follower = Engine(gate, leading(gate, position=800)), request("follower")
    assert engine.begins(follower) and engine.begins(follower)
    assert engine.counted == ({"not_worth_it": 1}, 0.0)
    assert engine.begins(request("stranger", shared="t")) and engine.counted == ({}, 0.0)


def test_a_follower_gives_a_leader_up_once_and_for_all(gate, clock):
    leader = leading(gate)
    engine, follower = Engine(gate, leader), request("follower")
    assert not engine.begins(follower)
    clock.now += 100.0
    for _ in range(PATIENCE_STEPS):
        gate.drop_gone(engine.scheduler.requests)
    assert engine.begins(follower) and engine.counted == ({"held": 1}, 100.0)
    leader.num_computed_tokens = 1800  # it goes on after all
    gate.drop_gone(engine.scheduler.requests)
    assert engine.begins(follower) and not gate.waiting
    assert not engine.begins(request("another"))


def test_a_follower_that_was_held_goes_on_waiting_whatever_it_would_pay_now(gate):
    leader = leading(gate)
    engine, follower = Engine(gate, leader), request("follower")
    assert not engine.begins(follower)
    gate.drop_gone(engine.scheduler.requests)
    leader.num_computed_tokens = 3584  # what is left of its prefix is less than a pass
    assert not engine.begins(follower)


def test_a_state_that_another_is_about_to_write_keeps_its_first_leader_as_long_as_that_runs(gate):
    first = leading(gate)
    second = request("second", status=RequestStatus.RUNNING)
    gate.expect(second, 0, [3600])
    assert deepest(gate, request("follower")).leader is first
    first.status = RequestStatus.PREEMPTED
    gate.expect(second, 0, [3600])
    assert deepest(gate, request("follower")).leader is second


def test_no_request_waits_for_itself(gate):
    leader = leading(gate)
    leader.status = RequestStatus.RUNNING
    assert deepest(gate, leader) is None


def test_a_gate_that_is_cleared_expects_nothing(gate):
    leading(gate)
    gate.clear()
    assert deepest(gate, request("follower")) is None


def test_a_line_is_looked_at_up_to_a_bound(gate, monkeypatch):
    leading(gate, position=800, tokens=850)
    followers = [request(f"follower {number}", tokens=850) for number in range(2)]
    monkeypatch.setattr(fan_out, "MAX_LINE", 1)
    assert not pays(gate, *followers)
    gate.drop_gone({"leader"})
    monkeypatch.setattr(fan_out, "MAX_LINE", 2)
    assert pays(gate, *followers)
