"""Answers from the response cache, and what workers compute for lack of one there."""

from __future__ import annotations

import asyncio

from proxy.fleet.pool import WorkerPool
from proxy.http import asgi
from proxy.pipeline import cacheable
from proxy.pipeline.answering import WorkerAnswers
from proxy.pipeline.cacheable import Directives
from proxy.pipeline.dispatch import Dispatcher, Lease
from proxy.pipeline.request import ProxiedRequest
from proxy.pipeline.response_cache import Execution, Hit, Reader, ResponseCache, has_fixed_weights, marked


class CachedAnswers:
    """Answers exact repeats from the cache, and lets identical requests share one execution."""

    def __init__(
        self,
        cache: ResponseCache,
        models: tuple[str, ...],
        pool: WorkerPool,
        dispatcher: Dispatcher,
        of_workers: WorkerAnswers,
    ) -> None:
        """`models` need no header of the client's."""
        self._cache = cache
        self._models = models
        self._pool = pool
        self._dispatcher = dispatcher
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
        sharing = _Sharing(cache, self._dispatcher, request, told)
        lease = self._dispatcher.lease(request)
        try:
            # A stored answer needs no place among those of its key that are under way.
            while not isinstance(found := sharing.hit() or await self._dispatcher.acquire(lease, sharing), Lease):
                is_answered = True
                try:
                    is_answered = await found.deliver(send, watch)
                finally:
                    if is_answered:
                        cache.count(found.result.decode()).inc()
                if is_answered:
                    return
            cache.count("miss").inc()
            if (execution := sharing.execution) is not None:  # with the slot it has one
                execution.begin(asyncio.create_task(self._of_workers.answer(lease, execution.send, execution.watch)))
                await execution.own.deliver(send, watch)
        finally:
            # Its body and name are this request's: they stay until it ends, also when its own client has left.
            if sharing.execution is not None:
                await sharing.execution.ended()


class _Sharing:
    """What one request may share with others."""

    def __init__(self, cache: ResponseCache, dispatcher: Dispatcher, request: ProxiedRequest, told: Directives) -> None:
        self._cache, self._dispatcher, self._request, self._told = cache, dispatcher, request, told
        self._key = cacheable.digest(request, cache.secret)
        self.execution: Execution | None = None  # its own

    def hit(self) -> Hit | None:
        """A stored answer."""
        return None if self._told.no_cache else self._cache.hit(self._key, self._request, self._told.max_age)

    def find(self) -> Hit | Reader | None:
        """What makes a slot unnecessary: a stored answer, or one under way."""
        if self._told.no_cache:
            return None
        if (hit := self.hit()) is not None:
            return hit
        execution = self._cache.execution(self._key, self._request.model)
        return execution.join(self._request, self._dispatcher.joins(self._request)) if execution is not None else None

    def taken(self, lease: Lease) -> None:
        """The request has a slot: others can join it."""
        self.execution = Execution(self._cache, self._key, lease)
