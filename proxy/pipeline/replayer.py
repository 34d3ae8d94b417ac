"""A prompt computed by a worker for its prefix alone: again after a restart, or because it is to stay in the cache."""

from __future__ import annotations

import os

from proxy.fleet.hot_prefixes import WarmupRequest
from proxy.fleet.worker import Worker
from proxy.http.client import Answer, Upstream
from proxy.routing.engine_events import OUTCOME_HEADER, EngineEvents
from proxy.routing.prefix_index import PrefixIndex


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

    async def send(self, worker: Worker, prompt: WarmupRequest, *, pin: bool | None = None) -> tuple[Answer, bytes]:
        """The worker's answer and its body. `pin`: the engine is to keep the prompt in its cache, or to let it go.

        Its prefixes count as the worker's: those of a pin from now on unless the worker refuses, as its engine then
        tells what became of them, others once it has answered. Raises `Unreachable` or `Broken`.
        """
        hint, name = worker.hint(prompt.found), f"own-{os.urandom(16).hex()}"
        headers = [
            *self._upstream.own_headers,
            (b"content-type", b"application/json"),
            (b"x-request-id", name.encode()),
            (OUTCOME_HEADER.encode(), b"1"),
        ]
        if pin is not None:
            self._engine_events.sent(worker, name, prompt.found.boundaries, hint)
            self._prefix_index.record(prompt.found.boundaries, worker.boot, hint)
        boot, answered = worker.boot, False
        try:
            url, raw = worker.address + prompt.endpoint, prompt.body_with(hint, pin=pin)
            answer = await self._upstream.send(
                "POST", url, worker.addressed(headers), raw, read_timeout=self._timeout, fresh=True
            )
            try:
                body = await answer.read()
            finally:
                answer.close()
            answered = answer.status == 200
        finally:
            if pin is not None and not answered:
                self._engine_events.refused(worker, name)
        if pin is None and answered:
            self._prefix_index.record(prompt.found.boundaries, boot, hint)
        return answer, body
