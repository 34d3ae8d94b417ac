"""Fan-out: a request whose prefix another one is computing right now waits for it, when that saves time.

vLLM lets both compute it. The one that runs first is the leader; a follower is held back alone, not those behind it in
the queue, and goes on as soon as the state is there, the leader is gone, or it has waited far longer than foreseen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from engine_patches.scheduler.step_time import StepTime

# What a follower saves has to outweigh the pass it waits for by this factor: step times scatter, and a follower that
# runs along costs nobody a pass.
MARGIN = 1.5

# Below this nobody feels it, and the second request of the next wave hits anyway.
FELT_SECONDS = 0.2

# A follower waits this much longer than foreseen before it goes on alone, and as long again where the leader has done
# half of what was missing: it is slow, not stuck, and who left now would do all of it again.
PATIENCE = 3.0

MIN_PATIENCE_SECONDS = 1.0

# Leaders that leave one after the other are not waited for for ever.
MAX_LEADERS = 4

# Nobody waits for so long after a state has found no room in the cache.
SHUT_SECONDS = 5.0


@dataclass
class Expected:
    """A state that a running request is going to write."""

    leader: Any
    position: int
    start: int  # tokens that the leader itself found in the cache


@dataclass
class Wait:
    """A request that is held back. Times by the gate's clock, in seconds."""

    since: float
    until: float
    leader: str  # id
    missing: int  # tokens that the leader had to compute when `until` was set
    leaders: int = 1  # waited for so far


class PrefillGate:
    """Knows what running requests will write, and who waits for it. One per scheduler."""

    def __init__(self, pace: StepTime, match_unit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace, self._unit, self._clock = pace, match_unit, clock
        self._expected: dict[bytes, Expected] = {}  # by the hash of the prefix
        self._positions: list[int] | None = []  # of all expected, deepest first; None: to be sorted
        self._shut_until = 0.0
        self.waiting: dict[str, Wait] = {}

    def will_write(self, request: Any, start: int, positions: Iterable[int]) -> None:
        """`request` is about to run from token `start` and to write states at `positions`."""
        for position in positions:
            key = request.block_hashes[position // self._unit - 1]
            known = self._expected.get(key)
            if position > start and (known is None or not _is_coming(known)):
                self._expected[key] = Expected(request, position, start)
                self._positions = None

    def forget_gone(self, requests: Container[str]) -> None:
        """Drop what has been written or will never be, and who waits no more; `requests` are alive."""
        for key in [key for key, known in self._expected.items() if not _is_coming(known)]:
            del self._expected[key]
            self._positions = None
        for name in [name for name in self.waiting if name not in requests]:
            del self.waiting[name]

    def clear(self) -> None:
        """Nothing is coming."""
        self._expected.clear()
        self._positions = []

    def room_is_short(self) -> None:
        """A state found no room: whoever waits for one would wait in vain."""
        self._shut_until = self._clock() + SHUT_SECONDS

    def deepest_coming(self, request: Any) -> Expected | None:
        """The deepest state on a waiting request's way that a running one is going to write."""
        if self._positions is None:
            self._positions = sorted({known.position for known in self._expected.values()}, reverse=True)
        for position in self._positions:
            if position < request.num_tokens:
                known = self._expected.get(request.block_hashes[position // self._unit - 1])
                if known is not None and known.leader is not request and _is_coming(known):
                    return known
        return None

    def pays(self, coming: Expected) -> bool:
        """Whether a follower saves clearly more than the pass that it waits for."""
        saved_tokens = coming.position - coming.start
        felt = not self._pace.known or self._pace.seconds(saved_tokens) >= FELT_SECONDS
        return felt and saved_tokens >= MARGIN * self._pace.tokens_per_pass

    def holds(self, request: Any, coming: Expected) -> bool:
        """Hold `request` back for what is coming; False once it has waited too long."""
        now = self._clock()
        missing = coming.position - coming.leader.num_computed_tokens
        wait = self.waiting.get(request.request_id)
        if now < self._shut_until:
            return False
        leader = coming.leader.request_id
        if wait is not None and wait.leader == leader:
            if now < wait.until:
                return True
            if missing > wait.missing / 2:
                return False
        leaders = 1 if wait is None else wait.leaders + (wait.leader != leader)
        if leaders > MAX_LEADERS:
            return False
        until = now + max(PATIENCE * self._pace.seconds(missing, num_passes=1), MIN_PATIENCE_SECONDS)
        since = now if wait is None else wait.since
        self.waiting[request.request_id] = Wait(since, until, leader, missing, leaders)
        return True

    def release(self, request: Any) -> float | None:
        """`request` waits no longer; seconds it was held, None if it was not."""
        wait = self.waiting.pop(request.request_id, None)
        return None if wait is None else self._clock() - wait.since


def _is_coming(known: Expected) -> bool:
    leader = known.leader
    return leader.status == RequestStatus.RUNNING and leader.num_computed_tokens < known.position


def hold_followers(original: Callable) -> Callable:
    """Replacement of `Scheduler._handle_blocked_waiting_request`: False keeps one request waiting, and only that."""

    def _handle_blocked_waiting_request(self, request):
        if not original(self, request):
            return False
        checkpoints = self.seamark
        gate = checkpoints.gate
        if gate is None or request.status != RequestStatus.WAITING or request.num_computed_tokens:
            return True
        coming = None if request.skip_reading_prefix_cache else gate.deepest_coming(request)
        # Who has given up on a leader goes as soon as it can be placed, even if that is not in this step.
        if coming is not None and getattr(request, "seamark_gave_up", None) != coming.leader.request_id:
            if request.request_id not in gate.waiting and not gate.pays(coming):
                checkpoints.follower_not_held(request)
            elif gate.holds(request, coming):
                return False
            else:
                request.seamark_gave_up = coming.leader.request_id
        held = gate.release(request)
        if held is not None:
            checkpoints.follower_released(held)
        return True

    return _handle_blocked_waiting_request
