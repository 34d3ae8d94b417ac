"""From the body of any API to the chat in it, and to its boundaries.

A failure here costs the hint, never the request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from proxy.boundaries.boundary import Found
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.learned import DivergenceLearner
from proxy.boundaries.positions import PositionCache
from proxy.chat.chat import Chat
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses
from proxy.chat.rewrites import rewrite
from proxy.fleet.worker import Worker
from proxy.http.json_body import parse_object, with_edits
from proxy.metrics import Metrics
from proxy.observability.reasons import Explanation, Explanations
from proxy.observability.request_diff import RememberedRequest, RequestMemory
from proxy.observability.shadow import ReadPrompt
from proxy.pipeline.request import ProxiedRequest
from proxy.settings import Settings

logger = logging.getLogger("seamark.prompt_reader")


class PromptReader:
    """All that is remembered of prompts. One per gateway."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lookups = cache(metrics.lookups.labels)
        self._rules = frozenset(settings.rewrite)
        self.positions = PositionCache(settings.memory_bytes // 2)
        self.learner = DivergenceLearner(settings.text_bytes * 3 // 8)
        self.recent = RequestMemory(settings.text_bytes // 4)
        self.stored = StoredResponses(settings.text_bytes // 8)
        self.explanations = Explanations()
        self._finder = BoundaryFinder(self.positions, self.learner)

    async def read(self, request: ProxiedRequest, workers: Sequence[Worker]) -> None:
        """Apply the rewrite rules to a parsed request, and find its boundaries. Never raises, whatever it holds."""
        client, prediction = request.client, request.prediction
        explanation = request.explanation = Explanation(client.request_id, client.endpoint, owner=client.owner)
        found = Found(failure="unpatched")
        try:
            explanation.rewrites = self._rewrite(request)
            prediction.chat = chat = chat_in(client.endpoint, request.body.parsed, self.stored)
            model = request.model
            renders = next((worker for worker in workers if worker.engine is not None and worker.serves(model)), None)
            if renders is not None:
                renderer_id = renders.renderer_ids.get(model, b"")
                found = await self._finder.find(chat, renders.fast or renders.renderer, renderer_id)
                prediction.remembered = self._remember(chat, found, len(request.body.raw), client.owner)
        except Exception as error:
            # The kind alone: the message of an unexpected error might hold prompt text.
            logger.error("boundary of request %s: %s", client.request_id, type(error).__name__)
            found = Found(failure="render_failed")
        prediction.found = found
        explanation.lookup, explanation.renders = found.result, found.renders
        explanation.boundaries = tuple((boundary.tokens, boundary.kind) for boundary in found.boundaries)
        self._lookups(found.result).inc()
        if found.renders:
            self._metrics.renders.inc(found.renders)
        self.explanations.add(explanation)

    async def find_boundaries(self, chat: Chat, worker: Worker, size: int, owner: str | None) -> ReadPrompt:
        """The boundaries of a chat of `size` bytes that `worker`, one without the plugin, has answered already.

        `owner` is the API key it came with.
        """
        model = chat.body.get("model")
        if not isinstance(model, str) or not worker.serves(model):
            return ReadPrompt(Found(failure="no_boundary"))
        if model in worker.mute_models and model not in worker.renderer_ids:
            return ReadPrompt(Found(failure="render_failed"))
        if not await worker.identify(model):
            worker.mute_models.add(model)  # else every request would ask it again
            return ReadPrompt(Found(failure="render_failed", renders=1))
        found = await self._finder.find(chat, worker.fast or worker.renderer, worker.renderer_ids[model])
        if found.renders:
            self._metrics.renders.inc(found.renders)
        return ReadPrompt(found, self._remember(chat, found, size, owner))

    def _rewrite(self, request: ProxiedRequest) -> tuple[str, ...]:
        """Apply the rules that are on; returns their names."""
        body = request.body
        rewritten = rewrite(body.parsed, self._rules, request.client.endpoint)
        for name in rewritten.applied:
            self._metrics.rewrites.labels(name, "true").inc()
        for name in rewritten.could:
            self._metrics.rewrites.labels(name, "false").inc()
        if not rewritten.edits:
            return ()
        body.raw = with_edits(body.raw, rewritten.edits)
        body.take(parse_object(body.raw), request.client, body.strips_usage)
        return rewritten.applied

    def _remember(self, chat: Chat | None, found: Found, size: int, owner: str | None) -> RememberedRequest | None:
        if chat is None or chat.is_bare or found.layout is None:
            return None
        remembered = RememberedRequest(found.layout, found.tokens, size, owner)
        self.recent.add(remembered)
        return remembered
