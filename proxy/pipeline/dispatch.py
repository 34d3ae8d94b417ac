"""Giving a request to a worker: a place at one, the choice among those that have some, and what is noted of it.

Everything between finding a place and counting it happens without an await, so a burst sees itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from proxy.fleet.pool import WorkerPool
from proxy.fleet.warmup import WarmupRequest, WarmupSet
from proxy.fleet.worker import Worker
from proxy.http.client import Upstream
from proxy.metrics import Metrics
from proxy.observability.reasons import Expectation
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.request import ProxiedRequest
from proxy.routing.engine_events import EngineEvents
from proxy.routing.policy import choose
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.queue import AdmissionQueue
from proxy.settings import Settings


class Dispatcher:
    """One per gateway."""

    def __init__(
        self,
        settings: Settings,
        pool: WorkerPool,
        finding: PromptReader,
        admission: AdmissionQueue,
        upstream: Upstream,
        metrics: Metrics,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._finding = finding
        self._admission = admission
        self.directory = PrefixIndex(settings.memory_bytes * 3 // 8, metrics.directory_evictions)
        self.words = EngineEvents(upstream, self.directory)
        self.hot = WarmupSet(settings.text_bytes // 8)
        pool.changed = admission.wake

    async def place(self, call: ProxiedRequest) -> None:
        """Give the call to a worker, which is counted from now on; waits while none has room.

        Raises `NoWorker`, `Overloaded` or `KeyBusy`.
        """
        if not self._pool.up:
            await self._pool.ready()
        model = call.body.get("model")
        wants = (model if isinstance(model, str) else None, self._finding.stored.boot(call.response_id))
        await self._admission.place(call.key, wants, lambda: self._take(call), lambda _: self.never_got(call))

    def leave(self, call: ProxiedRequest) -> None:
        """The worker is done with the call, or never got it."""
        if not call.is_placed:
            return
        call.is_placed = False
        self.prefilled(call)
        call.worker.inflight -= 1
        if call.key is not None:
            call.key.inflight -= 1
        if len(self._admission):
            self._admission.wake()

    def never_got(self, call: ProxiedRequest) -> None:
        """The worker was not there: nothing of the call is."""
        if call.expected is not None:
            self.words.refused(call.worker, call.engine_id)
        self.leave(call)

    def prefilled(self, call: ProxiedRequest) -> None:
        """The answer has begun: its prompt is computed."""
        if call.prefill:
            call.worker.prefill_tokens -= call.prefill
            call.prefill = 0

    def hint(self, call: ProxiedRequest) -> tuple[int, ...]:
        """Positions for the chosen worker."""
        budget = self._settings.boundary_budget
        return call.worker.hint(call.found.boundaries, budget) if call.found is not None else ()

    def _take(self, call: ProxiedRequest) -> Worker | None:
        """A place at a worker, None where those that could serve the call are full."""
        if call.key is not None and not call.key.has_room:
            return None
        workers = self._pool.for_model(call.body.get("model"))
        if (keeper := self._keeper(call, workers)) is not None:
            workers = [keeper]
        roomy = [worker for worker in workers if worker.has_room]
        if not roomy:
            return None
        worker = self._choose(call, roomy)
        call.worker, call.is_placed = worker, True
        call.prefill = call.tokens_beyond(call.expected.predicted if call.expected is not None else 0)
        worker.prefill_tokens += call.prefill
        call.alone = not worker.inflight
        worker.inflight += 1
        worker.dispatched += 1
        call.turn, call.placed = worker.dispatched, time.perf_counter()
        if call.key is not None:
            call.key.inflight += 1
        return worker

    def _choose(self, call: ProxiedRequest, workers: Sequence[Worker]) -> Worker:
        """Choose and note it in one go, so that a request arriving right behind already follows."""
        found = call.found
        if found is None:
            return choose(workers, {}, self._settings.load_slack)
        # Of all that could hold it: one that is full, or not ready yet, has not lost it.
        boots = [worker.boot for worker in self._pool.serving(call.body.get("model")) if worker.takes_hints]
        held = self.directory.longest(found.prefixes, boots)
        together = call.body.get("prompt_cache_key")
        worker = choose(workers, held, self._settings.load_slack, together)
        shared = max(held.values(), default=None)
        # Sent again, elsewhere: the first try is not what was ever sent before.
        ever = self.directory.ever_sent(found.prefixes) if call.expected is None else call.expected.shareable_ever
        call.expected = Expectation(
            failure=_failure(worker) or found.failure,
            shareable=self.directory.sent(found.prefixes, boots),
            shareable_ever=ever,
            held=shared.tokens if shared is not None else 0,
            predicted=held[worker.boot].tokens if worker.boot in held else 0,
            deepest=max(found.positions, default=0),
            match_unit=worker.engine.match_unit if worker.engine is not None else 1,
            would_share=max((b.tokens for b in found.boundaries if b.key != found.turn_key), default=0),
        )
        if worker.takes_hints:
            self.words.sent(worker, call.engine_id, found.boundaries)
            self.directory.note(found.boundaries, worker.boot)
            if shared is not None:
                self._remember(call, shared.key, shared.tokens)
        return worker

    def _remember(self, call: ProxiedRequest, key: bytes, tokens: int) -> None:
        """The call shares a prefix: what a restarted worker is to be given again."""
        if not call.found.boundaries or self.hot.used_again(key):
            return
        replay = WarmupRequest(
            call.endpoint,
            call.raw,
            call.names,
            {name: value for name, value in call.put.items() if name == "cache_salt"},
            call.found.boundaries,
            call.body.get("model"),
        )
        prefixes = call.found.prefixes
        shorter = prefixes[: prefixes.index(key)] if key in prefixes else ()
        self.hot.add(key, tokens, shorter, replay)

    def _keeper(self, call: ProxiedRequest, workers: Sequence[Worker]) -> Worker | None:
        """The worker that stores the response which this request continues or asks for; others would not know it."""
        if (response := call.response_id) is None:
            return None
        boot = self._finding.stored.boot(response)
        return next((worker for worker in workers if worker.boot == boot), None)


def _failure(worker: Worker) -> str | None:
    """Why a worker gets no hint whatever the request; None where it gets one."""
    if worker.engine is None:
        return "unpatched"
    return None if worker.cache.hints_allowed else "hint_ignored"
