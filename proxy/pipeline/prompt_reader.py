"""From the body of any API to the chat in it, and to its boundaries.

Whatever fails here costs the hint, never the request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from proxy.boundaries.boundary import Found
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.learned import DivergenceLearner
from proxy.boundaries.positions import PositionCache
from proxy.chat.chat import RESPONSES, Chat
from proxy.chat.responses import StoredResponses
from proxy.chat.rewrites import rewrite
from proxy.fleet.worker import Worker
from proxy.http.json_body import parse_object, with_edits
from proxy.metrics import Metrics
from proxy.observability.reasons import Explanation, Explanations
from proxy.observability.request_diff import PrefixChange, RememberedRequest, RequestMemory
from proxy.observability.shadow import Looked
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.pipeline.request import ProxiedRequest

from proxy.chat.reader import chat_in

logger = logging.getLogger("seamark.finding")


class PromptReader:
    """All that is remembered of prompts. One per gateway."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lookups = cache(metrics.lookups.labels)
        self._rules = frozenset(settings.rewrite)
        self.memory = PositionCache(settings.memory_bytes // 2)
        self.learner = DivergenceLearner(settings.text_bytes * 3 // 8)
        self.recent = RequestMemory(settings.text_bytes // 4)
        self.stored = StoredResponses(settings.text_bytes // 8)
        self.explanations = Explanations()
        self._finder = BoundaryFinder(self.memory, self.learner)

    async def read(self, call: ProxiedRequest, workers: Sequence[Worker]) -> None:
        """Apply the rewrite rules to a parsed request, and find its boundaries. Never raises for what it holds."""
        call.explanation = Explanation(call.request_id, call.endpoint, owner=call.owner)
        call.found = Found(failure="unpatched")
        try:
            self._rewrite(call)
            call.chat = chat_in(call.endpoint, call.body, self.stored)
            model = call.body.get("model")
            renders = next((worker for worker in workers if worker.engine is not None and worker.serves(model)), None)
            if renders is not None:
                renderer_id = renders.renderer_ids.get(model, b"")
                call.found = await self._finder.find(call.chat, renders.fast or renders.renderer, renderer_id)
                self._remember(call)
        except Exception as error:
            # The kind alone: the message of an unexpected error might hold prompt text.
            logger.error("boundary of request %s: %s", call.request_id, type(error).__name__)
            call.found = Found(failure="render_failed")
        found = call.found
        call.explanation.lookup, call.explanation.renders = found.result, found.renders
        call.explanation.boundaries = tuple((boundary.tokens, boundary.kind) for boundary in found.boundaries)
        self._lookups(found.result).inc()
        if found.renders:
            self._metrics.renders.inc(found.renders)
        self.explanations.add(call.explanation)

    async def look(self, chat: Chat, worker: Worker, size: int, owner: str | None) -> Looked:
        """At a request of `size` bytes that `worker`, one without the plugin, has answered already.

        `owner` is the API key it came with.
        """
        model = chat.body.get("model")
        if not worker.serves(model):
            return Looked(Found(failure="no_boundary"))
        if model in worker.mute_models and model not in worker.renderer_ids:
            return Looked(Found(failure="render_failed"))
        if not await worker.identify(model):
            worker.mute_models.add(model)  # else every request would ask it again
            return Looked(Found(failure="render_failed", renders=1))
        found = await self._finder.find(chat, worker.fast or worker.renderer, worker.renderer_ids[model])
        if found.renders:
            self._metrics.renders.inc(found.renders)
        if found.layout is None or chat.is_bare:
            return Looked(found)
        recent = RememberedRequest(found.layout, found.tokens, size, owner)
        self.recent.add(recent)
        return Looked(found, recent)

    def answered(self, call: ProxiedRequest, answer: Any) -> None:
        """A whole answer has come; of a response, what a later request may continue is remembered."""
        wanted = call.endpoint == RESPONSES and call.chat is not None and call.worker is not None
        if wanted and call.body.get("store", True):
            self.stored.put(call.chat, answer, call.worker.boot, call.owner)

    def change(self, call: ProxiedRequest) -> PrefixChange | None:
        """Where the request leaves the nearest recent one in the middle."""
        return self.recent.change(call.recent) if call.recent is not None else None

    def _rewrite(self, call: ProxiedRequest) -> None:
        rewritten = rewrite(call.body, self._rules, call.endpoint)
        for name in rewritten.applied:
            self._metrics.rewrites.labels(name, "true").inc()
        for name in rewritten.could:
            self._metrics.rewrites.labels(name, "false").inc()
        if rewritten.edits:
            call.raw = with_edits(call.raw, rewritten.edits)
            call.take_body(parse_object(call.raw), call.strips_usage)
            call.explanation.rewrites = rewritten.applied

    def _remember(self, call: ProxiedRequest) -> None:
        if call.found.layout is not None and not call.chat.is_bare:
            call.recent = RememberedRequest(call.found.layout, call.found.tokens, len(call.raw), call.owner)
            self.recent.add(call.recent)
