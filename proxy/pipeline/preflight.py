"""A browser's question whether a page of another site may ask: it carries no key, and the worker answers it.

Whoever started the worker decides which sites may ask (vLLM's `--allowed-origins`; all, if it is not given). So the
gateway forwards the question, without a slot: nobody with a key may have to wait behind those without one.
"""

from __future__ import annotations

from dataclasses import dataclass

from proxy.errors import Overloaded, WorkerFailed
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.http import asgi
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.pipeline.exchange import target_of

MOST_AT_ONCE = 32

ANSWER_SECONDS = 5.0

MOST_ANSWER_BYTES = 2**16

# What a worker answers to every site if it lets all of them in, as vLLM does by default.
ANY_SITE = (b"access-control-allow-origin", b"*")


def is_preflight(scope: asgi.Scope) -> bool:
    """Whether a browser asks, by the Fetch standard, before it sends a request of another site's page."""
    return (
        scope["method"] == "OPTIONS"
        and asgi.header(scope, b"origin") is not None
        and asgi.header(scope, b"access-control-request-method") is not None
    )


@dataclass(eq=False)
class Preflights:
    """Has a worker answer, within bounds."""

    _pool: WorkerPool
    _upstream: Upstream
    _under_way: int = 0

    async def answer(self, scope: asgi.Scope, request_id: str, send: asgi.Send) -> None:
        """Pass on what a worker says. Raises `NotFound`, `NoWorker`, `Overloaded` or `WorkerFailed`."""
        workers = await self._pool.ready()
        if not workers:
            raise no_worker("No worker is ready.", self._pool.workers)
        if self._under_way >= MOST_AT_ONCE:
            raise Overloaded("Too many preflight requests at once.")
        headers = asgi.end_to_end(scope["headers"], asgi.RECOMPUTED_WITH_KEY)
        self._under_way += 1
        try:
            url = workers[0].address + target_of(scope)
            answer = await self._upstream.send("OPTIONS", url, headers, read_timeout=ANSWER_SECONDS)
            try:
                body = b""
                async for chunk in answer.chunks():
                    body += chunk
                    if len(body) > MOST_ANSWER_BYTES:
                        raise WorkerFailed("The worker's answer to a preflight request is too large.")
            finally:
                answer.close()
        except (Unreachable, Broken):
            raise WorkerFailed("The worker did not answer a preflight request.") from None
        finally:
            self._under_way -= 1
        named = (b"x-request-id", request_id.encode("latin-1"))
        await asgi.send_whole(send, answer.status, [*asgi.end_to_end(answer.headers, asgi.OWN_RESPONSE), named], body)
