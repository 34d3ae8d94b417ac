"""Answers from the response cache, and what workers compute for lack of one there."""

from __future__ import annotations

from proxy.fleet.pool import WorkerPool
from proxy.http import asgi
from proxy.pipeline import cacheable
from proxy.pipeline.answering import WorkerAnswers
from proxy.pipeline.cacheable import Directives
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.response_cache import Flight, ResponseCache, has_fixed_weights, marked


class CachedAnswers:
    """Answers exact repeats from the cache, and has identical requests wait for the first of them."""

    def __init__(
        self,
        cache: ResponseCache,
        models: tuple[str, ...],
        pool: WorkerPool,
        dispatcher: Dispatcher,
        of_workers: WorkerAnswers,
        patience: float,
    ) -> None:
        """`models` need no header of the client's. A stream waits `patience` seconds for another one; 0: to the end."""
        self._cache = cache
        self._models = models
        self._pool = pool
        self._dispatcher = dispatcher
        self._of_workers = of_workers
        self._patience = patience or None

    async def __call__(self, exchange: Exchange, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """As `Answering` says."""
        cache, head = self._cache, exchange.head
        if head.method != "POST" or head.path not in cacheable.CACHEABLE:
            await self._of_workers(exchange, send, watch)
            return
        if not self._pool.up:
            with exchange.timings.waiting():
                await self._pool.ready()  # else nothing is known of the model's weights
        told = cacheable.directives_in(head.headers)
        allowed = cacheable.is_allowed(head.headers, exchange.model, self._models)
        allowed = allowed and has_fixed_weights(exchange.model, self._pool.workers)
        if told.no_store or not allowed or not cacheable.is_repeatable(exchange):
            cache.count("bypass").inc()
            await self._of_workers(exchange, marked(send, b"bypass"), watch)
            return
        await self._answer(exchange, told, send, watch)

    async def _answer(self, exchange: Exchange, told: Directives, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """From what is stored, after waiting for an equal request that is being computed, or from a worker."""
        cache, api_key, result = self._cache, exchange.head.key, b"hit"
        key, may_wait = cacheable.digest(exchange, cache.secret), not told.no_cache and told.max_age != 0
        lease = self._dispatcher.lease(exchange)
        try:
            while not told.no_cache:
                if (entry := cache.find(key, exchange.model, told.max_age)) is not None:
                    lease.unused()
                    cache.count(result.decode()).inc()
                    await cache.deliver(key, entry, exchange, result, send, watch)
                    return
                flight = cache.flight(key) if may_wait else None
                if flight is not None and (lease.has_slot or api_key is None or api_key.has_room):
                    result, may_wait = b"joined", False
                    with exchange.timings.waiting(), self._dispatcher.counted(api_key):
                        lease.unused()
                        await flight.wait(self._patience if exchange.body.parsed.get("stream") else None)
                elif lease.has_slot:
                    break
                else:  # an equal request may begin or end meanwhile
                    await self._dispatcher.acquire(lease)
            if not lease.has_slot:
                await self._dispatcher.acquire(lease)
            cache.count("miss").inc()
            with Flight(cache, key, exchange, send) as flight:
                await self._of_workers.answer(lease, flight.send, watch)
        finally:
            lease.release()
