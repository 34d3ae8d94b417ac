"""After an answer: what came is compared with what was expected, counted, and explained."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import cache
from typing import NamedTuple

from prometheus_client import Counter

from proxy.chat.usage import Usage, usage_of
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.metrics import Metrics
from proxy.observability.reasons import ENGINE_CAUSES, Expectation, cache_label, deepest, reason
from proxy.observability.request_diff import PrefixChange, explains
from proxy.observability.rolling_sums import RollingSums
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.request import ProxiedRequest
from proxy.routing.engine_events import EngineEvents

logger = logging.getLogger("seamark.gateway")

GONE = 499  # the client left; the engine may have computed something all the same

UNKNOWN_MODEL = "unknown"  # model names come from clients; only those that a worker serves become labels


class _Counters(NamedTuple):
    """Of one model on one worker: tokens, and seconds."""

    prompt: Counter
    cached: Counter
    shareable: Counter
    shared: Counter
    predicted: Counter
    saved: Counter
    spent: Counter


class Accounting:
    """Counts each request once."""

    def __init__(
        self, metrics: Metrics, pool: WorkerPool, finding: PromptReader, words: EngineEvents, excerpts: bool
    ) -> None:
        """`excerpts`: some characters of what changed may be kept for explanations."""
        self._metrics = metrics
        self._pool = pool
        self._finding = finding
        self._words = words
        self._excerpts = excerpts
        self.recently = RollingSums()
        self.seconds_saved: float | None = None  # of prefill, since the start; None where step times are not known
        self._running: set[asyncio.Task[str]] = set()
        # To find a family's member by its labels costs more than to count with it.
        self._children: dict[tuple[str, str], _Counters] = {}
        self._first_token = cache(metrics.first_token.labels)
        self._requests = cache(metrics.requests.labels)

    async def answered(self, call: ProxiedRequest, usage: Usage | None) -> str | None:
        """Compare what the engine reports with what was expected; the reason, None where it reports nothing.

        Goes on where the client leaves meanwhile.
        """
        if usage is None or call.worker is None:
            return None
        expected = call.expected
        counters = self._counters(self.model_label(call), call.worker)
        counters.prompt.inc(usage.prompt)
        if usage.cached is not None:
            counters.cached.inc(usage.cached)
            saved = call.worker.step_times.seconds(usage.cached)
            counters.saved.inc(saved)
            if call.worker.step_times.known:
                self.seconds_saved = (self.seconds_saved or 0.0) + saved
        if expected is None:
            return None
        counters.shareable.inc(expected.shareable)
        counters.predicted.inc(expected.floored(expected.predicted))
        if usage.cached is None:
            return None
        counters.shared.inc(min(expected.shareable, usage.cached))
        self.recently.add(usage.prompt, expected.floored(expected.shareable), usage.cached)
        try:
            change = self._finding.change(call) if expected.shareable < expected.would_share else None
            why = reason(expected, usage.cached, change)
            if why not in ENGINE_CAUSES or not call.sent:
                return self._explain(call, expected, usage, why, change)
            task = asyncio.create_task(self._ask_engine(call, expected, usage, why, change))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            return await asyncio.shield(task)
        except Exception as error:  # an answer is not lost for its explanation; the message might hold prompt text
            logger.error("explaining request %s: %s", call.request_id, type(error).__name__)
            return None

    async def _ask_engine(
        self, call: ProxiedRequest, expected: Expectation, usage: Usage, why: str, change: PrefixChange | None
    ) -> str:
        word = await self._words.word(call.worker, call.engine_id)
        return self._explain(call, expected, usage, deepest(why, word), change)

    def _explain(
        self, call: ProxiedRequest, expected: Expectation, usage: Usage, why: str, change: PrefixChange | None
    ) -> str:
        metrics, model, worker = self._metrics, self.model_label(call), call.worker
        if usage.cached < expected.floored(expected.predicted) and why != "hint_ignored":
            # What it computed it leaves behind, unless that was not worth it; what it did not find otherwise is gone.
            left = [boundary.key for boundary in call.found.boundaries] if why != "not_worth_it" else []
            self._words.fell_short(worker, call.found.prefixes, left, usage.cached)
        if why != "hit":
            metrics.misses.labels(model, why).inc()
        if call.first_byte is not None:
            seconds = call.first_byte - call.arrived
            self._first_token(model, cache_label(expected, usage.cached)).observe(seconds)
        if (told := call.explanation) is not None:
            told.model, told.worker, told.status, told.sent = model, worker.name, call.status, call.sent
            told.shareable = expected.floored(expected.shareable)
            told.predicted = expected.floored(expected.predicted)
            told.prompt, told.delivered, told.reason = usage.prompt, usage.cached, why
            if why == "prefix_changed" and change is not None:
                told.changed = change.as_json(self._excerpts)
                if (volatile := explains(change)) is not None:
                    lost = expected.floored(expected.would_share) - expected.floored(expected.shareable)
                    told.would_save[volatile] = lost
                    metrics.would_save.labels(volatile).inc(lost)
        return why

    def replayed(self, model: str, worker: Worker, answer: bytes) -> None:
        """A prefix was computed again on a restarted worker: what that cost it, at the pace it has, or had before."""
        try:
            usage = usage_of(json.loads(answer))
        except ValueError:
            usage = None
        if usage is not None:
            seconds = worker.step_times.seconds(usage.prompt - (usage.cached or 0), passes=1)
            self._counters(model, worker).spent.inc(seconds)

    def _counters(self, model: str, worker: Worker) -> _Counters:
        labels = (model, worker.name)
        found = self._children.get(labels)
        if found is None:
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
            found = self._children[labels] = _Counters(*(family.labels(*labels) for family in families))
        return found

    def count(self, call: ProxiedRequest) -> None:
        """Count the request itself, however it ended."""
        if call.status >= 400 and call.worker is not None and call.expected is not None:
            (self._words.left if call.status == GONE else self._words.refused)(call.worker, call.engine_id)
        model = self.model_label(call)
        worker = call.worker.name if call.worker is not None else ""
        if (told := call.explanation) is not None:
            told.status, told.model, told.worker = call.status, model, worker or None
        self._requests(model, worker, call.endpoint, str(call.status)).inc()
        if call.worker is not None and call.sought_seconds:
            self._counters(model, call.worker).spent.inc(call.sought_seconds)

    def model_label(self, call: ProxiedRequest) -> str:
        """The model's name, where it is one."""
        model = call.body.get("model")
        if call.worker is not None and call.worker.serves(model):
            return model
        return model if any(worker.serves(model) for worker in self._pool.workers) else UNKNOWN_MODEL
