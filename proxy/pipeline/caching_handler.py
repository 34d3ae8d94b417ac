"""The ASGI entry of a gateway with a response cache; without one, the gateway has the plain `RequestHandler`."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.http import asgi
from proxy.pipeline import cacheable
from proxy.pipeline.handler import RequestHandler
from proxy.pipeline.request import ProxiedRequest
from proxy.pipeline.response_cache import Execution, ResponseCache, Source, has_fixed_weights, marked


class CachingHandler(RequestHandler):
    """Answers exact repeats from the cache, and lets identical requests share one execution."""

    def __init__(self, cache: ResponseCache, models: tuple[str, ...], *parts: Any) -> None:
        """`models` need no header of the client's; `parts` are those of a `RequestHandler`."""
        super().__init__(*parts)
        self._cache = cache
        self._models = models

    async def _answer(self, request: ProxiedRequest, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        cache, client = self._cache, request.client
        if client.method != "POST" or client.path not in cacheable.CACHEABLE:
            await super()._answer(request, send, watch)
            return
        if not self._pool.up:
            await self._pool.ready()  # else nothing is known of the model's weights
        told = cacheable.directives_in(client.headers)
        allowed = cacheable.is_allowed(client.headers, request.model, self._models)
        allowed = allowed and has_fixed_weights(request.model, self._pool.workers)
        if told.no_store or not allowed or not cacheable.is_repeatable(request):
            cache.count("bypass").inc()
            await self._execute(request, None, marked(send, b"bypass"), watch)
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
        execution.begin(asyncio.create_task(self._execute(request, execution, execution.send, execution.watch)))
        try:
            await execution.deliver(request, b"miss", send, watch)
        finally:
            # Its body, name and slot are this request's: they stay until it ends, also when its own client has left.
            await execution.ended()

    async def _execute(
        self, request: ProxiedRequest, execution: Execution | None, send: asgi.Send, watch: asgi.ClientWatch
    ) -> None:
        """Have a worker answer."""
        async with self._dispatcher.lease(request) as lease:
            self._reader.learn(request)
            if execution is not None:
                execution.source = Source.of(lease.worker, request.model)
            await self._relay.forward(request, lease, send, watch)
