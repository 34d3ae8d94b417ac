"""Fan-out: a request whose prefix another one is computing right now waits for it, when that saves time.

vLLM lets both compute it. The request that runs first is the leader. A follower is held back alone, not the requests
behind it in the queue, and goes on as soon as the state is written, or the leader is gone or stands still. Where no
state of the leader's serves it, it asks for one at the place where it leaves its prompt: their hashes tell.

A held follower costs itself a pass, and saves its prefix for everyone. But the room that it leaves goes to those behind
it. What is more depends on how many follow and who else waits, so the next steps are played through both ways.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine_patches.ledger import SCHEDULER, Function, Patch, Shape
from engine_patches.scheduler.planner import CLOSEST, EXPECTED, NEAR, CheckpointTarget, Grid, RequestState
from engine_patches.scheduler.step_time import StepTime

# What all followers of a state save together has to outweigh the pass that each waits for by this factor, and to be so
# much: step times and arrivals scatter, and a follower that runs along costs no request a pass.
MARGIN, MIN_SAVING_SECONDS = 1.5, 0.2

# Where each saves so many tokens, and together they save so many passes, scatter loses little of it, and less time
# counts: prompts of some hundred tokens on a fast GPU. A short prompt's wave takes no pass more than with vLLM alone.
CLEAR_TOKENS, CLEAR_MARGIN, CLEAR_SAVING_SECONDS = 256, 4.0, 0.05

# Waiting requests looked at for one decision, and decisions in one step: each takes up to some milliseconds.
MAX_LINE, MAX_DECISIONS = 128, 16

# A follower waits as long as its leader advances: one that left would compute all of it again. In so many steps that
# compute nothing of the leader's prompt others are served before it, and the follower goes on alone.
PATIENCE_STEPS = 8

MAX_LEADERS = 4  # that a follower waits for if one after the other is gone
MAX_ASKED = 4  # places of a leader's prompt that followers may ask for, and those where it is likely to be left
PAUSE_STEPS = 32  # in which no request is held after a state has found no room in the cache
MAX_STEPS = 16  # played through. What is not done by then goes on in order, at the time that its tokens take


class ExpectedState(NamedTuple):
    """A state that a running request is going to write."""

    leader: Any
    position: int  # tokens that a follower has to share, and the leader to compute
    start: int  # tokens that the leader itself found in the cache
    saved: int  # tokens that a follower need not compute


@dataclass
class Wait:
    since: float  # seconds, by the gate's clock
    leader: str  # id
    leaders: int  # waited for so far
    computed: int = -1  # tokens that the leader has computed
    step: int = 0  # in which it came to these


class ForecastJob(NamedTuple):
    """A request that has yet to give its first token."""

    tokens: int  # to be computed
    shared: int = 0  # of these, the ones it finds in the cache once the leader has come to its state; 0: no follower


class ForecastEngine(NamedTuple):
    """What a step may hold, and what it costs."""

    budget: int  # tokens a step may hold
    chunk: int  # of them, of one request
    alignment: int  # a chunk that does not reach the prompt's end ends on a multiple of it, if there is room for that
    slots: int  # requests that may run
    tokens_per_pass: float  # tokens that take as long as an empty pass


def first_tokens(
    jobs: Sequence[ForecastJob], running: int, leader: int, missing: int, engine: ForecastEngine, hold: bool
) -> float:
    """Play the next steps through: the sum of all times to the first token, in tokens computed meanwhile.

    The first `running` of `jobs` run, the others wait, in this order. `leader` is the place of the one that has
    `missing` tokens to compute before its state is written; `hold` keeps its followers waiting until then.
    """
    left = [job.tokens for job in jobs]
    behind = left[leader] - missing
    runs, waits = list(range(running)), list(range(running, len(jobs)))
    slots = engine.slots
    now = total = 0.0

    def compute(place: int, room: int) -> int:
        taken = min(left[place], room, engine.chunk)
        if taken < left[place]:  # of the room that this leaves, those behind get a little
            taken = taken // engine.alignment * engine.alignment or taken
        left[place] -= taken
        return taken

    for _ in range(MAX_STEPS):
        if not slots or not (runs or waits):
            break
        written = left[leader] <= behind
        room = engine.budget
        for place in runs:
            room -= compute(place, room)
        still = []
        for place in waits:
            if not room or len(runs) >= slots or (hold and not written and jobs[place].shared):
                still.append(place)
                continue
            if written:
                left[place] -= jobs[place].shared
            runs.append(place)
            room -= compute(place, room)
        waits = still
        now += engine.tokens_per_pass + engine.budget - room
        done = sum(not left[place] for place in runs)
        total += now * done
        slots -= done  # they generate on
        runs = [place for place in runs if left[place]]
    for place in runs + waits:
        now += left[place] * (1 + engine.tokens_per_pass / engine.budget)
        total += now
    return total


class PrefillGate:
    """Knows what running requests will write, and which requests wait for it. One per scheduler."""

    def __init__(self, step_time: StepTime, grid: Grid, clock: Callable[[], float] = time.monotonic) -> None:
        self._step_time, self._grid, self._clock = step_time, grid, clock
        self._expected: dict[bytes, ExpectedState] = {}  # by the hash of the prefix
        self._positions: list[int] | None = []  # of all expected, deepest first; None: to be sorted
        self._leaders: dict[str, tuple[Any, int]] = {}  # by id, with the tokens that each found in the cache
        self._step = self._paused_until = 0  # steps are counted
        self._weighed: dict[tuple[str, int], bool] = {}  # in this step, by leader and position: whether waiting pays
        self.waiting: dict[str, Wait] = {}

    def expect(self, request: Any, start: int, positions: Iterable[int]) -> None:
        """`request` is about to run from token `start` and to write states at `positions`."""
        self._leaders.setdefault(request.request_id, (request, start))
        for state in positions:
            position = state + self._grid.drop
            key = self._grid.hash_of(request, position)
            known = self._expected.get(key)
            if state > start and (known is None or not _is_coming(known.leader, known.position)):
                self._expected[key] = ExpectedState(request, position, start, state - start)
                self._positions = None

    def drop_gone(self, requests: Container[str]) -> None:
        """A step begins: drop states that are written or never will be, and followers not among `requests`."""
        self._step += 1
        self._weighed.clear()
        for key in [key for key, known in self._expected.items() if not _is_coming(known.leader, known.position)]:
            del self._expected[key]
            self._positions = None
        for name in [name for name in self.waiting if name not in requests]:
            del self.waiting[name]
        for name, (leader, _) in list(self._leaders.items()):
            if not _is_coming(leader, leader.num_prompt_tokens):
                del self._leaders[name]

    def clear(self) -> None:
        self._expected.clear()
        self._leaders.clear()
        self._positions = []

    def pause(self) -> None:
        """A state found no room: hold no request for a while, since it would wait in vain."""
        self._paused_until = self._step + PAUSE_STEPS

    def expected_in(self, request: Any) -> Iterator[ExpectedState]:
        """The states in a waiting request's prompt that running requests are going to write, deepest first."""
        if self._positions is None:
            self._positions = sorted({known.position for known in self._expected.values()}, reverse=True)
        for position in self._positions:
            if self._can_resume(request, position):
                known = self._expected.get(self._grid.hash_of(request, position))
                if known is not None and known.leader is not request and _is_coming(known.leader, known.position):
                    yield known

    def could_expect(self, request: Any) -> ExpectedState | None:
        """A state where a waiting request leaves a running one's prompt, and nothing is coming near that place."""
        known, found = next(self.expected_in(request), None), None
        least = max(CLOSEST, NEAR * self._grid.alignment) + (known.position - self._grid.drop if known else 0)
        for leader, start in self._leaders.values():
            hashes, own = leader.block_hashes, request.block_hashes
            if leader is request or not own or hashes[:1] != own[:1]:
                continue
            units = range(min(len(hashes), len(own)))
            shared = bisect.bisect_left(units, True, key=lambda unit: hashes[unit] != own[unit]) * self._grid.unit
            state = self._grid.deliverable(shared, min(request.num_tokens, leader.num_prompt_tokens))
            # The chunk that it runs now may be planned to its end already.
            if state - start >= CLOSEST and state >= least and _is_coming(leader, state):
                least, found = state + 1, ExpectedState(leader, state + self._grid.drop, start, state - start)
        return found

    def pays(self, expected: ExpectedState, scheduler: Any) -> bool:
        """Whether all who share a state save clearly by waiting, and first tokens come no later in the mean."""
        decision = (expected.leader.request_id, expected.position)
        if decision not in self._weighed and len(self._weighed) < MAX_DECISIONS:
            self._weighed[decision] = self._weigh(expected, scheduler)
        return self._weighed.get(decision, False)

    def _weigh(self, expected: ExpectedState, scheduler: Any) -> bool:
        jobs, running, leader = self._line(expected, scheduler)
        decoding = sum(_left(request) <= 1 for request in scheduler.running)
        budget = max(scheduler.max_num_scheduled_tokens - decoding * scheduler.seamark.verified, 1)
        # Tokens that are spared, and passes that these would fill.
        work, shared = sum(job.tokens for job in jobs), sum(job.shared for job in jobs)
        passes, pace = math.ceil(work / budget) - math.ceil((work - shared) / budget), self._step_time
        saved = shared + pace.tokens_worth(passes)
        if saved < pace.tokens_worth(MARGIN):
            return False
        is_clear = expected.saved >= CLEAR_TOKENS and saved >= pace.tokens_worth(CLEAR_MARGIN)
        least = CLEAR_SAVING_SECONDS if is_clear else MIN_SAVING_SECONDS
        if pace.known and pace.seconds(shared, passes) < least:
            return False
        chunk = scheduler.scheduler_config.long_prefill_token_threshold or budget
        slots = scheduler.max_num_running_reqs - decoding
        engine = ForecastEngine(budget, chunk, self._grid.alignment, slots, pace.tokens_worth(passes=1))
        missing = expected.position - expected.leader.num_computed_tokens
        held, along = (first_tokens(jobs, running, leader, missing, engine, hold) for hold in (True, False))
        return held <= along

    def _line(self, expected: ExpectedState, scheduler: Any) -> tuple[list[ForecastJob], int, int]:
        """The requests that have yet to give a token, how many of them run, and the leader's place among these."""
        runs = [each for each in scheduler.running if each is expected.leader or _left(each) > 1]
        leader = next((place for place, each in enumerate(runs) if each is expected.leader), 0)
        jobs = [ForecastJob(_left(each)) for each in runs]
        held = (scheduler.requests[name] for name in self.waiting if name in scheduler.requests)
        key = self._grid.hash_of(expected.leader, expected.position)
        line = itertools.islice(itertools.chain(held, scheduler.waiting), MAX_LINE)
        for request in {request.request_id: request for request in line}.values():
            if self._can_resume(request, expected.position) and self._grid.hash_of(request, expected.position) == key:
                jobs.append(ForecastJob(request.num_tokens - expected.start, expected.saved))
            else:
                cached = scheduler.seamark.state_of(request).wish.shared  # at most
                jobs.append(ForecastJob(max(_left(request) - cached, 1)))
        return jobs, len(runs), leader

    def _can_resume(self, request: Any, position: int) -> bool:
        """Whether a request is long enough to resume from an expected state whose keys reach up to `position`."""
        return position - self._grid.drop <= self._grid.resumable(request.num_tokens)

    def hold(self, request: Any, expected: ExpectedState) -> bool:
        """Hold `request` back for an expected state; False if its leader stands still, or others did before."""
        if self._step < self._paused_until:
            return False
        leader, wait = expected.leader, self.waiting.get(request.request_id)
        if wait is None or wait.leader != leader.request_id:
            since, before = (self._clock(), 0) if wait is None else (wait.since, wait.leaders)
            if before == MAX_LEADERS:
                return False
            wait = self.waiting[request.request_id] = Wait(since, leader.request_id, before + 1)
        if leader.num_computed_tokens > wait.computed:
            wait.computed, wait.step = leader.num_computed_tokens, self._step
        return self._step - wait.step < PATIENCE_STEPS

    def release(self, request: Any) -> float | None:
        """`request` waits no longer; seconds it was held, None if it was not."""
        wait = self.waiting.pop(request.request_id, None)
        return None if wait is None else self._clock() - wait.since


def _left(request: Any) -> int:
    """Tokens that a request has yet to compute before it gives one; 1 if it generates already."""
    return int(request.num_tokens - request.num_computed_tokens)


def _is_coming(leader: Any, position: int) -> bool:
    """Whether a leader is going to compute its prompt up to there."""
    if leader.num_computed_tokens >= position:
        return False  # it has, as all soon have: no import for these
    from vllm.v1.request import RequestStatus

    return bool(leader.status == RequestStatus.RUNNING)


@Patch(
    "fan-out",
    f"{SCHEDULER}._handle_blocked_waiting_request",
    why="a request waits while a running one computes its prefix, if that saves time",
    upstream="RFC vllm#55697 holds followers too",
    until="vLLM shares a cold prefix among requests",
    mentions=("return True", "return False"),
    relies_on=(
        Shape(
            f"{SCHEDULER}.schedule",
            mentions=(
                "self._handle_blocked_waiting_request(request)",
                "self.max_num_scheduled_tokens",
                "self.max_num_running_reqs",
                "num_running >= self.max_num_active_reqs",
                "self.scheduler_config.long_prefill_token_threshold",
            ),
        ),
    ),
)
def hold_followers(self: Any, request: Any, *, original: Function) -> bool:
    """Replacement of `Scheduler._handle_blocked_waiting_request`: False keeps one request waiting, and only that."""
    from vllm.v1.request import RequestStatus

    if not original(self, request):
        return False
    checkpoints = self.seamark
    gate: PrefillGate | None = checkpoints.gate
    if gate is None or request.status != RequestStatus.WAITING or request.num_computed_tokens:
        return True
    # To wait for others would spare nothing to a request whose states a KV connector brings.
    is_loaded = (getattr(request, "kv_transfer_params", None) or {}).get("do_remote_prefill")
    if not request.skip_reading_prefix_cache and not is_loaded and _waits(self, gate, request):
        return False
    if (held := gate.release(request)) is not None:
        checkpoints.counters.counts.followers["held"] += 1
        checkpoints.counters.counts.spent_seconds += held
    return True


def _waits(scheduler: Any, gate: PrefillGate, request: Any) -> bool:
    checkpoints = scheduler.seamark
    state: RequestState = checkpoints.state_of(request)
    held = request.request_id in gate.waiting
    passed = False
    asked = gate.could_expect(request) if state.wish.is_kept and not held else None
    for expected in itertools.chain([asked] if asked is not None else (), gate.expected_in(request)):
        leader = expected.leader.request_id
        # A request that has given up on a leader starts as soon as there is room for it, be it in a later step.
        if state.gave_up_on == leader:
            return False
        if held or gate.pays(expected, scheduler):
            if expected is asked and not _ask(scheduler, gate, request, asked):
                continue
            is_held = gate.hold(request, expected)
            if not is_held:
                state.gave_up_on = leader
            return is_held
        passed = True
    if passed and not state.not_held:
        state.not_held = True
        checkpoints.counters.counts.followers["not_worth_it"] += 1
    return False


def _ask(scheduler: Any, gate: PrefillGate, request: Any, asked: ExpectedState) -> bool:
    """Have a leader keep a state for a follower; False if that finds more itself, enough are asked for, or none of
    the leader's finds room."""
    lookup, checkpoints = scheduler.kv_cache_manager.coordinator.find_longest_cache_hit, scheduler.seamark
    state: RequestState = checkpoints.state_of(asked.leader)
    places, position = state.wish.expected, asked.start + asked.saved
    if len(places) >= MAX_ASKED or lookup(request.block_hashes, asked.position)[1] > asked.start:
        return False
    if not checkpoints.finds_room(asked.leader, CheckpointTarget(position, EXPECTED)):
        return False
    state.wish = replace(state.wish, expected=tuple(sorted((*places, position))))
    gate.expect(asked.leader, asked.start, [position])
    return True
