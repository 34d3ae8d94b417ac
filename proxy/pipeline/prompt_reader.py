"""From the body of any API to the chat in it, and to its boundaries.

No request waits for a worker here; what is asked beside it is asked once it has a slot. A failure here costs the hint,
never the request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from proxy.boundaries.boundary import Found, resolve, resolved_positions
from proxy.boundaries.divergence import DivergenceLearner
from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.finder import BoundaryFinder
from proxy.boundaries.positions import HeadPositions, PositionCache
from proxy.boundaries.renderer import RenderFailed
from proxy.boundaries.template_facts import setting_of
from proxy.chat.chat import Chat
from proxy.chat.reader import chat_in
from proxy.chat.responses import StoredResponses
from proxy.chat.rewrites import rewrite
from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker, prompt_of
from proxy.http.json_body import parse_object, with_edits
from proxy.http.known_bodies import KnownBodies
from proxy.idle_work import beside
from proxy.metrics import Metrics
from proxy.observability.request_diff import RememberedRequest, RequestMemory
from proxy.observability.shadow import ReadPrompt
from proxy.pipeline.exchange import Exchange, Prompt
from proxy.settings import Settings

logger = logging.getLogger("seamark.prompt_reader")
TOKENS_PER_BYTE = 0.25  # tokens of a byte of a request's body until answers have told better
NEW_WEIGHT = 0.1  # what one answer counts in the mean of its model
MAX_MODELS = 256


class PromptReader:
    """All that is remembered of prompts. One per gateway."""

    def __init__(self, settings: Settings, metrics: Metrics, facts: FactsLearner, pool: WorkerPool) -> None:
        self._pool = pool
        self._metrics = metrics
        self._rules = frozenset(settings.rewrite)
        self._limits = settings.json_limits
        self._most_values = settings.max_boundary_values
        self._facts = facts
        self.positions = PositionCache(settings.memory_bytes // 2)
        self.learner = DivergenceLearner(settings.text_bytes * 3 // 8)
        self.recent = RequestMemory(settings.text_bytes // 4)
        self.stored = StoredResponses(settings.text_bytes // 8)
        self.told = self.positions.put  # an engine has told the tokens up to the place that a content key names
        room = settings.text_bytes // 8 * (not settings.shadow)  # which needs it itself
        self.bodies = KnownBodies(room, *settings.json_limits, settings.max_boundary_values)
        self._finder = BoundaryFinder(self.positions, self.learner)
        self._heads = HeadPositions(self.positions)
        self._tokens_per_byte: dict[str, float] = {}

    @property
    def held(self) -> int:
        return self.learner.held + self.recent.held + self.stored.held + self.bodies.held

    async def find(self, exchange: Exchange) -> None:
        """Read the prompt of a parsed request, once workers are there that serve its model."""
        if not (workers := self._pool.listing(exchange.model)):
            with exchange.timings.waiting():
                workers = await self._pool.find(exchange.model)
        exchange.prompt = self.read(exchange, workers)

    def read(self, exchange: Exchange, workers: Sequence[Worker]) -> Prompt:
        """Apply the rewrite rules to a parsed request, and find its boundaries. Never raises, whatever it holds.

        `workers`: those that serve its model. None is asked anything: a request that has no slot may be refused.
        """
        # What was read before a failure counts.
        rewrites: tuple[str, ...] = ()
        tokens, chat = 0, None
        prompt = Prompt(found=Found(failure="no_boundary"))
        try:
            rewrites = self._rewrite(exchange)
            rate = self._rate(exchange.model)
            tokens = round(len(exchange.body.raw) * rate)
            if exchange.body.memory.values <= self._most_values:
                chat = self._chat_in(exchange)
                prompt = self._bounded(exchange, chat, rate, workers)
        except Exception as error:
            # The kind alone: the message of an unexpected error might hold prompt text.
            logger.error("boundary of request %s: %s", exchange.head.request_id, type(error).__name__)
            prompt = Prompt(found=Found(failure="no_facts"))
        if prompt.found is not None:
            self._metrics.lookups[(prompt.found.result,)] += 1
        prompt.chat, prompt.tokens, prompt.rewrites = chat, tokens, rewrites
        return prompt

    def _bounded(self, exchange: Exchange, chat: Chat | None, rate: float, workers: Sequence[Worker]) -> Prompt:
        size = len(exchange.body.raw)
        serving = [worker for worker in workers if worker.engine is not None]
        may_learn = not exchange.keep
        if not serving and len(workers) > 1:  # what is recorded of it keeps a conversation where its prefix is
            found = self._finder.find(chat, None, b"", size, rate, by_texts=may_learn)
            return Prompt(found=replace(found, failure="unpatched"))
        if not serving:
            return Prompt(found=Found(failure="unpatched"))
        model: Any = chat.body.get("model") if chat is not None else None
        worker = next((each for each in serving if each.renderer_id(exchange.model)), serving[0])
        renderer_id = worker.renderer_id(model) or b""
        facts = template_of = None
        if chat is not None and renderer_id and not chat.is_bare:
            facts, template_of = self._facts.facts(renderer_id, setting_of(chat.body)), worker
        found = self._finder.find(chat, facts, renderer_id, size, rate, by_texts=may_learn and len(serving) > 1)
        if (known := exchange.body.known) is not None and found.layout is not None:
            known.keys = found.layout.keys.of(known.messages)
        memory, owner = exchange.body.memory.size, exchange.head.owner
        remembered = self._remember(chat, found, memory, owner) if may_learn else None
        return Prompt(found=found, remembered=remembered, facts=facts, template_of=template_of)

    def _rate(self, model: Any) -> float:
        return self._tokens_per_byte.get(model, TOKENS_PER_BYTE) if isinstance(model, str) else TOKENS_PER_BYTE

    async def find_boundaries(
        self, chat: Chat, worker: Worker, size: int, memory: int, owner: str | None
    ) -> ReadPrompt:
        """The boundaries of a chat that `worker`, one without the plugin, has answered already.

        It came as `size` bytes with the API key `owner`, and takes `memory`. Its prompt is rendered for that, once.
        """
        found = await self._found_at(chat, worker, size, owner)
        if found.layout is None:
            return ReadPrompt(found)
        try:
            prompt = await prompt_of(chat, worker)
        except RenderFailed:
            return ReadPrompt(Found(failure="no_facts"))
        entries = found.entries()
        positions = resolved_positions(entries, resolve(entries, prompt))
        placed = (
            replace(boundary, tokens=positions.get(boundary.entry, 0) if boundary.entry is not None else 0)
            for boundary in found.boundaries
        )
        boundaries = tuple(sorted((each for each in placed if each.tokens), key=lambda boundary: boundary.tokens))
        found = replace(found, boundaries=boundaries)
        return ReadPrompt(found, self._remember(chat, found, memory, owner), prompt)

    async def find_beside(self, exchange: Exchange, worker: Worker) -> Found:
        """The boundaries, at `worker`, of a parsed request that no client waits for: what they lack is learnt first."""
        self._rewrite(exchange)
        head, body = exchange.head, exchange.body
        chat = self._chat_in(exchange)
        if chat is None or body.memory.values > self._most_values:
            return Found(failure="no_boundary")
        found = await self._found_at(chat, worker, len(body.raw), head.owner)
        self._heads.learn(found, worker.renderer, head.owner)  # for the next time
        return found

    def _chat_in(self, exchange: Exchange) -> Chat | None:
        """The chat in a parsed request; None if there is none."""
        chat = chat_in(exchange.head.endpoint, exchange.body.parsed, self.stored, exchange.head.owner)
        if chat is not None and (known := exchange.body.known) is not None and known.keys is not None:
            chat.continues = known.keys
        if chat is None or (key := self._pool.key_of(exchange.model)) == exchange.body.parsed.get("model"):
            return chat
        chat.model = key
        return chat

    async def _found_at(self, chat: Chat, worker: Worker, size: int, owner: str | None) -> Found:
        """The boundaries of a chat of `size` bytes at `worker`, whose template is learnt if it is not known."""
        model = worker.template_of(chat.body.get("model"))
        if model in worker.unrendered_models and worker.renderer_id(model) is None:
            return Found(failure="no_facts")
        if (renderer_id := await worker.identify(model)) is None:
            worker.unrendered_models.add(model)  # else every request would ask it again
            return Found(failure="no_facts")
        setting = setting_of(chat.body)
        await self._facts.learn(worker.renderer, renderer_id, model, setting, owner)
        return self._finder.find(chat, self._facts.facts(renderer_id, setting), renderer_id, size)

    def learn_tokens_per_byte(self, model: Any, size: int, prompt: int) -> None:
        """A request of `size` bytes had a prompt of so many tokens."""
        if isinstance(model, str) and size:
            known = self._rate(model)
            self._tokens_per_byte[model] = known + NEW_WEIGHT * (prompt / size - known)
            if len(self._tokens_per_byte) > MAX_MODELS:
                del self._tokens_per_byte[next(iter(self._tokens_per_byte))]

    def learn(self, exchange: Exchange) -> None:
        """The request has a slot: have learnt, beside it, what its boundaries lacked."""
        prompt, owner = exchange.prompt, exchange.head.owner
        if (worker := prompt.template_of) is None or prompt.chat is None or prompt.found is None:
            return
        if prompt.facts is None or not prompt.facts.is_own:
            renderer_id, setting = worker.renderer_id(prompt.chat.body.get("model")), setting_of(prompt.chat.body)
            if renderer_id is not None and self._facts.wants(renderer_id, setting, owner):
                model = worker.template_of(exchange.model)
                beside(self._facts.learn(worker.renderer, renderer_id, model, setting, owner))
        if prompt.facts is not None and prompt.found.unplaced:
            self._heads.learn(prompt.found, worker.renderer, owner)

    def _rewrite(self, exchange: Exchange) -> tuple[str, ...]:
        """Apply the rules that are on; returns their names."""
        body = exchange.body
        rewritten = rewrite(body.parsed, self._rules, exchange.head.endpoint)
        for name in rewritten.applied:
            self._metrics.rewrites.labels(name, "true").inc()
        for name in rewritten.could:
            self._metrics.rewrites.labels(name, "false").inc()
        if not rewritten.edits:
            return ()
        body.raw = with_edits(body.raw, rewritten.edits)
        exchange.take(parse_object(body.raw, *self._limits), body.strips_usage)
        return rewritten.applied

    def _remember(self, chat: Chat | None, found: Found, memory: int, owner: str | None) -> RememberedRequest | None:
        if chat is None or chat.is_bare or found.layout is None:
            return None
        remembered = RememberedRequest(found.layout, memory, owner)
        self.recent.add(remembered)
        return remembered
