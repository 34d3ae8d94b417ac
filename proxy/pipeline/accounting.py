"""The one step after an answer: what came is compared with what was expected, counted and explained.

Shadow mode and the stored responses learn of the answer here, too. But for what the next request builds on, and the
reason that a whole answer tells, all of it is work beside requests (`proxy.idle_work`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine, Mapping
from functools import cache
from typing import Any, NamedTuple

from prometheus_client import Counter

from proxy.boundaries.boundary import Entry, Found, resolved_positions
from proxy.chat.chat import RESPONSES, flag
from proxy.chat.usage import Usage, usage_of
from proxy.fleet.part import Change, Part
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.http.json_body import loads
from proxy.idle_work import IdleWork, Steps, within
from proxy.metrics import Metrics
from proxy.observability.client_name import client_name
from proxy.observability.explanations import Explanation, Explanations, Record
from proxy.observability.key_usage import KeyUsage
from proxy.observability.reasons import Delivery, Expectation, cache_label, reason_for
from proxy.observability.request_diff import PrefixChange
from proxy.observability.rolling_sums import RollingSums
from proxy.observability.shadow import AnsweredRequest, Shadow
from proxy.observability.time_saved import TimeSaved
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.request import CLIENT_GONE, ProxiedRequest, Report, Verdict
from proxy.routing.engine_events import EngineEvents, EngineOutcome
from proxy.routing.prefix_index import PrefixIndex

logger = logging.getLogger("seamark.gateway")

NOT_FOUND = 404

# A change is sought if more than one in so many tokens of a prompt was computed.
MOST_PARTS = 8

SEEK_SECONDS = 0.25  # that a whole answer waits for a change to be found; it is not worth more

FORGET_SECONDS = 1.0  # between two looks at workers that are gone

UNKNOWN_MODEL = "unknown"  # model names come from clients; only those that a worker serves become labels


class _TokenCounters(NamedTuple):
    """One model on one worker: tokens, and seconds."""

    prompt: Counter
    cached: Counter
    shareable: Counter
    shared: Counter
    predicted: Counter
    saved: Counter
    spent: Counter


class _Answered(NamedTuple):
    """A request, and what its worker reported of it."""

    request: ProxiedRequest
    worker: Worker
    model: str  # label
    expected: Expectation
    prompt: int  # tokens
    cached: int  # tokens
    seek_seconds: float  # that a change is sought at most


class Accounting(Part):
    """Counts each request once."""

    name = "accounting"

    def __init__(
        self,
        metrics: Metrics,
        pool: WorkerPool,
        reader: PromptReader,
        prefix_index: PrefixIndex,
        engine_events: EngineEvents,
        shadow: Shadow,
        idle: IdleWork,
        excerpts: bool,
    ) -> None:
        """`excerpts`: some characters of what changed may be kept for explanations."""
        self._metrics = metrics
        self._pool = pool
        self._reader = reader
        self._recent = reader.recent
        self._stored = reader.stored
        self._prefix_index = prefix_index
        self._engine_events = engine_events
        self._shadow = shadow
        self._idle = idle
        self._excerpts = excerpts
        self.sums = RollingSums()
        self.key_usage = KeyUsage(metrics)
        self.explanations = Explanations()
        self._time = TimeSaved()
        self._leaving: list[Worker] = []  # removed, with requests under way
        self._running: set[asyncio.Task[None]] = set()
        # Finding a family's member by its labels costs more than counting with it.
        self._children: dict[tuple[str, str], _TokenCounters] = {}
        self._first_token = cache(metrics.first_token.labels)
        self._requests = cache(metrics.requests.labels)

    def began(self, request: ProxiedRequest) -> None:
        """A request has been read: from now on it can be asked what becomes of it."""
        request.record = self.explanations.begin(
            request.client.request_id, request.client.owner, lambda record: self._so_far(request, record)
        )

    def opened(self, request: ProxiedRequest, answer: Any) -> None:
        """A worker's answer begins, the response `answer` (parsed): by its id it can be asked for from now on."""
        if request.worker is not None and _is_stored(request):
            self._stored.put(None, answer, request.worker.boot, request.client.owner)

    def reported(self, request: ProxiedRequest, report: Report, answer: Any = None) -> None:
        """A worker has reported in an answer that is on its way to the client.

        `answer`: parsed; for a stream, its last response object. What the next request may build on is noted; the rest
        is left to `count`.
        """
        request.report = self._note(request, report, answer)

    async def answered(self, request: ProxiedRequest, report: Report, answer: Any = None) -> str | None:
        """The same of an answer that has not begun, which tells the reason for what came from the cache.

        Returns it, None if the worker does not report what came. Goes on if the client leaves meanwhile.
        """
        report = self._note(request, report, answer)
        if (answered := self._count_report(request, report, SEEK_SECONDS)) is None:
            return None
        steps = self._explain(answered, report.outcome)
        try:
            await self._idle.finish(steps)
        except asyncio.CancelledError:
            request.explaining = self._beside(self._idle.finish(steps))
            raise
        return request.verdict.reason if request.verdict is not None else None

    def used(self, request: ProxiedRequest, usage: Usage | None) -> None:
        """An answer says what its request took: it counts for the key."""
        if usage is not None and (key := request.client.key) is not None:
            self.key_usage.tokens(key.name, usage)

    def count(self, request: ProxiedRequest) -> None:
        """Have the request counted, however it ended, and explained if that is still to be done."""
        request.is_over = True
        if request.status >= 400 and request.worker is not None and request.expected is not None:
            events = self._engine_events
            (events.left if request.status == CLIENT_GONE else events.refused)(request.worker, request.engine_id)
        if request.trace is not None:
            request.trace.stop()
        self._idle.put_off()
        if request.report is not None:
            self._idle.add(self._account(request, request.report))
        else:
            self._count(request)
            self._close(request)

    def _account(self, request: ProxiedRequest, report: Report) -> Steps[None]:
        self._count(request)
        yield
        answered = self._count_report(request, report, math.inf)
        if answered is not None:
            is_told_later = answered.worker.engine is not None and request.timings.is_stream
            if report.outcome is None and is_told_later:
                request.explaining = self._beside(self._ask_engine(answered, report.engine_id))
            else:
                yield from self._explain(answered, report.outcome)
        self._close(request)

    def _close(self, request: ProxiedRequest) -> None:
        """Nothing else is told of it, except for the reason that its engine is being asked for."""
        if request.explaining is not None:
            request.explaining.add_done_callback(lambda _: self._settle(request))
        else:
            self._settle(request)

    def _count(self, request: ProxiedRequest) -> None:
        """Count the request itself."""
        worker, status = request.worker, request.status
        model = request.model_label = self._model_label(request, status)
        name = worker.name if worker is not None else ""
        self._requests(model, name, request.client.endpoint, str(status)).inc()
        if request.client.key is not None:
            self.key_usage.request(request.client.key.name)
        if worker is not None and request.timings.reading_seconds:
            self._spend(model, worker, request.timings.reading_seconds)

    def _settle(self, request: ProxiedRequest) -> None:
        """All is known of it."""
        if request.record is not None:
            request.record.settle()
        self._end_trace(request)

    def _so_far(self, request: ProxiedRequest, record: Record) -> Explanation:
        """What is known of a request by now."""
        client, prompt, worker = request.client, request.prompt, request.worker
        found = prompt.found or Found()
        status = request.status if request.is_over else None
        # What came of it is there only once it is judged.
        judged = {} if request.verdict is None else {"sent": request.body.hint, **request.verdict._asdict()}
        return Explanation(
            client.request_id,
            client.endpoint,
            owner=client.owner,
            began=record.began,
            status=status,
            model=request.model_label,
            worker=worker.name if status is not None and worker is not None else None,
            lookup=found.result,
            boundaries=tuple([(boundary.entry, boundary.kind) for boundary in found.boundaries]),
            rewrites=prompt.rewrites,
            client=client_name(client.user_agent),
            missing=self._missing(request) if status == NOT_FOUND else None,
            **judged,
        )

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """The figures of a removed worker go once it has answered its last request."""
        if change is Change.REMOVED:
            self._leaving.append(worker)

    async def run(self) -> None:
        """Forget the figures of workers that are gone, for ever."""
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
                self._forget(worker.name)

    def _forget(self, worker: str) -> None:
        for labels in [labels for labels in self._children if labels[1] == worker]:
            del self._children[labels]
        self._requests.cache_clear()
        self._time.forget(worker)
        self._metrics.forget_worker(worker)

    def time_saved(self) -> TimeSaved:
        """Seconds saved and spent since the start, at what is known of the workers' pace by now."""
        for worker in self._pool.workers:
            self._price(worker)
        return self._time

    def replayed(self, model: str, worker: Worker, answer: bytes) -> None:
        """A prefix was computed again on a restarted worker: count its cost at the worker's step times."""
        try:
            usage = usage_of(loads(answer))
        except ValueError:
            usage = None
        if usage is not None:
            seconds = worker.step_times.seconds(usage.prompt - (usage.cached or 0), passes=1)
            self._spend(model, worker, seconds)

    @staticmethod
    def _end_trace(request: ProxiedRequest) -> None:
        if (trace := request.trace) is None:
            return
        timings = request.timings
        arrived = timings.arrived
        stages = []
        if timings.reading_seconds:
            stages.append(("boundaries", arrived, arrived + timings.reading_seconds))
        if timings.asked is not None:
            has_slot = timings.choosing >= timings.asked
            stages.append(("queue", timings.asked, timings.choosing if has_slot else time.perf_counter()))
        if timings.leased:
            stages.append(("choice", timings.choosing, timings.leased))
        if timings.first_byte is not None:
            stages.append(("first token" if timings.is_stream else "answer", timings.leased, timings.first_byte))
        worker = request.worker.name if request.worker is not None else None
        explanation = request.record.explanation if request.record is not None else None
        trace.end(request.status, request.model_label or UNKNOWN_MODEL, worker, stages, explanation)

    def _price(self, worker: Worker) -> None:
        for model, seconds in self._time.settle(worker.name, worker.step_times).items():
            self._counters(model, worker).saved.inc(seconds)

    def _spend(self, model: str, worker: Worker, seconds: float) -> None:
        self._time.spent += seconds
        self._counters(model, worker).spent.inc(seconds)

    def _note(self, request: ProxiedRequest, report: Report, answer: Any) -> Report:
        """Note what the next request may build on; the report, with the engine's name of the request."""
        if request.worker is not None:
            if _is_stored(request):
                self._stored.put(request.prompt.chat, answer, request.worker.boot, request.client.owner)
            if report.usage is not None:
                self._learn(request, report.usage.prompt)
        return report._replace(engine_id=_engine_id(request, answer))

    def _count_report(self, request: ProxiedRequest, report: Report, seek_seconds: float) -> _Answered | None:
        """Count what was reported; None if it leaves nothing to explain."""
        worker, usage, expected = request.worker, report.usage, request.expected
        if worker is None:
            return None
        status = request.reply.failure or report.status
        model = self._model_label(request, status)
        if worker.engine is None and status == 200:
            self._shadow.add(_for_shadow(request, worker, model, usage))
        if usage is None:
            return None
        self.used(request, usage)
        counters = self._counters(model, worker)
        counters.prompt.inc(usage.prompt)
        if usage.cached is not None:
            counters.cached.inc(usage.cached)
            blocks = worker.engine.block_size if worker.engine is not None else 1
            self._time.reused(worker.name, model, usage.cached, blocks)
            self._price(worker)
        if expected is None:
            return None
        counters.predicted.inc(expected.found(expected.predicted))
        if usage.cached is None:
            counters.shareable.inc(Delivery.of(expected, usage.prompt, 0).shareable)
            return None
        return _Answered(request, worker, model, expected, usage.prompt, usage.cached, seek_seconds)

    def _learn(self, request: ProxiedRequest, prompt: int) -> None:
        """The tokens of the prompt tell where its last turn ends, and what a byte of a body weighs."""
        found = request.prompt.found
        if request.response_id is None:  # a continued response has most of its prompt elsewhere
            self._reader.weigh(request.model, len(request.body.raw), prompt)
        if (remembered := request.prompt.remembered) is not None:
            remembered.prompt = prompt
        if found is not None and found.end and found.turn_key is not None and found.end < prompt:
            self._reader.told(found.turn_key, prompt - found.end)
            self._prefix_index.set_length(found.turn_key, prompt - found.end)

    def _learn_positions(self, found: Found, positions: Mapping[Entry, int], prompt: int) -> None:
        """The engine has resolved the hint: an engine whose feed cannot be followed says so here alone."""
        for boundary in found.boundaries:
            tokens = positions.get(boundary.entry, 0) if boundary.entry is not None else 0
            if 0 < tokens <= prompt:
                self._reader.told(boundary.key, tokens)
                self._prefix_index.set_length(boundary.key, tokens)

    def _beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _ask_engine(self, answered: _Answered, engine_id: str) -> None:
        """Explain a stream once its engine has been asked."""
        outcome = None
        try:
            outcome = await self._engine_events.outcome_of(answered.worker, engine_id)
        except Exception as error:  # the message might hold prompt text
            logger.error("asking for request %s: %s", answered.request.client.request_id, type(error).__name__)
        await self._idle.lull()
        await self._idle.finish(self._explain(answered, outcome))

    def _explain(self, answered: _Answered, outcome: EngineOutcome | None) -> Steps[None]:
        """An answer is not lost for its explanation: a failure gives no reason."""
        request = answered.request
        try:
            request.verdict = yield from self._judge(answered, outcome)
        except Exception as error:  # the message might hold prompt text
            logger.error("explaining request %s: %s", request.client.request_id, type(error).__name__)

    def _judge(self, answered: _Answered, outcome: EngineOutcome | None) -> Steps[Verdict]:
        request, worker, model, expected, prompt, cached, _ = answered
        metrics, timings = self._metrics, request.timings
        found = request.prompt.found or Found()
        positions = resolved_positions(request.body.hint, outcome.positions if outcome is not None else ())
        self._learn_positions(found, positions, prompt)
        delivery = self._delivery(answered, found, outcome, positions)
        change = yield from self._change(answered, delivery, is_told=outcome is not None and outcome.shared is not None)
        if change is not None:
            delivery = delivery._replace(unchanged=change.token + change.lost)
        reason = reason_for(expected, delivery, change)
        counters = self._counters(model, worker)
        counters.shareable.inc(delivery.shareable)
        counters.shared.inc(min(delivery.shareable, cached))
        self.sums.add(
            prompt, delivery.shareable, cached, change.lost if change is not None and not change.is_salt else 0
        )
        if cached < expected.found(expected.predicted) and reason != "hint_ignored":
            # It leaves behind what it computed, unless that was not worth it; what it did not find otherwise is gone.
            left = [boundary.key for boundary in found.boundaries] if reason != "not_worth_it" else []
            self._engine_events.fell_short(worker, found.prefixes, left, cached)
        if reason != "hit":
            metrics.misses.labels(model, reason).inc()
        if timings.first_byte is not None:
            seconds = timings.first_byte - timings.arrived
            self._first_token(model, cache_label(delivery)).observe(seconds)
        verdict = Verdict(
            reason,
            prompt,
            cached,
            delivery.shareable,
            expected.found(expected.predicted),
            outcome.positions if outcome is not None else (),
        )
        if change is None:
            return verdict
        would_save = {}
        if change.kind is not None:
            would_save[change.kind] = change.lost
            metrics.would_save.labels(change.kind).inc(change.lost)
        return verdict._replace(changed=change.as_json(self._excerpts), would_save=would_save)

    @staticmethod
    def _delivery(
        answered: _Answered, found: Found, outcome: EngineOutcome | None, positions: Mapping[Entry, int]
    ) -> Delivery:
        """What came, beside what could have come: the engine's word where there is one. `positions`: of the hint."""
        _, _, _, expected, prompt, cached, _ = answered
        tokens = {b.key: positions.get(b.entry, 0) if b.entry is not None else b.tokens for b in found.boundaries}
        return Delivery.of(
            expected,
            prompt,
            cached,
            shared=outcome.shared if outcome is not None else None,
            deepest=max(tokens.values(), default=0),
            engine=outcome.reason if outcome is not None else None,
        )

    def _change(self, answered: _Answered, delivery: Delivery, *, is_told: bool) -> Steps[PrefixChange | None]:
        """Where the request differs in the middle from a recent one; `is_told`: its engine says what it shares.

        Not sought where little was computed: comparing takes a millisecond. Nor when there is no time for it.
        """
        remembered, expected = answered.request.prompt.remembered, answered.expected
        if remembered is None or (delivery.prompt - delivery.cached) * MOST_PARTS < delivery.prompt:
            return None
        if self._idle.is_behind:
            self._metrics.explanations_shed.inc()
            return None
        # Some worker may have been sent more than what an engine, or the memory of recent requests, still knows.
        shared = max(delivery.shareable, delivery.cached)
        sent = max(shared, expected.ever_sent.tokens if expected.ever_sent is not None else 0)
        # A whole answer waits for its reason, and each step of the search for all that the loop has to do.
        try:
            steps = self._recent.seek_change(remembered, delivery.prompt, sent)
            change = yield from within(answered.seek_seconds, steps)
        except TimeoutError:
            self._metrics.explanations_shed.inc()
            return None
        if change is None and is_told and expected.sent_here:
            change = yield from self._recent.rendered_otherwise(remembered, shared)
        return change

    def _counters(self, model: str, worker: Worker) -> _TokenCounters:
        labels = (model, worker.name)
        counters = self._children.get(labels)
        if counters is None:
            metrics = self._metrics
            families = (
                metrics.prompt_tokens,
                metrics.cached_tokens,
                metrics.shareable_tokens,
                metrics.shared_tokens,
                metrics.predicted_tokens,
                metrics.seconds_saved,
                metrics.seconds_spent,
            )
            counters = self._children[labels] = _TokenCounters(*(family.labels(*labels) for family in families))
        return counters

    def _missing(self, request: ProxiedRequest) -> str:
        """What an answer 404 did not find."""
        if request.response_id is not None:
            return "response"
        return "endpoint" if not request.model or self._pool.lists(request.model) else "model"

    def _model_label(self, request: ProxiedRequest, status: int) -> str:
        """The model's name if a worker lists it; that of the worker's model if it took a name that is in no list."""
        model = request.model
        if self._pool.lists(model):
            return str(model)
        worker = request.worker
        if worker is not None and worker.serves(model):
            return str(model)
        if worker is None or model is None or (model and not 200 <= status < 400):
            return UNKNOWN_MODEL
        return worker.names.base or UNKNOWN_MODEL


def _is_stored(request: ProxiedRequest) -> bool:
    """Whether the answer is a response, or names anything else, that can be continued, or asked for, later."""
    if request.client.endpoint != RESPONSES:
        return request.makes
    return flag(request.body.parsed.get("store", True)) is not False


def _engine_id(request: ProxiedRequest, answer: Any) -> str:
    """What the engine calls a request. vLLM names that of a response after the response, whatever the request's id is.

    A response with tools that vLLM itself calls takes several requests; this is the first one.
    """
    name = answer.get("id") if request.client.endpoint == RESPONSES and isinstance(answer, dict) else None
    return f"{name.removeprefix('resp_')}_0" if isinstance(name, str) else request.engine_id


def _for_shadow(request: ProxiedRequest, worker: Worker, model: str, usage: Usage | None) -> AnsweredRequest:
    timings = request.timings
    seconds = None
    # A response's first event comes before its prompt is computed.
    if timings.first_byte is not None and timings.is_stream and request.client.endpoint != RESPONSES:
        seconds = timings.first_byte - timings.leased
    return AnsweredRequest(
        chat=request.prompt.chat,
        worker=worker,
        boot=worker.boot,
        model=model,
        size=len(request.body.raw),
        memory=request.body.memory.size,
        prompt=usage.prompt if usage is not None else None,
        cached=usage.cached if usage is not None else None,
        seconds=seconds,
        alone=timings.was_alone,
        owner=request.client.owner,
        record=request.record,
        at=time.perf_counter(),
    )
