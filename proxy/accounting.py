"""After an answer: what came is compared with what was expected, counted, and explained."""

from __future__ import annotations

import asyncio
import logging

from proxy.call import Call
from proxy.engine_words import EngineWords
from proxy.finding import Finding
from proxy.metrics import Metrics
from proxy.outcome import ENGINE_CAUSES, Expectation, Usage, cache_label, deepest, reason
from proxy.volatile import explains
from proxy.workers import WorkerPool

logger = logging.getLogger("seamark.gateway")

GONE = 499  # the client left; the engine may have computed something all the same
UNKNOWN_MODEL = "unknown"  # model names come from clients; only those that a worker serves become labels


class Accounting:
    """Counts each request once."""

    def __init__(
        self, metrics: Metrics, pool: WorkerPool, finding: Finding, words: EngineWords, excerpts: bool
    ) -> None:
        """`excerpts`: some characters of what changed may be kept for explanations."""
        self._metrics = metrics
        self._pool = pool
        self._finding = finding
        self._words = words
        self._excerpts = excerpts
        self._running: set[asyncio.Task[str | None]] = set()

    async def answered(self, call: Call, usage: Usage | None) -> str | None:
        """Compare what the engine reports with what was expected; the reason, None where it reports nothing.

        Goes on where the client leaves meanwhile.
        """
        task = asyncio.create_task(self._answered(call, usage))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _answered(self, call: Call, usage: Usage | None) -> str | None:
        if usage is None or call.worker is None:
            return None
        expected, metrics = call.expected, self._metrics
        labels = (self.model_label(call), call.worker.name)
        metrics.prompt_tokens.labels(*labels).inc(usage.prompt)
        if usage.cached is not None:
            metrics.cached_tokens.labels(*labels).inc(usage.cached)
        if expected is None:
            return None
        metrics.shareable_tokens.labels(*labels).inc(expected.shareable)
        metrics.predicted_tokens.labels(*labels).inc(expected.floored(expected.predicted))
        if usage.cached is None:
            return None
        try:
            return await self._explain(call, expected, usage, labels)
        except Exception as error:  # an answer is not lost for its explanation; the message might hold prompt text
            logger.error("explaining request %s: %s", call.request_id, type(error).__name__)
            return None

    async def _explain(self, call: Call, expected: Expectation, usage: Usage, labels: tuple[str, str]) -> str:
        metrics = self._metrics
        change = self._finding.change(call) if expected.shareable < expected.would_share else None
        why = reason(expected, usage.cached, change)
        if why in ENGINE_CAUSES and call.sent:
            why = deepest(why, await self._words.word(call.worker, call.request_id))
        if usage.cached < expected.floored(expected.predicted) and why != "hint_ignored":
            # What it computed it leaves behind, unless that was not worth it; what it did not find otherwise is gone.
            left = [boundary.key for boundary in call.found.boundaries] if why != "not_worth_it" else []
            self._words.fell_short(call.worker, call.found.prefixes, left, usage.cached)
        if why != "hit":
            metrics.misses.labels(labels[0], why).inc()
        if call.first_byte is not None:
            seconds = call.first_byte - call.arrived
            metrics.first_token.labels(labels[0], cache_label(expected, usage.cached)).observe(seconds)
        if (told := call.explanation) is not None:
            told.model, told.worker, told.sent = labels[0], labels[1], call.sent
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

    def count(self, call: Call) -> None:
        """Count the request itself, however it ended."""
        if call.status >= 400 and call.status != GONE and call.worker is not None and call.expected is not None:
            self._words.refused(call.worker, call.request_id)
        worker = call.worker.name if call.worker is not None else ""
        self._metrics.requests.labels(self.model_label(call), worker, call.endpoint, str(call.status)).inc()

    def model_label(self, call: Call) -> str:
        """The model's name, where it is one."""
        model = call.body.get("model")
        served = isinstance(model, str) and any(worker.serves(model) for worker in self._pool.workers)
        return model if served else UNKNOWN_MODEL
