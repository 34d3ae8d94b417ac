"""A prompt computed by a worker for its prefix alone: again after a restart, or because it is to stay in the cache."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from proxy.fleet.hot_prefixes import WarmupRequest
from proxy.fleet.worker import OWN_REQUESTS, Worker
from proxy.http.client import Upstream
from proxy.routing.engine_events import OUTCOME_HEADER, EngineEvents, outcome_in
from proxy.routing.prefix_index import PrefixIndex


class Replayed(NamedTuple):
    """A worker's answer."""

    status: int
    body: bytes
    pin: str = ""  # what became of the wish to pin the prompt, or to release it; empty if the worker does not say


class Replayer:
    """Sends prompts for one token."""

    def __init__(
        self, upstream: Upstream, prefix_index: PrefixIndex, engine_events: EngineEvents, timeout: float
    ) -> None:
        """`timeout` in seconds without a byte of the answer."""
        self._upstream = upstream
        self._prefix_index = prefix_index
        self._engine_events = engine_events
        self._timeout = timeout

    async def send(self, worker: Worker, prompt: WarmupRequest, *, pin: bool | None = None) -> Replayed:
        """The worker's answer. `pin`: the engine is to keep the prompt in its cache, or to let it go.

        Its prefixes count as the worker's: those of a pin from now on unless the worker refuses, as its engine then
        tells what became of them, others once it has answered. Raises `Unreachable` or `Broken`.
        """
        hint, name = worker.hint(prompt.found), f"{OWN_REQUESTS}{os.urandom(16).hex()}"
        if pin is None:
            boot = worker.boot
            answer = await self._ask(worker, prompt, prompt.body_with(hint), name)
            if answer.status == 200:
                self._prefix_index.record(prompt.found.boundaries, boot, hint)
            return answer
        events, answered = self._engine_events, False
        events.sent(worker, name, prompt.found.boundaries, hint)
        self._prefix_index.record(prompt.found.boundaries, worker.boot, hint)
        with events.pin_asked(worker, name) as fate:
            try:
                answer = await self._ask(worker, prompt, prompt.body_with(hint, pin=pin), name)
                answered = answer.status == 200
            finally:
                if not answered:
                    events.refused(worker, name)
            # No middleware, or the answer was faster than the engine's report: the report alone says it.
            return answer if answer.pin or not answered else answer._replace(pin=await fate())

    async def _ask(self, worker: Worker, prompt: WarmupRequest, raw: bytes, name: str) -> Replayed:
        headers = [
            *self._upstream.own_headers,
            (b"content-type", b"application/json"),
            (b"x-request-id", name.encode()),
            (OUTCOME_HEADER.encode(), b"1"),
        ]
        answer = await self._upstream.send(
            "POST",
            worker.address + prompt.endpoint,
            worker.addressed(headers),
            raw,
            read_timeout=self._timeout,
            fresh=True,
        )
        with contextlib.closing(answer):
            body = await answer.read()
        outcome = outcome_in(answer.header(OUTCOME_HEADER))
        return Replayed(answer.status, body, outcome.pin if outcome is not None else "")
