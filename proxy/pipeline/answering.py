"""Having a worker answer: a slot, what its template lacks learnt beside it, and the answer on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.forward import ResponseRelay
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.request import ProxiedRequest


class Answering(Protocol):
    """From a request that has been read to the last byte of its answer."""

    async def __call__(self, request: ProxiedRequest, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """Raises `GatewayError` for what a client is to be told before its answer begins."""


def _nothing(worker: Worker) -> None:
    """Nobody wants to know."""


class WorkerAnswers:
    """Answers that workers compute."""

    def __init__(self, dispatcher: Dispatcher, reader: PromptReader, relay: ResponseRelay) -> None:
        self._dispatcher = dispatcher
        self._reader = reader
        self._relay = relay

    async def __call__(
        self,
        request: ProxiedRequest,
        send: asgi.Send,
        watch: asgi.ClientWatch,
        given_to: Callable[[Worker], None] = _nothing,
    ) -> None:
        """`given_to` is called with the worker before the request goes there."""
        async with self._dispatcher.lease(request) as lease:
            self._reader.learn(request)
            given_to(lease.worker)
            await self._relay.forward(request, lease, send, watch)
