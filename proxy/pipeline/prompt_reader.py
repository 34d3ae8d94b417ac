"""From the body of any API to the chat in it, and to its boundaries.

A request waits for a worker only where its system prompt tells a date, and once for each text before one. A failure
here costs the hint, never the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import cache
from typing import Any

from cachetools import LRUCache

from proxy.boundaries.boundary import Found, Place, resolved_positions
from proxy.boundaries.dates import piece_of
from proxy.boundaries.divergence import DivergenceLearner
from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.head_positions import HeadPositions
from proxy.boundaries.positions import PositionCache
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.resolve import resolve
from proxy.boundaries.template_facts import setting_of
from proxy.chat.chat import Chat
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses
from proxy.chat.rewrites import rewrite
from proxy.fleet.worker import Worker, prompt_of
from proxy.http.json_body import parse_object, with_edits
from proxy.metrics import Metrics
from proxy.observability.reasons import Explanation, Explanations
from proxy.observability.request_diff import RememberedRequest, RequestMemory
from proxy.observability.shadow import ReadPrompt
from proxy.pipeline.request import ProxiedRequest
from proxy.settings import Settings

logger = logging.getLogger("seamark.prompt_reader")

# Tokens of a byte of a request's body until answers have told better.
TOKENS_PER_BYTE = 0.25

# What one answer counts in the mean of its model.
NEW_WEIGHT = 0.1

MAX_MODELS = 256

# Seconds that a request waits at most for the tokens before its date. A worker's API server usually has them in two
# milliseconds.
DATE_SECONDS = 0.05


class PromptReader:
    """All that is remembered of prompts. One per gateway."""

    def __init__(self, settings: Settings, metrics: Metrics, facts: FactsLearner) -> None:
        self._metrics = metrics
        self._lookups = cache(metrics.lookups.labels)
        self._rules = frozenset(settings.rewrite)
        self._limits = settings.max_json_depth, settings.max_json_values
        self._most_values = settings.max_boundary_values
        self._facts = facts
        self.positions = PositionCache(settings.memory_bytes // 2)
        self.learner = DivergenceLearner(settings.text_bytes * 3 // 8)
        self.recent = RequestMemory(settings.text_bytes // 4)
        self.stored = StoredResponses(settings.text_bytes // 8)
        self.explanations = Explanations()
        self.told = self.positions.put  # an engine has told the tokens up to the place that a content key names
        self._finder = BoundaryFinder(self.positions, self.learner)
        self._heads = HeadPositions(self.positions)
        self._learning: set[asyncio.Task[None]] = set()
        self._tokens_per_byte: LRUCache[Any, float] = LRUCache(MAX_MODELS)

    async def read(self, request: ProxiedRequest, workers: Sequence[Worker]) -> None:
        """Apply the rewrite rules to a parsed request, and find its boundaries. Never raises, whatever it holds."""
        client, prediction = request.client, request.prediction
        explanation = request.explanation = Explanation(client.request_id, client.endpoint, owner=client.owner)
        found = Found(failure="unpatched")
        try:
            explanation.rewrites = self._rewrite(request)
            model = request.model
            size = len(request.body.raw)
            rate = self._tokens_per_byte.get(model, TOKENS_PER_BYTE) if isinstance(model, str) else TOKENS_PER_BYTE
            prediction.prompt = round(size * rate)
            memory = request.body.memory
            serving = [worker for worker in workers if worker.engine is not None and worker.serves(model)]
            if memory.values > self._most_values:
                found = Found(failure="no_boundary")
            else:
                prediction.chat = chat_in(client.endpoint, request.body.parsed, self.stored)
            if serving and found.failure != "no_boundary":
                worker = next((each for each in serving if model in each.renderer_ids), serving[0])
                chat = prediction.chat
                found = self._find(chat, worker, size, rate, several=len(serving) > 1)
                if found.dated is not None and worker.engine is not None and worker.engine.takes_entries:
                    found = await self._with_date(found, found.dated, worker, model)
                prediction.remembered = self._remember(chat, found, memory.size, client.owner)
        except Exception as error:
            # The kind alone: the message of an unexpected error might hold prompt text.
            logger.error("boundary of request %s: %s", client.request_id, type(error).__name__)
            found = Found(failure="no_facts")
        prediction.found = found
        explanation.lookup = found.result
        explanation.boundaries = tuple((boundary.entry, boundary.kind) for boundary in found.boundaries)
        self._lookups(found.result).inc()
        self.explanations.add(explanation)

    async def find_boundaries(
        self, chat: Chat, worker: Worker, size: int, memory: int, owner: str | None
    ) -> ReadPrompt:
        """The boundaries of a chat that `worker`, one without the plugin, has answered already.

        It came as `size` bytes with the API key `owner`, and takes `memory`. Its prompt is rendered for that, once.
        """
        model = chat.body.get("model")
        if not isinstance(model, str) or not worker.serves(model):
            return ReadPrompt(Found(failure="no_boundary"))
        if model in worker.mute_models and model not in worker.renderer_ids:
            return ReadPrompt(Found(failure="no_facts"))
        if not await worker.identify(model):
            worker.mute_models.add(model)  # else every request would ask it again
            return ReadPrompt(Found(failure="no_facts"))
        renderer_id = worker.renderer_ids[model]
        setting = setting_of(chat.body)
        await self._facts.learn(worker.renderer, renderer_id, model, setting)
        found = self._finder.find(chat, self._facts.facts(renderer_id, setting), renderer_id, size)
        if found.layout is None:
            return ReadPrompt(found)
        try:
            prompt = (await prompt_of(chat, worker)).ids()
        except RenderFailed:
            return ReadPrompt(Found(failure="no_facts"))
        entries = found.entries()
        positions = resolved_positions(entries, resolve(entries, prompt))
        placed = (
            boundary._replace(tokens=positions.get(boundary.entry, 0) if boundary.entry is not None else 0)
            for boundary in found.boundaries
        )
        boundaries = tuple(sorted((each for each in placed if each.tokens), key=lambda boundary: boundary.tokens))
        found = found._replace(boundaries=boundaries)
        return ReadPrompt(found, self._remember(chat, found, memory, owner), prompt)

    def weigh(self, model: Any, size: int, prompt: int) -> None:
        """A request of `size` bytes had a prompt of so many tokens."""
        if isinstance(model, str) and size:
            known = self._tokens_per_byte.get(model, TOKENS_PER_BYTE)
            self._tokens_per_byte[model] = known + NEW_WEIGHT * (prompt / size - known)

    def _find(self, chat: Chat | None, worker: Worker, size: int, rate: float, *, several: bool) -> Found:
        model: Any = chat.body.get("model") if chat is not None else None
        renderer_id = worker.renderer_ids.get(model, b"")
        facts = None
        if chat is not None and renderer_id and not chat.is_bare:
            setting = setting_of(chat.body)
            facts = self._facts.facts(renderer_id, setting)
            if (facts is None or not facts.is_own) and self._facts.wants(renderer_id, setting):
                self._learn_beside(self._facts.learn(worker.renderer, renderer_id, model, setting))
        found = self._finder.find(chat, facts, renderer_id, size, rate, by_texts=several)
        if facts is not None:
            self._heads.learn(found, worker.renderer)
        return found

    async def _with_date(self, found: Found, place: Place, worker: Worker, model: Any) -> Found:
        """The same, with an entry for the end of what precedes the date, if the tokenizer tells one in time."""
        try:
            ids = await asyncio.wait_for(worker.renderer.tokenize(model, piece_of(place.kept)), DATE_SECONDS)
        except (RenderFailed, TimeoutError):
            ids = ()
        entry = self._finder.dates.learn(found.renderer_id, place.key, ids) or None
        boundaries = (each._replace(entry=entry) if each.key == place.key else each for each in found.boundaries)
        return found._replace(boundaries=tuple(boundaries), dated=None)

    def _learn_beside(self, learning: Coroutine[Any, Any, None]) -> None:
        """No request waits for that."""
        task = asyncio.create_task(learning)
        self._learning.add(task)
        task.add_done_callback(self._learning.discard)

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
        body.take(parse_object(body.raw, *self._limits), request.client, body.strips_usage)
        return rewritten.applied

    def _remember(self, chat: Chat | None, found: Found, memory: int, owner: str | None) -> RememberedRequest | None:
        if chat is None or chat.is_bare or found.layout is None:
            return None
        remembered = RememberedRequest(found.layout, memory, owner)
        self.recent.add(remembered)
        return remembered
