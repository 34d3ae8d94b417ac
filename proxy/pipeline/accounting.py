"""The one step after an answer: what came is compared with what was expected, counted and explained.

Shadow mode and the stored responses learn of the answer here, too. But for what the next request builds on, and the
reason that a whole answer tells, all of it is work beside requests (`proxy.idle_work`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from proxy.boundaries.boundary import Found, resolved_positions
from proxy.chat.chat import RESPONSES, flag
from proxy.chat.usage import Usage
from proxy.fleet.part import Change, Part
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.idle_work import IdleWork, Steps, beside, within
from proxy.metrics import Metrics
from proxy.observability.explanations import Explanation, Explanations, Record, client_name
from proxy.observability.reasons import Delivery, Expectation, cache_label, reason_for
from proxy.observability.request_diff import PrefixChange
from proxy.observability.shadow import AnsweredRequest, Shadow
from proxy.observability.totals import KeyUsage, RollingSums, TimeSaved
from proxy.pipeline.exchange import CLIENT_GONE, Exchange, RequestOutcome
from proxy.pipeline.prompt_reader import PromptReader
from proxy.routing.engine_events import EngineEvents
from proxy.routing.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from proxy.observability.tracing import Tracing

logger = logging.getLogger("seamark.gateway")
NOT_FOUND = 404
MOST_PARTS = 8  # a change is sought if more than one in so many tokens of a prompt was computed
SEEK_SECONDS = 0.25  # that a whole answer waits for a change to be found; it is not worth more
FORGET_SECONDS = 1.0  # between two looks at workers that are gone
UNKNOWN_MODEL = "unknown"  # model names come from clients; only those that a worker serves become labels


@dataclass(eq=False)
class Accounting(Part):
    """Counts each request once."""

    name = "accounting"

    _metrics: Metrics
    _pool: WorkerPool
    _reader: PromptReader
    _prefix_index: PrefixIndex
    _engine_events: EngineEvents
    _shadow: Shadow
    _idle: IdleWork
    _excerpts: bool  # some characters of what changed may be kept for explanations
    _tracing: Tracing | None = None
    sums: RollingSums = field(default_factory=RollingSums)
    explanations: Explanations = field(default_factory=Explanations)
    _time: TimeSaved = field(default_factory=TimeSaved)
    _leaving: list[Worker] = field(default_factory=list)  # removed, with requests under way

    def __post_init__(self) -> None:
        self.key_usage = KeyUsage(self._metrics)
        self._boundary_seconds = self._metrics.overhead.labels("boundary")
        # Finding a family's member by its labels costs more than counting with it.
        self._counter = cache(self._member)

    def begin(self, exchange: Exchange) -> None:
        """A request has come with its body."""
        if self._tracing is not None:
            head = exchange.head
            exchange.trace = self._tracing.begin(head.method, head.endpoint, head.headers)

    def read(self, exchange: Exchange) -> None:
        """A request has been read: from now on it can be asked what becomes of it."""
        head, timings = exchange.head, exchange.timings
        exchange.record = self.explanations.begin(head.request_id, head.owner, partial(self._so_far, exchange))
        timings.reading_seconds = time.perf_counter() - timings.arrived
        self._boundary_seconds.observe(timings.reading_seconds)

    def opened(self, exchange: Exchange, answer: Any) -> None:
        """A worker's answer begins, the response `answer` (parsed): by its id it can be asked for from now on."""
        if exchange.worker is not None and _is_stored(exchange):
            self._reader.stored.put(None, answer, exchange.worker.boot, exchange.head.owner)

    def reported(self, exchange: Exchange, outcome: RequestOutcome, answer: Any = None) -> None:
        """Note what the next request builds on; `settle` does the rest. `answer`: parsed; a stream's last response."""
        exchange.outcome = outcome
        outcome.engine_id = _engine_id(exchange, answer)
        if exchange.worker is not None:
            if _is_stored(exchange):
                self._reader.stored.put(exchange.prompt.chat, answer, exchange.worker.boot, exchange.head.owner)
            if outcome.usage is not None:
                self._learn(exchange, outcome.usage.prompt)

    async def answered(self, exchange: Exchange, outcome: RequestOutcome, answer: Any = None) -> str | None:
        """The same of an answer that has not begun; its reason, if the worker reports. Goes on without the client."""
        self.reported(exchange, outcome, answer)
        if not self._count_outcome(exchange, outcome):
            return None
        steps = outcome.explaining = self._explain(exchange, outcome)
        await self._idle.finish(steps)
        outcome.explaining = None
        return outcome.reason

    def used(self, exchange: Exchange, usage: Usage | None) -> None:
        """An answer says what its request took: it counts for the key."""
        if usage is not None and (key := exchange.head.key) is not None:
            self.key_usage.tokens(key.name, usage)

    def settle(self, exchange: Exchange) -> None:
        """Have the request counted, however it ended, and explained if that is still to be done."""
        exchange.is_over = True
        status, worker = exchange.reply.status, exchange.worker
        if status >= 400 and worker is not None and exchange.expected is not None:
            events = self._engine_events
            (events.left if status == CLIENT_GONE else events.refused)(worker, exchange.engine_id)
        if exchange.trace is not None:
            exchange.trace.stop()
        self._idle.put_off()
        outcome = exchange.outcome
        if outcome is not None and (outcome.explaining is not None or not outcome.is_counted):
            self._idle.add(self._settle_later(exchange, outcome))
        else:
            self._count(exchange)
            self._tell(exchange)

    def _settle_later(self, exchange: Exchange, outcome: RequestOutcome) -> Steps[None]:
        self._count(exchange)
        yield
        if outcome.explaining is not None:  # its client has left meanwhile
            yield from outcome.explaining
        elif self._count_outcome(exchange, outcome):
            is_told_later = exchange.timings.is_stream and exchange.worker is not None and exchange.worker.engine
            if outcome.engine is None and is_told_later:
                beside(self._ask_engine(exchange, outcome))
                return
            yield from self._explain(exchange, outcome)
        self._tell(exchange)

    def _count(self, exchange: Exchange) -> None:
        worker, status, head = exchange.worker, exchange.reply.status, exchange.head
        model = exchange.model_label = self._model_label(exchange, status)
        name = worker.name if worker is not None else ""
        self._counter(self._metrics.requests, model, name, head.endpoint, str(status)).inc()
        if head.key is not None:
            self.key_usage.request(head.key.name)
        if worker is not None and exchange.timings.reading_seconds:
            self._spend(model, worker, exchange.timings.reading_seconds)

    def _tell(self, exchange: Exchange) -> None:
        """All is known of it."""
        if exchange.record is not None:
            exchange.record.settle()
        if exchange.trace is not None:
            worker = exchange.worker.name if exchange.worker is not None else None
            explanation = exchange.record.explanation if exchange.record is not None else None
            model = exchange.model_label or UNKNOWN_MODEL
            exchange.trace.end(exchange.reply.status, model, worker, exchange.timings.stages(), explanation)

    def _member(self, family: Any, *labels: str) -> Any:
        """Of one counted by model and worker, with those of all others: alerts compare them, and see 0, not nothing."""
        for each in self._metrics.by_worker if family in self._metrics.by_worker else ():
            each.labels(*labels)
        return family.labels(*labels)

    def _so_far(self, exchange: Exchange, record: Record) -> Explanation:
        head, prompt, worker, outcome = exchange.head, exchange.prompt, exchange.worker, exchange.outcome
        found = prompt.found or Found()
        status = exchange.reply.status if exchange.is_over else None
        explanation = Explanation(
            head.request_id,
            head.endpoint,
            owner=head.owner,
            began=record.began,
            status=status,
            model=exchange.model_label,
            worker=worker.name if status is not None and worker is not None else None,
            lookup=found.result,
            boundaries=tuple([(boundary.entry, boundary.kind) for boundary in found.boundaries]),
            rewrites=prompt.rewrites,
            client=client_name(head.user_agent),
            missing=self._missing(exchange) if status == NOT_FOUND else None,
        )
        # What came of it is there only once it is judged.
        if outcome is None or outcome.reason is None or outcome.usage is None or exchange.expected is None:
            return explanation
        change = outcome.change
        return explanation._replace(
            sent=exchange.body.hint,
            positions=outcome.engine.positions if outcome.engine is not None else (),
            shareable=outcome.shareable,
            predicted=exchange.expected.found(exchange.expected.predicted),
            prompt=outcome.usage.prompt,
            delivered=outcome.usage.cached,
            reason=outcome.reason,
            changed=change.as_json(self._excerpts) if change is not None else None,
            would_save={change.kind: change.lost} if change is not None and change.kind is not None else {},
        )

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """The figures of a removed worker go once it has answered its last request."""
        if change is Change.REMOVED:
            self._leaving.append(worker)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            await self._idle.lull()
            self.forget_gone()

    def forget_gone(self) -> None:
        """Of workers that are gone and have answered their last request."""
        present = {worker.name for worker in self._pool.workers}
        for worker in [worker for worker in self._leaving if not worker.inflight]:
            self._leaving.remove(worker)
            if worker.name not in present:
                self._counter.cache_clear()
                self._time.forget(worker.name)
                self._metrics.forget_worker(worker.name)

    def time_saved(self) -> TimeSaved:
        """Seconds saved and spent since the start, at what is known of the workers' pace by now."""
        for worker in self._pool.workers:
            self._price(worker)
        return self._time

    def replayed(self, model: str, worker: Worker, usage: Usage | None) -> None:
        """A prefix was computed again on a restarted worker: count its cost at the worker's step times."""
        if usage is not None:
            seconds = worker.step_times.seconds(usage.prompt - (usage.cached or 0), passes=1)
            self._spend(model, worker, seconds)

    def _price(self, worker: Worker) -> None:
        for model, seconds in self._time.settle(worker.name, worker.step_times).items():
            self._counter(self._metrics.seconds_saved, model, worker.name).inc(seconds)

    def _spend(self, model: str, worker: Worker, seconds: float) -> None:
        self._time.spent += seconds
        self._counter(self._metrics.seconds_spent, model, worker.name).inc(seconds)

    def _count_outcome(self, exchange: Exchange, outcome: RequestOutcome) -> bool:
        """Count what was reported; whether that can be explained."""
        outcome.is_counted = True
        worker, usage, expected = exchange.worker, outcome.usage, exchange.expected
        if worker is None:
            return False
        status = exchange.reply.failure or outcome.status
        model = outcome.model = self._model_label(exchange, status)
        if worker.engine is None and status == 200:
            self._shadow.add(_for_shadow(exchange, worker, model, usage))
        if usage is None:
            return False
        self.used(exchange, usage)
        metrics, labels = self._metrics, (model, worker.name)
        self._counter(metrics.prompt_tokens, *labels).inc(usage.prompt)
        if usage.cached is not None:
            self._counter(metrics.cached_tokens, *labels).inc(usage.cached)
            blocks = worker.engine.block_size if worker.engine is not None else 1
            self._time.reused(worker.name, model, usage.cached, blocks)
            self._price(worker)
        if expected is None:
            return False
        self._counter(metrics.predicted_tokens, *labels).inc(expected.found(expected.predicted))
        if usage.cached is None:
            shareable = Delivery.of(expected, usage.prompt, 0).shareable
            self._counter(metrics.shareable_tokens, *labels).inc(shareable)
        return usage.cached is not None

    def _learn(self, exchange: Exchange, prompt: int) -> None:
        """The tokens of the prompt tell where its last turn ends, and what a byte of a body weighs."""
        found = exchange.prompt.found
        if exchange.response_id is None:  # a continued response has most of its prompt elsewhere
            self._reader.learn_tokens_per_byte(exchange.model, len(exchange.body.raw), prompt)
        if (remembered := exchange.prompt.remembered) is not None:
            remembered.prompt = prompt
        if found is not None and found.end and found.turn_key is not None and found.end < prompt:
            self._reader.told(found.turn_key, prompt - found.end)
            self._prefix_index.set_length(found.turn_key, prompt - found.end)

    async def _ask_engine(self, exchange: Exchange, outcome: RequestOutcome) -> None:
        """Explain a stream once its engine has been asked."""
        try:
            if exchange.worker is not None:
                outcome.engine = await self._engine_events.outcome_of(exchange.worker, outcome.engine_id)
        except Exception as error:  # the message might hold prompt text
            logger.error("asking for request %s: %s", exchange.head.request_id, type(error).__name__)
        await self._idle.lull()
        await self._idle.finish(self._explain(exchange, outcome))
        self._tell(exchange)

    def _explain(self, exchange: Exchange, outcome: RequestOutcome) -> Steps[None]:
        """An answer is not lost for its explanation: a failure gives no reason."""
        try:
            yield from self._judge(exchange, outcome)
        except Exception as error:  # the message might hold prompt text
            logger.error("explaining request %s: %s", exchange.head.request_id, type(error).__name__)

    def _judge(self, exchange: Exchange, outcome: RequestOutcome) -> Steps[None]:
        worker, expected, usage = exchange.worker, exchange.expected, outcome.usage
        if worker is None or expected is None or usage is None or usage.cached is None:
            return
        prompt, cached = usage.prompt, usage.cached
        metrics, timings, engine, model = self._metrics, exchange.timings, outcome.engine, outcome.model
        found = exchange.prompt.found or Found()
        positions = resolved_positions(exchange.body.hint, engine.positions if engine is not None else ())
        for boundary in found.boundaries:  # an engine whose feed cannot be followed says so here alone
            tokens = positions.get(boundary.entry, 0) if boundary.entry is not None else 0
            if 0 < tokens <= prompt:
                self._reader.told(boundary.key, tokens)
                self._prefix_index.set_length(boundary.key, tokens)
        # What came, beside what could have come: the engine's word where there is one.
        ends = [positions.get(b.entry, 0) if b.entry is not None else b.tokens for b in found.boundaries]
        shared, told = (engine.shared, engine.reason) if engine is not None else (None, None)
        delivery = Delivery.of(expected, prompt, cached, shared, deepest=max(ends, default=0), engine=told)
        change = yield from self._change(exchange, expected, delivery)
        if change is not None:
            delivery = delivery._replace(unchanged=change.token + change.lost)
        reason = reason_for(expected, delivery, change)
        labels = (model, worker.name)
        self._counter(metrics.shareable_tokens, *labels).inc(delivery.shareable)
        self._counter(metrics.shared_tokens, *labels).inc(min(delivery.shareable, cached))
        lost = change.lost if change is not None and not change.is_salt else 0
        self.sums.add(prompt, delivery.shareable, cached, lost)
        if cached < expected.found(expected.predicted) and reason != "hint_ignored":
            # It leaves behind what it computed, unless that was not worth it; what it did not find otherwise is gone.
            left = [boundary.key for boundary in found.boundaries] if reason != "not_worth_it" else []
            self._engine_events.fell_short(worker, found.prefixes, left, cached)
        if reason != "hit":
            metrics.misses.labels(model, reason).inc()
        if timings.first_byte is not None:
            seconds = timings.first_byte - timings.arrived
            self._counter(metrics.first_token, model, cache_label(delivery)).observe(seconds)
        if change is not None and change.kind is not None:
            metrics.would_save.labels(change.kind).inc(change.lost)
        outcome.shareable, outcome.change, outcome.reason = delivery.shareable, change, reason

    def _change(self, exchange: Exchange, expected: Expectation, delivery: Delivery) -> Steps[PrefixChange | None]:
        """Where the request differs in the middle from a recent one.

        Not sought where little was computed: comparing takes a millisecond. Nor when there is no time for it, or more
        than a tenth of a core would go into searches.
        """
        remembered, recent = exchange.prompt.remembered, self._reader.recent
        if remembered is None or (delivery.prompt - delivery.cached) * MOST_PARTS < delivery.prompt:
            return None
        if self._idle.is_behind or recent.seeking.is_spent:
            self._metrics.explanations_shed.inc()
            return None
        # Some worker may have been sent more than what an engine, or the memory of recent requests, still knows.
        shared = max(delivery.shareable, delivery.cached)
        sent = max(shared, expected.ever_sent.tokens if expected.ever_sent is not None else 0)
        # A whole answer waits for its reason, and each step of the search for all that the loop has to do.
        try:
            steps = recent.seeking.spend(recent.seek_change(remembered, delivery.prompt, sent))
            change = yield from within(math.inf if exchange.is_over else SEEK_SECONDS, steps)
        except TimeoutError:
            self._metrics.explanations_shed.inc()
            return None
        engine = exchange.outcome.engine if exchange.outcome is not None else None
        if change is None and expected.sent_here and engine is not None and engine.shared is not None:
            change = yield from recent.rendered_otherwise(remembered, shared)
        return change

    def _missing(self, exchange: Exchange) -> str:
        """What an answer 404 did not find."""
        if exchange.response_id is not None:
            return "response"
        return "endpoint" if not exchange.model or self._pool.lists(exchange.model) else "model"

    def _model_label(self, exchange: Exchange, status: int) -> str:
        """The model's name if a worker lists it; that of the worker's model if it took a name that is in no list."""
        model = exchange.model
        if self._pool.lists(model):
            return str(model)
        worker = exchange.worker
        if worker is not None and worker.serves(model):
            return str(model)
        if worker is None or model is None or (model and not 200 <= status < 400):
            return UNKNOWN_MODEL
        return worker.names.base or UNKNOWN_MODEL


def _is_stored(exchange: Exchange) -> bool:
    """Whether the answer is a response, or names anything else, that can be continued, or asked for, later."""
    if exchange.head.endpoint != RESPONSES:
        return exchange.makes
    return flag(exchange.body.parsed.get("store", True)) is not False


def _engine_id(exchange: Exchange, answer: Any) -> str:
    """What the engine calls a request. vLLM names that of a response after the response, whatever the request's id is.

    A response with tools that vLLM itself calls takes several requests; this is the first one.
    """
    name = answer.get("id") if exchange.head.endpoint == RESPONSES and isinstance(answer, dict) else None
    return f"{name.removeprefix('resp_')}_0" if isinstance(name, str) else exchange.engine_id


def _for_shadow(exchange: Exchange, worker: Worker, model: str, usage: Usage | None) -> AnsweredRequest:
    timings = exchange.timings
    seconds = None
    # A response's first event comes before its prompt is computed.
    if timings.first_byte is not None and timings.is_stream and exchange.head.endpoint != RESPONSES:
        seconds = timings.first_byte - timings.leased
    return AnsweredRequest(
        chat=exchange.prompt.chat,
        worker=worker,
        boot=worker.boot,
        model=model,
        size=len(exchange.body.raw),
        memory=exchange.body.memory.size,
        prompt=usage.prompt if usage is not None else None,
        cached=usage.cached if usage is not None else None,
        seconds=seconds,
        alone=timings.was_alone,
        owner=exchange.head.owner,
        record=exchange.record,
        at=time.perf_counter(),
    )
