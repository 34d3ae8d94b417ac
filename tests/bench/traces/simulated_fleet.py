"""Workers that serve a trace in simulated time: passes, a cache of attention and states, and what they tell of it.

Batching is continuous, a pass takes as many prompt tokens as vLLM's budget; the cache is one LRU over blocks of
attention and states, with Seamark's rules for states. Deterministic, and no clock is read.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tests.bench.traces.formats import BLOCK, Place, TraceRequest

MATCH_UNIT = 16  # tokens

CHUNK = 4  # blocks that the simulated cache keeps or loses together: fewer to move

PATIENCE_SECONDS = 4.0  # that a request waits at most for a state which another one is computing


@dataclass(frozen=True)
class Profile:
    """What one worker takes and holds. The default is like Nemotron 3 Nano on one datacentre GPU."""

    pass_seconds: float = 0.012  # of a pass over hardly any tokens
    token_seconds: float = 0.00005  # that each prompt token adds
    sequence_seconds: float = 0.00012  # that each decoding sequence adds to a pass
    batched_tokens: int = 8192  # --max-num-batched-tokens
    sequences: int = 256  # --max-num-seqs
    cache_tokens: int = 8_000_000  # of attention that fit, were there no states
    state_tokens: int = 8192  # of attention that take the room of one state
    state_share: float = 0.5  # of the cache that states may hold

    def work_seconds(self, request: TraceRequest) -> float:
        """Of a worker, for the request beside others, if all that it shares is found."""
        new = request.prompt - request.shareable
        alone = new * self.token_seconds + request.output * self.sequence_seconds
        return alone + self.pass_seconds * max(new / self.batched_tokens, request.output / self.sequences)


PROFILES = {
    "datacentre": Profile(),
    # Nemotron 3 Super on a DGX Spark: 0.5 ms a token, 170 MB a state at some 4 kB of attention a token, 20 GiB.
    "spark": Profile(0.065, 0.0005, 0.004, 8192, 16, 5_000_000, 41_600),
}


class News(NamedTuple):
    """What an engine tells."""

    time: float  # seconds
    worker: int
    request: Execution | None  # that has been computed up to `end`; None: a state is gone
    end: int  # tokens
    kept: tuple[Place, ...]  # of its boundaries, those that the cache has a state of
    gone: int  # name of the place whose state is gone


class Policy:
    """Chooses workers. This one lets others choose, and hears nothing."""

    def choose(self, execution: Execution) -> int:
        raise NotImplementedError

    def hear(self, news: News) -> None:
        """An engine has told something."""

    def first_token(self, execution: Execution) -> None:
        """The prompt is computed, and the client sees it."""

    def ended(self, execution: Execution) -> None:
        """The answer is complete."""


@dataclass(slots=True, eq=False)
class Execution:
    """One request at a worker; times in seconds."""

    name: str  # by which its engine tells of it
    request: TraceRequest
    hint: tuple[Place, ...]  # where states are asked for
    arrived: float
    worker: int = -1
    hit: int = 0  # tokens found in the cache
    resumed: int = 0  # name of the place it went on from; 0: none
    computed: int = 0  # prompt tokens that are there, hit included
    to_write: list[Place] = field(default_factory=list)
    first: float = 0.0
    end: float = 0.0
    held_since: float | None = None  # waits for another's state
    may_wait: bool = True


@dataclass(slots=True)
class _State:
    """A state in the cache."""

    is_turn: bool
    uses: int = 0

    @property
    def may_go(self) -> bool:
        """Whether it is a turn that at most one request went on from."""
        return self.is_turn and self.uses <= 1


class Cache:
    """One LRU over attention and states; sizes in tokens of attention."""

    def __init__(self, profile: Profile, evicted: Callable[[int], None]) -> None:
        """`evicted` is called with the name of each place whose state goes."""
        self._size = profile.cache_tokens
        self._state_size = profile.state_tokens
        self._most_states = int(profile.cache_tokens * profile.state_share)
        self._evicted = evicted
        self._lru: OrderedDict[int, int] = OrderedDict()  # sizes; by name of a block, or minus that of a state's place
        self._states: OrderedDict[int, _State] = OrderedDict()
        self._used = 0
        self.pinned = 0  # by running requests

    def find(self, request: TraceRequest) -> Place | None:
        """The deepest place on the request's way with a state, and attention up to it."""
        blocks = request.blocks
        for place in reversed(request.path):
            if place.tokens < request.prompt and place.name in self._states:
                last = place.tokens // BLOCK // CHUNK * CHUNK
                if not last or last > len(blocks) or blocks[last - 1] in self._lru:
                    return place
        return None

    def __contains__(self, name: int) -> bool:
        return name in self._states

    def admit(self, request: TraceRequest, resumed: int = 0) -> None:
        """The request's attention has, or gets, room; it goes on from the state `resumed`."""
        for name in reversed(request.blocks[CHUNK - 1 :: CHUNK]):
            if name in self._lru:
                self._lru.move_to_end(name)
            else:
                self._lru[name] = CHUNK * BLOCK
                self._used += CHUNK * BLOCK
        if resumed in self._states:
            self._states[resumed].uses += 1
            self._touch(resumed)
        self._shrink()

    def write(self, name: int, *, is_turn: bool) -> None:
        """Keep a state, if there is room for it."""
        if name in self._states:
            self._touch(name)
            return
        while (len(self._states) + 1) * self._state_size > self._most_states:
            if not self._states:
                return
            self._drop(self._victim())
        self._states[name] = _State(is_turn)
        self._lru[-name] = self._state_size
        self._used += self._state_size
        self._shrink()

    def supersede(self, name: int) -> None:
        """The conversation has gone on: the state of its last turn goes first, unless several went on from it."""
        state = self._states.get(name)
        if state is not None and state.may_go:
            self._states.move_to_end(name, last=False)
            self._lru.move_to_end(-name, last=False)

    def used_by(self, request: TraceRequest) -> None:
        """The request has ended: what many may share is as new as its answer."""
        self.admit(request)
        for place in request.path:
            state = self._states.get(place.name)
            if state is not None and not state.may_go:
                self._touch(place.name)

    def _touch(self, name: int) -> None:
        self._states.move_to_end(name)
        self._lru.move_to_end(-name)

    def _victim(self) -> int:
        """The oldest that may go, else the oldest of all."""
        looked_at = itertools.islice(self._states.items(), 200)
        return next((name for name, state in looked_at if state.may_go), next(iter(self._states)))

    def _drop(self, name: int) -> None:
        self._used -= self._lru.pop(-name)
        del self._states[name]
        self._evicted(name)

    def _shrink(self) -> None:
        while self._used > self._size - self.pinned and self._lru:
            name, size = self._lru.popitem(last=False)
            self._used -= size
            if name < 0:
                del self._states[-name]
                self._evicted(-name)


class Worker:
    """One engine: requests wait, are computed in passes, and decode together."""

    def __init__(self, number: int, profile: Profile, fleet: Fleet) -> None:
        self.number = number
        self._profile = profile
        self._fleet = fleet
        self.cache = Cache(profile, lambda name: fleet.tell(self.number, None, 0, (), name))
        self.waiting: deque[Execution] = deque()
        self._prefilling: list[Execution] = []
        self._decoding: list[tuple[int, int, Execution]] = []  # (pass in which it ends, order, request)
        self._passes = 0
        self._order = 0
        self._batch: list[tuple[Execution, int]] = []  # of the pass under way, with its tokens of each
        self._plan: tuple[float, float, int] | None = None  # start, seconds of a pass, passes; None: idle
        self._version = 0
        self._writers: dict[int, Execution] = {}  # by place whose state they are about to write

    def arrive(self, execution: Execution, now: float) -> None:
        """A request comes; passes that only decode are not planned beyond it."""
        self.waiting.append(execution)
        if self._plan is None:
            self._next(now)
        elif not self._batch:
            start, seconds, passes = self._plan
            done = int((now - start) / seconds) + 1
            if done < passes:
                self._set_plan(start, seconds, done)

    def fire(self, version: int, now: float) -> None:
        """The planned passes are over, unless the plan was another one."""
        if version != self._version or self._plan is None:
            return
        self._passes += self._plan[2]
        batch, self._batch = self._batch, []
        for execution, tokens in batch:
            self._computed(execution, tokens, now)
        while self._decoding and self._decoding[0][0] <= self._passes:
            self._ended(heapq.heappop(self._decoding)[2], now)
        self._next(now)

    def _set_plan(self, start: float, seconds: float, passes: int) -> None:
        self._plan = (start, seconds, passes)
        self._version += 1
        end = start + seconds * passes
        self._fleet.at(end, partial(self.fire, self._version, end))

    def _next(self, now: float) -> None:
        profile, decoding = self._profile, len(self._decoding)
        budget = profile.batched_tokens - decoding
        self._batch = []
        for execution in self._prefilling:
            budget -= self._schedule(execution, budget)
        budget = self._admit(budget, now)
        if not self._batch and not decoding and self.waiting:  # all are held back, and nobody is left to wait for
            for execution in self.waiting:
                execution.may_wait = False
            self._admit(budget, now)
        tokens = sum(tokens for _, tokens in self._batch)
        seconds = profile.pass_seconds + profile.token_seconds * tokens + profile.sequence_seconds * decoding
        if self._batch:
            self._set_plan(now, seconds, 1)
        elif decoding:
            self._set_plan(now, seconds, 1 if self.waiting else max(1, self._decoding[0][0] - self._passes))
        else:
            self._plan = None

    def _admit(self, budget: int, now: float) -> int:
        """Start waiting requests while the pass has room; what is left of its `budget`."""
        cache, profile = self.cache, self._profile
        held_back = []
        while self.waiting and budget > 0 and len(self._decoding) + len(self._prefilling) < profile.sequences:
            execution = self.waiting[0]
            request = execution.request
            room = request.prompt + request.output + profile.state_tokens
            if cache.pinned + room > profile.cache_tokens and (self._decoding or self._prefilling):
                break
            self.waiting.popleft()
            found = cache.find(request)
            hit = found.tokens // MATCH_UNIT * MATCH_UNIT if found is not None else 0
            if self._waits(execution, hit, now):
                held_back.append(execution)
                continue
            execution.hit = execution.computed = hit
            execution.resumed = found.name if found is not None else 0
            cache.pinned += request.output + profile.state_tokens
            cache.admit(request, execution.resumed)
            execution.to_write = [place for place in execution.hint if place.tokens > hit]
            for place in execution.to_write:
                self._writers.setdefault(place.name, execution)
            self._prefilling.append(execution)
            budget -= self._schedule(execution, budget)
        self.waiting.extendleft(reversed(held_back))
        return budget

    def _schedule(self, execution: Execution, budget: int) -> int:
        tokens = max(0, min(budget, execution.request.prompt - execution.computed))
        if tokens:
            self._batch.append((execution, tokens))
        return tokens

    def _waits(self, execution: Execution, hit: int, now: float) -> bool:
        """Whether it pays to wait for a state that a running request is about to write, as Seamark's engines do."""
        if not execution.may_wait or not self._writers:
            return False
        for place in reversed(execution.request.path):
            if not hit < place.tokens < execution.request.prompt:
                continue
            leader = self._writers.get(place.name)
            if leader is None or leader.computed >= place.tokens:
                continue
            saved = (place.tokens - max(hit, leader.hit)) * self._profile.token_seconds
            if saved < max(0.2, 1.5 * self._profile.pass_seconds):
                return False
            if execution.held_since is None:
                execution.held_since = now
            left = (place.tokens - leader.computed) * self._profile.token_seconds
            return now - execution.held_since <= PATIENCE_SECONDS + 3 * left
        return False

    def _computed(self, execution: Execution, tokens: int, now: float) -> None:
        execution.computed += tokens
        request = execution.request
        if execution.to_write:
            deepest = execution.hint[-1].name
            while execution.to_write and execution.to_write[0].tokens <= execution.computed:
                place = execution.to_write.pop(0)
                is_turn = len(execution.hint) > 1 and place.name == deepest
                self.cache.write(place.name, is_turn=is_turn)
                if is_turn and execution.resumed:
                    self.cache.supersede(execution.resumed)
                if self._writers.get(place.name) is execution:
                    del self._writers[place.name]
        kept = tuple(place for place in request.boundaries if place.tokens <= execution.computed)
        kept = tuple(place for place in kept if place.name in self.cache)
        self._fleet.tell(self.number, execution, execution.computed, kept, 0)
        if execution.computed < request.prompt:
            return
        self._prefilling.remove(execution)
        execution.first = now
        self._fleet.policy.first_token(execution)
        if request.output > 1:
            self._order += 1
            heapq.heappush(self._decoding, (self._passes + request.output - 1, self._order, execution))
        else:
            self._ended(execution, now)

    def _ended(self, execution: Execution, now: float) -> None:
        execution.end = now
        self.cache.pinned -= execution.request.output + self._profile.state_tokens
        self.cache.used_by(execution.request)
        self._fleet.policy.ended(execution)
        self._fleet.done(execution, now)


class Fleet:
    """The workers, and the events among them in the order of simulated time."""

    def __init__(
        self, workers: int, profile: Profile, policy: Policy, hint: Callable[[TraceRequest], tuple[Place, ...]]
    ) -> None:
        """`hint`: where a gateway asks for states."""
        self.policy = policy
        self._hint = hint
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._begun = 0
        self._news: deque[News] = deque()
        self._now = 0.0
        self.on_end: Callable[[Execution, float], None] = lambda execution, now: None
        self.executions: list[Execution] = []  # that have ended
        self.workers = [Worker(number, profile, self) for number in range(workers)]

    def send(self, request: TraceRequest, time: float) -> None:
        self.at(time, partial(self._arrived, request))

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, action))

    def tell(self, worker: int, execution: Execution | None, end: int, kept: Sequence[Place], gone: int) -> None:
        """An engine tells something; the gateway reads it some time later."""
        self._news.append(News(self._now, worker, execution, end, tuple(kept), gone))

    def done(self, execution: Execution, now: float) -> None:
        self.executions.append(execution)
        self.on_end(execution, now)

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self._now, _, action = heapq.heappop(self._events)
            action()

    def _arrived(self, request: TraceRequest) -> None:
        while self._news and self._news[0].time <= self._now - 0.03:  # until a gateway has read what an engine tells
            self.policy.hear(self._news.popleft())
        self._begun += 1
        execution = Execution(str(self._begun), request, self._hint(request), self._now)
        execution.worker = self.policy.choose(execution)
        self.workers[execution.worker].arrive(execution, self._now)
