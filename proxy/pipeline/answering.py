"""Having a worker answer: a slot, what its template lacks learnt beside it, and the answer on its way."""

from __future__ import annotations

from typing import Protocol

from proxy.http import asgi
from proxy.pipeline.dispatch import Dispatcher, Lease
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.forward import ResponseRelay
from proxy.pipeline.prompt_reader import PromptReader


class Answering(Protocol):
    """From a request that has been read to the last byte of its answer."""

    async def __call__(self, exchange: Exchange, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """Raises `GatewayError` for what a client is to be told before its answer begins."""


class WorkerAnswers:
    """Answers that workers compute."""

    def __init__(self, dispatcher: Dispatcher, reader: PromptReader, relay: ResponseRelay) -> None:
        self._dispatcher = dispatcher
        self._reader = reader
        self._relay = relay

    async def __call__(self, exchange: Exchange, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """As `Answering` says."""
        async with self._dispatcher.lease(exchange) as lease:
            await self.answer(lease, send, watch)

    async def answer(self, lease: Lease, send: asgi.Send, watch: asgi.ClientWatch) -> None:
        """The same with a slot that is there; whoever took it gives it back."""
        self._reader.learn(lease.exchange)
        await self._relay.forward(lease.exchange, lease, send, watch)
