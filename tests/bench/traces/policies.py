"""Ways to choose a worker, side by side: Seamark's own code, and what other routers publish, simulated.

Each takes requests one by one, and hears what engines tell as soon as a gateway would.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from proxy.boundaries.boundary import Boundary, Found
from proxy.fleet.probe import Probed
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import EngineInfo, WorkerMetrics
from proxy.routing.feed_lines import Came, Gone
from proxy.routing.held_states import HeldStates
from proxy.routing.policy import choose
from proxy.routing.prefix_index import PrefixIndex
from proxy.settings import Settings
from proxy.version import version
from tests.bench.traces.formats import BLOCK, TraceRequest
from tests.bench.traces.simulated_fleet import MATCH_UNIT, Execution, News, Policy

INDEX_BYTES = 48 * 2**20  # the share of the default `memory_bytes` that the gateway gives its index

# Defaults of smg's cache_aware: --cache-threshold, --balance-abs-threshold, --balance-rel-threshold.
CACHE_THRESHOLD, MOST_APART, MOST_RATIO = 0.3, 64, 1.5

LEAST_APART = 4  # requests above the mean from which on smg may spill


class Simulated(Policy):
    """What the simulated policies have in common: requests under way by worker, and a draw among equals."""

    def __init__(self, workers: int, seed: int) -> None:
        self.workers = range(workers)
        self.inflight = [0] * workers
        self._drawn = random.Random(seed)  # a simulation

    def choose(self, execution: Execution) -> int:
        worker = self.pick(execution.request)
        self.inflight[worker] += 1
        return worker

    def pick(self, request: TraceRequest) -> int:
        raise NotImplementedError

    def least(self, loads: Sequence[int], workers: Iterable[int]) -> int:
        """The least loaded of these workers, drawn among equals."""
        lowest = min(loads[worker] for worker in workers)
        return self._drawn.choice([worker for worker in workers if loads[worker] == lowest])

    def ended(self, execution: Execution) -> None:
        self.inflight[execution.worker] -= 1


class RoundRobin(Simulated):
    """Each in turn."""

    _next = -1

    def pick(self, request: TraceRequest) -> int:
        self._next = (self._next + 1) % len(self.workers)
        return self._next


class SessionAffinity(Simulated):
    """A session stays where it began: at the worker that then had the fewest sessions."""

    def __init__(self, workers: int, seed: int) -> None:
        super().__init__(workers, seed)
        self._sessions: dict[int, int] = {}
        self._counts = [0] * workers

    def pick(self, request: TraceRequest) -> int:
        if request.session not in self._sessions:
            worker = self._sessions[request.session] = self.least(self._counts, self.workers)
            self._counts[worker] += 1
        return self._sessions[request.session]


class Smg(Simulated):
    """smg's cache_aware (1.13, model_gateway/src/policies/cache_aware.rs; its margin as `smg launch --help` has it).

    Of those that were sent the longest beginning, if that is a good part of the prompt, the idlest whose load does not
    exceed the fleet's mean by too much: by half of it, and by two of its standard deviations, at least 4 and at most 64
    requests. Engines that report no load are compared by requests.
    """

    def __init__(self, workers: int, seed: int) -> None:
        super().__init__(workers, seed)
        self._sent: dict[int, set[int]] = {}  # by block, the workers that were sent it

    def pick(self, request: TraceRequest) -> int:
        """The idlest that is not beyond the mean, wherever if all that were found are."""
        found: set[int] = set()
        for at in range(len(request.blocks), 0, -1):
            if sent := self._sent.get(request.blocks[at - 1]):
                found = sent if at * BLOCK / request.prompt > CACHE_THRESHOLD else set()
                break
        mean = sum(self.inflight) / len(self.inflight)
        margin = min(MOST_APART, max(LEAST_APART, math.ceil(2 * math.sqrt(mean))))
        most = max(mean * MOST_RATIO, mean + margin)
        kept = [worker for worker in found if self.inflight[worker] <= most]
        worker = self.least(self.inflight, kept or self.workers)
        for block in request.blocks:
            self._sent.setdefault(block, set()).add(worker)
        return worker


@dataclass(slots=True)
class _Sent:
    """A request under way."""

    worker: Worker
    found: Found
    prompt: int  # tokens
    left: int  # of them, that count as still to be computed


class Seamark(Policy):
    """The gateway's own choice, index and record of states. Requests are counted at their workers as its leases do."""

    def __init__(self, workers: int, seed: int) -> None:
        del seed  # nothing is drawn
        engine = EngineInfo(version(), "simulated", MATCH_UNIT, BLOCK)
        # Each boots as the number by which the fleet knows it.
        found = [Probed(boot=str(at), metrics=WorkerMetrics(engine=engine)) for at in range(workers)]
        self.workers = [Worker(f"http://worker-{each.boot}", None, probed=each) for each in found]
        for worker in self.workers:
            worker.renderer_ids[""] = b""  # one template, whose facts are known
        self.index = PrefixIndex(INDEX_BYTES)
        self._load_slack = Settings().load_slack
        self._boots = {worker.boot for worker in self.workers}
        self._states = [HeldStates(self.index, lambda *_: None, self._computed) for _ in self.workers]
        self._sent: dict[str, _Sent] = {}  # by what engines call the request

    def choose(self, execution: Execution) -> int:
        """Where the gateway sends it: counted there, and recorded."""
        trace = execution.request
        boundaries = tuple(
            Boundary(place.kind, _key(place.name), place.tokens, place.tokens, place.tokens)
            for place in trace.boundaries
            if place in execution.hint
        )
        found = Found(boundaries, tuple(_key(place.name) for place in trace.path), "learnt")
        held = self.index.longest(found.prefixes, self._boots)
        worker = choose(self.workers, held, self._load_slack, shared=found.shared)
        hint, number = worker.hint(found), int(worker.boot)
        self._states[number].sent(execution.name, boundaries, hint, worker.boot)
        self.index.record(boundaries, worker.boot, hint)
        left = max(0, trace.prompt - held[worker.boot].tokens) if worker.boot in held else trace.prompt
        self._sent[execution.name] = _Sent(worker, found, trace.prompt, left)
        worker.inflight += 1
        worker.dispatched += 1
        worker.prefill_tokens += left
        return number

    def hear(self, news: News) -> None:
        """A state is there, or gone."""
        kept = [(place.tokens, str(place.name)) for place in news.kept]
        event = Came(news.request.name, news.end, kept) if news.request else Gone(str(news.gone))
        self._states[news.worker].apply(event, self.workers[news.worker].boot)

    def first_token(self, execution: Execution) -> None:
        self._charge(self._sent[execution.name], 0)

    def ended(self, execution: Execution) -> None:
        """The answer is complete: the slot is free, and what was not found there is not there."""
        sent = self._sent.pop(execution.name)
        keys = {boundary.key for boundary in sent.found.boundaries}
        states = self._states[execution.worker]
        states.fell_short(sent.found.prefixes, keys, execution.hit, MATCH_UNIT, sent.worker.boot)
        self._charge(sent, 0)
        sent.worker.inflight -= 1

    def _computed(self, name: str, tokens: int, is_last: bool) -> None:
        """An engine has computed so many tokens of a prompt; `is_last`: all of its boundaries, so all of the prompt."""
        if (sent := self._sent.get(name)) is not None:
            self._charge(sent, 0 if is_last else min(sent.left, max(0, sent.prompt - tokens)))

    def _charge(self, sent: _Sent, left: int) -> None:
        sent.worker.prefill_tokens += left - sent.left
        sent.left = left


def _key(name: int) -> bytes:
    return name.to_bytes(16, "little")


POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "seamark": Seamark,
    "round-robin": RoundRobin,
    "session": SessionAffinity,
    "smg": Smg,
}
