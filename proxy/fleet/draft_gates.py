"""Workers whose drafts are on trial: each gets its turn, is told the verdict, and is believed when its feed shows it.

Clients are served meanwhile, without hints. Which engine process was tried is told by its id, so that nothing survives
its restart, and two gateways before one worker find what the other one has decided.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter

from proxy.fleet.answer_compare import Noise, Unanswered
from proxy.fleet.draft_acceptance import LiveAcceptance
from proxy.fleet.draft_prompts import TrialPrompt
from proxy.fleet.draft_reports import DraftFeed
from proxy.fleet.draft_trial import DraftTrial, TrialVerdict, worse
from proxy.fleet.worker import CLOSED, ON, OPEN, TRIAL, Worker
from proxy.fleet.worker_metrics import Accepted
from proxy.http.client import Broken, Unreachable, Upstream

logger = logging.getLogger("seamark.drafts")

# A worker that is never idle is tried beside its clients from then on, one request at a time and in at most a tenth of
# the time: for each second of it there are so many of rest.
OVERDUE_SECONDS, REST_BESIDE = 600.0, 9.0

# After a prompt that could not be judged, doubled with each further one.
AGAIN_SECONDS, MOST_AGAIN_SECONDS = 2.0, 300.0

# Trials of one boot in which too few prompts are found in the cache, as where clients evict them at once.
ATTEMPTS, REST_OF_ATTEMPT = 3, 60.0

LOOKS_AFTER_DOUBT = 100_000  # steps of each kind before clients' requests are looked at once more

STANDS_BACK_SECONDS = 5.0  # until one that lets another gateway try looks again

FAILED = (Unanswered, Unreachable, Broken, ValueError, ExceptionGroup)

Clients = Callable[[], Awaitable[Sequence[TrialPrompt]]]


@dataclass
class _Phase:
    """What is known of one worker here."""

    boot: str
    since: float  # time.monotonic() when it was first seen
    feed: DraftFeed
    noise: Noise = field(default_factory=Noise)
    live: LiveAcceptance = field(default_factory=LiveAcceptance)
    trial: DraftTrial | None = None
    tried: str = ""  # id of the engine process that `trial` tries
    pending: TrialVerdict | None = None  # come to, and not believed yet
    again: bool = False  # an operator wants a closed one tried again
    doubt: str = ""  # what clients' requests have shown of an open one, which is tried again for that
    attempts: int = 0
    failed: int = 0  # steps in a row
    next_at: float = 0.0  # time.monotonic()
    said_beside: bool = False


class DraftGates:
    """Of all workers of a gateway."""

    def __init__(
        self,
        upstream: Upstream,
        results: Counter,
        timeout: float,
        opened: Callable[[Worker], Awaitable[None]] | None = None,
        own: str = "",
    ) -> None:
        """`opened` is awaited once hints are in use. `own`: who tries, a word that sorts behind others' to let them."""
        self._upstream = upstream
        self._results = results
        self._timeout = timeout
        self._opened = opened
        self._own = own or os.urandom(6).hex()
        self._phases: dict[str, _Phase] = {}

    def forget(self, worker: Worker) -> None:
        """It was removed."""
        self._phases.pop(worker.url, None)

    def wants(self, worker: Worker) -> bool:
        """Whether something is to be asked of it, or told to it, and it is time."""
        if not worker.up or worker.engine is None or not worker.draft_state:
            return False
        phase = self._phase(worker)
        wanted = phase.pending is not None or worker.draft_state == TRIAL or phase.again or bool(phase.doubt)
        return wanted and time.monotonic() >= phase.next_at

    def is_overdue(self, worker: Worker) -> bool:
        """Whether it has to be tried beside its clients."""
        phase = self._phase(worker)
        return phase.pending is not None or time.monotonic() - phase.since >= OVERDUE_SECONDS

    def noise(self, worker: Worker) -> Noise:
        """Of its engine."""
        return self._phase(worker).noise

    def reset(self, worker: Worker) -> None:
        """An operator has seen to it: if hints are closed, it is tried again."""
        if worker.draft_state == CLOSED:
            phase = self._phase(worker)
            phase.again, phase.trial, phase.attempts, phase.next_at = True, None, 0, 0.0
            phase.live, phase.since = LiveAcceptance(), time.monotonic()

    def close(self, worker: Worker, verdict: TrialVerdict) -> None:
        """Hints have turned out to be wrong, or slow, beside the drafts of a worker where they are in use."""
        phase = self._phase(worker)
        if worker.draft_state == OPEN and phase.pending is None:
            phase.pending = verdict
        elif worker.draft_state == ON:
            self._results.labels(verdict.result).inc()
            logger.error("worker %s: %s; SEAMARK_DRAFTS=1 keeps hints on there", worker.name, verdict.why)

    def count(self, worker: Worker, drafted: Accepted, is_hit: bool) -> None:
        """A client's request has finished, with so many drafts.

        Hits may be another kind of work than the rest. So what clients' requests show closes nothing: the worker is
        tried again, on the same prompts with and without a hit.
        """
        if worker.draft_state not in (OPEN, ON):
            return
        phase = self._phase(worker)
        live = phase.live
        if not live.add(drafted, is_hit=is_hit):
            return
        phase.live = LiveAcceptance()
        finding = worse(live.hit.per_step, live.cold.per_step, "in clients' requests")
        if worker.draft_state == ON:
            self.close(worker, finding)
        elif not phase.doubt:
            phase.doubt, phase.trial, phase.since = finding.why, None, time.monotonic()
            logger.info("worker %s: %s; its drafts are tried again", worker.name, finding.why)

    def words(self, worker: Worker) -> str:
        """How far its trial is, for people; empty if it has none."""
        phase = self._phases.get(worker.url)
        if phase is None or worker.draft_state not in (TRIAL, CLOSED) or phase.trial is None:
            return ""
        return phase.trial.figures

    async def step(self, worker: Worker, clients: Clients, *, beside: bool = False) -> None:
        """One prompt of a trial, or what has to be told. `beside` clients: one request at a time."""
        phase, began = self._phase(worker), time.monotonic()
        try:
            await self._step(worker, phase, clients, beside=beside)
            phase.failed = 0
        except FAILED as error:
            phase.failed += 1
            phase.next_at = time.monotonic() + min(AGAIN_SECONDS * 2 ** min(phase.failed, 16), MOST_AGAIN_SECONDS)
            logger.info("worker %s: a trial prompt was not judged (%s)", worker.name, _kind(error))
        if beside:
            phase.next_at = max(phase.next_at, time.monotonic() + REST_BESIDE * (time.monotonic() - began))

    async def _step(self, worker: Worker, phase: _Phase, clients: Clients, *, beside: bool) -> None:
        await phase.feed.read()
        gate = worker.draft_gate = phase.feed.gate
        if gate is None:
            raise ValueError("its feed names no gate")
        wanted = gate.state == TRIAL or (phase.again and gate.state == CLOSED) or (phase.doubt and gate.state == OPEN)
        if phase.pending is None and not wanted:
            phase.again, phase.doubt = False, ""  # somebody else has decided, or the engine has no trial
            return
        if phase.trial is None or phase.tried != gate.id:
            if phase.tried not in ("", gate.id):
                # Another process: what was known is of no use.
                phase.pending, phase.live, phase.doubt = None, LiveAcceptance(), ""
                phase.noise.clear()
            phase.trial = DraftTrial(self._upstream, worker, phase.feed, self._own, phase.noise, self._timeout)
            phase.tried = gate.id
            if phase.pending is None and not phase.doubt:
                logger.info("worker %s drafts: hints are on trial, and off until it is over", worker.name)
        if phase.pending is None:
            if phase.feed.stands_back(self._own):
                phase.next_at = time.monotonic() + STANDS_BACK_SECONDS
                return
            if beside and not phase.said_beside:
                phase.said_beside = True
                logger.warning(
                    "worker %s is never idle: its drafts are tried beside clients, one request at a time, in at most "
                    "a tenth of the time",
                    worker.name,
                )
            verdict = await phase.trial.step(await clients(), beside=beside)
            if verdict is None:
                return
            if phase.doubt and verdict.result in ("open", "no_hits"):
                logger.info("worker %s: the same prompts do not show it: %s", worker.name, verdict.figures)
                phase.doubt, phase.live = "", LiveAcceptance(LOOKS_AFTER_DOUBT)
                return
            if verdict.result == "no_hits" and phase.attempts + 1 < ATTEMPTS:
                phase.attempts += 1
                phase.trial, phase.next_at = None, time.monotonic() + REST_OF_ATTEMPT * phase.attempts
                logger.info("worker %s: %s; tried again later (%s)", worker.name, verdict.why, verdict.figures)
                return
            phase.pending = verdict
        await self._tell(worker, phase, phase.trial, phase.pending)

    async def _tell(self, worker: Worker, phase: _Phase, trial: DraftTrial, verdict: TrialVerdict) -> None:
        was_again = phase.again
        believed = await trial.send(verdict)
        worker.draft_gate = phase.feed.gate
        if not believed:
            raise ValueError("its feed does not show the verdict")
        phase.pending, phase.again, phase.doubt = None, False, ""
        if verdict.result != "open":
            self._results.labels(verdict.result).inc()
            logger.error(
                "worker %s: hints are off beside drafts until it restarts: %s (%s). POST /seamark/self-check/reset "
                "tries again; --speculative-config left out, or SEAMARK_DRAFTS=1, gives hints",
                worker.name,
                verdict.why,
                verdict.figures or "after it was opened",
            )
            return
        took = time.monotonic() - trial.began
        again = ", tried again," if was_again else ""
        logger.info(
            "worker %s: hints are on beside drafts%s after %.0f s: %s", worker.name, again, took, verdict.figures
        )
        if self._opened is not None:
            await self._opened(worker)

    def _phase(self, worker: Worker) -> _Phase:
        phase = self._phases.get(worker.url)
        if phase is None or phase.boot != worker.boot:
            feed = DraftFeed(self._upstream, worker, self._own)
            phase = self._phases[worker.url] = _Phase(worker.boot, time.monotonic(), feed)
        return phase


def _kind(error: BaseException) -> str:
    """The kind of an error, for logs: the message might hold prompt text."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if isinstance(error, Unanswered) else type(error).__name__
