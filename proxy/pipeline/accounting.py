"""The one step after an answer: what came is compared with what was expected, counted and explained.

Shadow mode and the stored responses learn of the answer here, too. But for what the next request builds on, and the
reason that a whole answer tells, all of it is work beside requests (`proxy.idle_work`).
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from proxy.chat.chat import RESPONSES, flag
from proxy.chat.reader import ENDPOINTS
from proxy.chat.usage import Usage
from proxy.fleet.part import Change, Part
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.http.token_limits import Charge
from proxy.idle_work import IdleWork, Steps, within
from proxy.metrics import Labels, Metrics
from proxy.observability.explanations import Explanation, Explanations, client_name
from proxy.observability.reasons import Expectation, reason_for
from proxy.observability.request_diff import PrefixChange, RememberedRequest
from proxy.observability.shadow import AnsweredRequest, Shadow
from proxy.observability.totals import RollingSums, TimeSaved
from proxy.observability.traffic_trace import TrafficTrace
from proxy.pipeline.exchange import CLIENT_GONE, Exchange, RequestOutcome, affinity_key
from proxy.pipeline.prompt_reader import PromptReader
from proxy.routing.engine_events import EngineEvents
from proxy.routing.feed_lines import Admitted
from proxy.routing.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from proxy.observability.tracing import Tracing

logger = logging.getLogger("seamark.gateway")
NOT_FOUND = 404
COMPUTING = ENDPOINTS - {"/detokenize", "/tokenize"}
MOST_PARTS = 8  # a change is sought if more than one in so many tokens of a prompt was computed
SETTLED_SECONDS = 60.0  # after its last answer, within which all is said of a request
SEEK_SECONDS = 0.25  # that a whole answer waits for a change to be found; it is not worth more
UNKNOWN = "unknown"  # a label: for a model that no worker serves, as clients may name any, and a reason not looked for


@dataclass(eq=False)
class Accounting(Part):
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
    _trace: TrafficTrace | None = None
    sums: RollingSums = field(default_factory=RollingSums)
    explanations: Explanations = field(default_factory=Explanations)
    _time: TimeSaved = field(default_factory=TimeSaved)
    # That were removed, by name, and until when (`time.monotonic()`) something may still be said of their requests.
    _leaving: dict[str, tuple[Worker, float]] = field(default_factory=dict)

    def begin(self, exchange: Exchange) -> None:
        if self._tracing is not None:
            head = exchange.head
            exchange.trace = self._tracing.begin(head.method, head.endpoint, head.headers)

    def read(self, exchange: Exchange) -> None:
        """A request has been read: from now on it can be asked what becomes of it."""
        head, timings = exchange.head, exchange.timings
        exchange.record = Explanation(head.request_id, head.endpoint, head.owner, look=partial(self._note, exchange))
        self.explanations.begin(exchange.record)
        timings.reading_seconds = time.perf_counter() - timings.arrived
        self._metrics.overhead.observe(timings.reading_seconds, "boundary")

    def opened(self, exchange: Exchange, answer: Any) -> None:
        """A worker's answer begins, the response `answer` (parsed): by its id it can be asked for from now on."""
        if exchange.worker is not None and _is_stored(exchange):
            self._reader.stored.put(None, answer, exchange.worker.boot, exchange.head.owner)

    def reported(self, exchange: Exchange, outcome: RequestOutcome, answer: Any = None) -> None:
        """Note what the next request builds on; `settle` does the rest. `answer`: parsed; a stream's last response."""
        exchange.outcome, head = outcome, exchange.head
        if (charge := exchange.reply.charge) is not None and (usage := outcome.usage) is not None:
            charge.settle(usage.prompt, usage.cached or 0, usage.output)
        outcome.engine_id = exchange.engine_id
        if head.endpoint == RESPONSES and isinstance(answer, dict) and isinstance(name := answer.get("id"), str):
            # As vLLM calls it, whatever the request's id is; the first of several, if vLLM calls tools by itself.
            outcome.engine_id = f"{name.removeprefix('resp_')}_0"
        if (worker := exchange.worker) is None:
            return
        if (expected := exchange.expected) is not None:
            outcome.predicted = expected.found(expected.predicted)
        if _is_stored(exchange):
            self._reader.stored.put(exchange.prompt.chat, answer, worker.boot, head.owner)
        if outcome.usage is None:
            return
        # Its tokens tell where the last turn of the prompt ends, and what a byte of a body weighs.
        prompt, found, remembered = outcome.usage.prompt, exchange.prompt.found, exchange.prompt.remembered
        if exchange.response_id is None:  # a continued response has most of its prompt elsewhere
            self._reader.learn_tokens_per_byte(exchange.model, len(exchange.body.raw), prompt)
        if remembered is not None:
            remembered.prompt = prompt
        if found is not None and found.end and found.turn_key is not None and found.end < prompt:
            self._reader.told(found.turn_key, prompt - found.end)
            self._prefix_index.set_length(found.turn_key, prompt - found.end)

    async def answered(self, exchange: Exchange, outcome: RequestOutcome, answer: Any = None) -> str | None:
        """The same of an answer that has not begun; its reason, if that is known. Goes on without the client."""
        self.reported(exchange, outcome, answer)
        steps = self._explain(exchange, outcome)
        if steps is not None:
            outcome.explaining = steps
            await self._idle.finish(steps)
        outcome.is_explained = True
        return outcome.reason if outcome.reason != UNKNOWN else None

    def used(self, exchange: Exchange, usage: Usage | None) -> None:
        """An answer says what its request took: it counts for the key."""
        if usage is not None and (key := exchange.head.key) is not None:
            for kind, tokens in (("prompt", usage.prompt), ("cached", usage.cached or 0), ("output", usage.output)):
                self._metrics.key_tokens[key.name, kind] += tokens
            if (charge := exchange.reply.charge) is not None:
                charge.settle(usage.prompt, usage.cached or 0, usage.output)

    def settle(self, exchange: Exchange) -> None:
        """Have the request counted, however it ended, and explained if that is still to be done."""
        exchange.is_over = True
        status, worker, outcome = exchange.reply.status, exchange.worker, exchange.outcome
        if (charge := exchange.reply.charge) is not None:
            self._settle_tokens(exchange, charge)
        if status >= 400 and worker is not None and exchange.expected is not None:
            events = self._engine_events
            (events.left if status == CLIENT_GONE else events.refused)(worker, exchange.engine_id)
        if exchange.trace is not None:
            exchange.trace.stop()
        self._idle.put_off()
        if outcome is None or outcome.is_explained:
            self._count(exchange)
            self._conclude(exchange)
        else:
            self._idle.add(self._settle_later(exchange, outcome))

    def _settle_tokens(self, exchange: Exchange, charge: Charge) -> None:
        """What counts at its key if no answer has told it: for an error, or if no worker had the request, nothing.

        Of a stream it is the prompt, and a token for each event that went out. If the client has left before any
        answer, or a whole one tells nothing, the estimate stands.
        """
        status, timings, (prompt, cached, _) = exchange.reply.status, exchange.timings, charge.estimate
        is_there = 200 <= status < 300 and exchange.head.endpoint in COMPUTING
        was_sent = exchange.worker is not None and timings.asked is not None and timings.choosing >= timings.asked
        if charge.streamed is not None:
            charge.settle(prompt, cached, charge.streamed)
        elif not was_sent or not (is_there or status == CLIENT_GONE):
            charge.settle(0, 0, 0)
        if (window := charge.refused_by) is not None:
            self._metrics.key_refused[charge.limits.name, window.per] += 1

    def _settle_later(self, exchange: Exchange, outcome: RequestOutcome) -> Steps[None]:
        self._count(exchange)
        yield
        worker, usage = exchange.worker, outcome.usage
        is_told = usage is not None and usage.cached is not None and exchange.expected is not None
        is_told = is_told and outcome.engine is None and exchange.timings.is_stream
        if is_told and worker is not None and worker.engine is not None:
            self._engine_events.ask(worker, outcome.engine_id, partial(self._told, exchange, outcome))
        else:
            yield from self._explain_later(exchange, outcome)

    def _told(self, exchange: Exchange, outcome: RequestOutcome, engine: Admitted | None) -> None:
        outcome.engine = engine
        self._idle.add(self._explain_later(exchange, outcome))

    def _explain_later(self, exchange: Exchange, outcome: RequestOutcome) -> Steps[None]:
        steps = outcome.explaining  # its client has left meanwhile
        if steps is None:
            steps = self._explain(exchange, outcome)
        if steps is not None:
            yield from steps
        self._conclude(exchange)

    def _count(self, exchange: Exchange) -> None:
        """What is known of it whether it can be explained or not."""
        metrics, head, worker, outcome = self._metrics, exchange.head, exchange.worker, exchange.outcome
        status = exchange.reply.status
        model = exchange.model_label = self._model_label(exchange, status)
        name = worker.name if worker is not None else ""
        labels = model, name
        if exchange.left_out_by:
            metrics.not_kept[(exchange.left_out_by,)] += 1
        metrics.requests[model, name, head.endpoint, str(status)] += 1
        if head.key is not None:
            metrics.key_requests[(head.key.name,)] += 1
        if worker is not None and (seconds := exchange.timings.reading_seconds):
            self._spend(labels, seconds)
        if worker is None or outcome is None or (usage := outcome.usage) is None:
            return
        if head.key is not None:
            self.used(exchange, usage)
        metrics.prompt_tokens[labels] += usage.prompt
        if usage.cached is not None:
            metrics.cached_tokens[labels] += usage.cached
            self._time.reused(labels, usage.cached, worker.engine.block_size if worker.engine is not None else 1)
        if exchange.expected is not None:
            metrics.predicted_tokens[labels] += outcome.predicted
            if usage.cached is None:
                metrics.shareable_tokens[labels] += exchange.expected.shareable(usage.prompt)

    def _explain(self, exchange: Exchange, outcome: RequestOutcome) -> Steps[None] | None:
        """Find the reason; returns what is still to be done for that. An answer is not lost for its explanation."""
        expected, usage, engine, found = exchange.expected, outcome.usage, outcome.engine, exchange.prompt.found
        if expected is None or usage is None or usage.cached is None:
            return None
        try:
            prompt = outcome.prompt = usage.prompt
            outcome.cached = usage.cached
            positions = dict(zip(exchange.body.hint, engine.positions, strict=False)) if engine is not None else {}
            for boundary in found.boundaries if found is not None else ():
                tokens = boundary.tokens if boundary.entry is None else positions.get(boundary.entry, 0)
                if tokens > outcome.deepest:
                    outcome.deepest = tokens
                # An engine whose feed cannot be followed says so here alone.
                if tokens != boundary.tokens and 0 < tokens <= prompt:
                    self._reader.told(boundary.key, tokens)
                    self._prefix_index.set_length(boundary.key, tokens)
            outcome.shareable = expected.shareable(prompt, engine.shared if engine is not None else None)
            remembered, recent = exchange.prompt.remembered, self._reader.recent
            if remembered is None or (prompt - usage.cached) * MOST_PARTS < prompt:
                self._judge(expected, outcome, None, True)
            elif self._idle.is_behind or recent.seeking.is_spent:
                self._judge(expected, outcome, None, False)
            else:
                return self._compare(exchange, expected, outcome, remembered)
        except Exception as error:
            _log(exchange, error)
        return None

    def _compare(
        self, exchange: Exchange, expected: Expectation, outcome: RequestOutcome, new: RememberedRequest
    ) -> Steps[None]:
        """Find where the request differs in the middle from a recent one, and then the reason."""
        change, is_compared, recent = None, False, self._reader.recent
        shared = max(outcome.shareable, outcome.cached)
        # Some worker may have been sent more than what an engine, or the memory of recent requests, still knows.
        sent = max(shared, expected.ever_sent.tokens if expected.ever_sent is not None else 0)
        try:
            # A whole answer waits for its reason, and each step of the search for all that the loop has to do.
            steps = recent.seeking.spend(recent.seek_change(new, outcome.prompt, sent))
            with suppress(TimeoutError):
                change = yield from within(math.inf if exchange.is_over else SEEK_SECONDS, steps)
                is_compared = True
            if is_compared and change is None and expected.sent_here and outcome.engine is not None:
                change = yield from recent.rendered_otherwise(new, shared)
            self._judge(expected, outcome, change, is_compared)
        except Exception as error:
            _log(exchange, error)

    def _judge(
        self, expected: Expectation, outcome: RequestOutcome, change: PrefixChange | None, is_compared: bool
    ) -> None:
        figures = outcome.prompt, outcome.cached, outcome.shareable, outcome.deepest or outcome.prompt
        told = outcome.engine.reason if outcome.engine is not None else ""
        outcome.change, outcome.reason = change, reason_for(expected, *figures, told, change)
        if not is_compared:
            self._metrics.explanations_shed.inc()
            if outcome.reason in ("cold", "between_states"):  # as far as is known, but for what was not looked for
                outcome.reason = UNKNOWN

    def _conclude(self, exchange: Exchange) -> None:
        worker, outcome, record, trace = exchange.worker, exchange.outcome, exchange.record, exchange.trace
        model, status = exchange.model_label or UNKNOWN, exchange.reply.status
        if worker is not None and outcome is not None and outcome.reason is not None:
            self._count_reuse(exchange, worker, outcome, outcome.reason)
        if record is not None:
            self._note(exchange, record)
            record.look = None
        if trace is not None:
            name = worker.name if worker is not None else None
            trace.end(status, model, name, exchange.timings.stages(), record)
        if worker is not None and outcome is not None and worker.engine is None and status == 200:
            self._shadow.add(_for_shadow(exchange, worker, outcome.usage))
        chat, usage = exchange.prompt.chat, outcome.usage if outcome is not None else None
        if self._trace is not None and chat is not None and worker is not None and status in (200, CLIENT_GONE):
            session, body = affinity_key(exchange.head.headers, exchange.body.parsed), exchange.body
            about = body.memory.size, exchange.timings.arrived, session, usage.output if usage else 0
            self._trace.add(chat, worker, *about)

    def _count_reuse(self, exchange: Exchange, worker: Worker, outcome: RequestOutcome, reason: str) -> None:
        """What came of it from the cache, beside what could have come."""
        metrics, timings, model = self._metrics, exchange.timings, exchange.model_label or UNKNOWN
        found, change = exchange.prompt.found, outcome.change
        cached, shareable = outcome.cached, outcome.shareable
        metrics.shareable_tokens[model, worker.name] += shareable
        metrics.shared_tokens[model, worker.name] += min(shareable, cached)
        lost = change.lost if change is not None and not change.is_salt else 0
        self.sums.add(outcome.prompt, shareable, cached, lost)
        if reason != "hit":
            metrics.misses[model, reason] += 1
        if timings.first_byte is not None:
            cache = "miss" if not cached else "hit" if cached >= shareable else "partial"
            metrics.first_token.observe(timings.first_byte - timings.arrived, model, cache)
        if change is not None and change.kind is not None:
            metrics.would_save[(change.kind,)] += change.lost
        if cached < outcome.predicted and found is not None and reason != "hint_ignored":
            # It leaves behind what it computed, unless that was not worth it; what it did not find otherwise is gone.
            left = [boundary.key for boundary in found.boundaries] if reason != "not_worth_it" else []
            self._engine_events.fell_short(worker, found.prefixes, left, cached)

    def _note(self, exchange: Exchange, explanation: Explanation) -> None:
        """Write into it what is known by now, and nothing that holds a prompt's text."""
        prompt, outcome = exchange.prompt, exchange.outcome
        explanation.model, explanation.rewrites = exchange.model_label, prompt.rewrites
        explanation.keep = exchange.keep or None
        for name, value in exchange.head.headers:
            if name == b"user-agent":
                explanation.client = client_name(value)
        if prompt.found is not None and not exchange.keep:  # which is known until it has a slot
            explanation.lookup, explanation.boundaries = prompt.found.result, prompt.found.boundaries
        if exchange.is_over:
            explanation.status = exchange.reply.status
            explanation.worker = exchange.worker.name if exchange.worker is not None else None
            explanation.missing = self._missing(exchange) if explanation.status == NOT_FOUND else None
        # What came of it is there only once it is judged.
        if outcome is None or outcome.reason is None:
            return
        change = outcome.change
        explanation.sent = exchange.body.hint
        explanation.positions = outcome.engine.positions if outcome.engine is not None else ()
        explanation.shareable, explanation.predicted = outcome.shareable, outcome.predicted
        explanation.prompt, explanation.delivered = outcome.prompt, outcome.cached
        explanation.reason = outcome.reason if outcome.reason != UNKNOWN else None
        explanation.changed = change.as_json(self._excerpts) if change is not None else None

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """The figures of a removed worker go once it has answered its last request, and somebody looks at them."""
        if change is Change.REMOVED:
            self._leaving[worker.name] = worker, time.monotonic() + SETTLED_SECONDS
            self._forget_gone()

    def _forget_gone(self) -> None:
        present = {worker.name for worker in self._pool.workers}
        now = time.monotonic()
        for name, (worker, until) in list(self._leaving.items()):
            if worker.inflight:
                self._leaving[name] = worker, now + SETTLED_SECONDS
            elif now > until:
                del self._leaving[name]
            if name not in present and not worker.inflight:
                self._price(worker)
                self._time.forget(name)
                self._metrics.forget_worker(name)

    def time_saved(self) -> TimeSaved:
        """Seconds saved and spent since the start, at what is known of the workers' pace by now.

        To be called before anybody looks at what is counted: what is gone goes, too.
        """
        self._forget_gone()
        for worker in self._pool.workers:
            self._price(worker)
        return self._time

    def replayed(self, model: str, worker: Worker, usage: Usage | None) -> None:
        """A prefix was computed again on a restarted worker: count its cost at the worker's step times."""
        if usage is not None:
            seconds = worker.step_times.seconds(usage.prompt - (usage.cached or 0), passes=1)
            self._spend((model, worker.name), seconds)

    def _price(self, worker: Worker) -> None:
        for by_worker, seconds in self._time.settle(worker.name, worker.step_times).items():
            self._metrics.seconds_saved[by_worker] += seconds

    def _spend(self, by_worker: Labels, seconds: float) -> None:
        self._time.spent += seconds
        self._metrics.seconds_spent[by_worker] += seconds

    def _missing(self, exchange: Exchange) -> str:
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
            return UNKNOWN
        return worker.names.base or UNKNOWN


def _is_stored(exchange: Exchange) -> bool:
    """Whether the answer is a response, or names anything else, that can be continued, or asked for, later."""
    if exchange.head.endpoint != RESPONSES:
        return exchange.makes
    return flag(exchange.body.parsed.get("store", True)) is not False


def _log(exchange: Exchange, error: Exception) -> None:
    # The kind alone: the message might hold prompt text.
    logger.error("explaining request %s: %s", exchange.head.request_id, type(error).__name__)


def _for_shadow(exchange: Exchange, worker: Worker, usage: Usage | None) -> AnsweredRequest:
    timings = exchange.timings
    seconds = None
    # A response's first event comes before its prompt is computed.
    if timings.first_byte is not None and timings.is_stream and exchange.head.endpoint != RESPONSES:
        seconds = timings.first_byte - timings.leased
    return AnsweredRequest(
        chat=exchange.prompt.chat,
        worker=worker,
        boot=worker.boot,
        model=exchange.model_label or UNKNOWN,
        size=len(exchange.body.raw),
        memory=exchange.body.memory.size,
        prompt=usage.prompt if usage is not None else None,
        cached=usage.cached if usage is not None else None,
        seconds=seconds,
        alone=timings.was_alone,
        owner=exchange.head.owner,
        record=exchange.record,
    )
