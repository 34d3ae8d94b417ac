"""Answers from the response cache, and what workers compute for lack of one there."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from proxy.fleet.pool import WorkerPool
from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.pipeline import cacheable
from proxy.pipeline.answering import WorkerAnswers
from proxy.pipeline.request import ProxiedRequest
from proxy.pipeline.response_cache import Execution, ResponseCache, Source, has_fixed_weights, marked


class CachedAnswers:
    """Answers exact repeats from the cache, and lets identical requests share one execution."""

    def __init__(
        self, cache: ResponseCache, models: tuple[str, ...], pool: WorkerPool, of_workers: WorkerAnswers
    ) -> None:
        """`models` need no header of the client's."""
        self._cache = cache
        self._models = models
        self._pool = pool
        self._of_workers = of_workers

    async def __call__(self, request: ProxiedRequest, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """As `Answering` says."""
        cache, client = self._cache, request.client
        if client.method != "POST" or client.path not in cacheable.CACHEABLE:
            await self._of_workers(request, send, watch)
            return
        if not self._pool.up:
            with request.timings.waiting():
                await self._pool.ready()  # else nothing is known of the model's weights
        told = cacheable.directives_in(client.headers)
        allowed = cacheable.is_allowed(client.headers, request.model, self._models)
        allowed = allowed and has_fixed_weights(request.model, self._pool.workers)
        if told.no_store or not allowed or not cacheable.is_repeatable(request):
            cache.count("bypass").inc()
            await self._of_workers(request, marked(send, b"bypass"), watch)
            return
        key = cacheable.digest(request, cache.secret)
        while not told.no_cache:
            if (entry := cache.get(key, request.model, told.max_age)) is not None:
                cache.count("hit").inc()
                await entry.deliver(request, send, watch)
                return
            if (execution := cache.execution(key, request.model)) is None:
                break
            is_answered = True
            try:
                is_answered = await execution.deliver(request, b"joined", send, watch)
            finally:
                if is_answered:
                    cache.count("joined").inc()
            if is_answered:
                return
        cache.count("miss").inc()
        execution = Execution(cache, key, request)
        given_to = partial(_note_source, execution, request.model)
        execution.begin(asyncio.create_task(self._of_workers(request, execution.send, execution.watch, given_to)))
        try:
            await execution.deliver(request, b"miss", send, watch)
        finally:
            # Its body, name and slot are this request's: they stay until it ends, also when its own client has left.
            await execution.ended()


def _note_source(execution: Execution, model: Any, worker: Worker) -> None:
    execution.source = Source.of(worker, model)
