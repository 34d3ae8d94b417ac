"""A prompt computed by a worker for its prefix alone: again after a restart, or because it is to stay in the cache."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Counter

from proxy.chat.usage import Usage, usage_of
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet, replay_all
from proxy.fleet.part import Part
from proxy.fleet.worker import OWN_REQUESTS, Worker
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import loads
from proxy.pipeline.accounting import Accounting
from proxy.routing.engine_events import OUTCOME_HEADER, EngineEvents, outcome_in
from proxy.routing.prefix_index import PrefixIndex


class Replayed(NamedTuple):
    status: int
    body: bytes
    pin: str = ""  # what became of the wish to pin the prompt, or to release it; empty if the worker does not say

    @property
    def usage(self) -> Usage | None:
        try:
            return usage_of(loads(self.body))
        except ValueError:
            return None


@dataclass(eq=False)
class Replayer:
    _upstream: Upstream
    _prefix_index: PrefixIndex
    _engine_events: EngineEvents
    _timeout: float  # seconds without a byte of the answer

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
        headers = [*self._upstream.own_headers, (b"content-type", b"application/json")]
        headers += [(b"x-request-id", name.encode()), (OUTCOME_HEADER.encode(), b"1")]
        url = worker.address + prompt.endpoint
        answer = await self._upstream.send("POST", url, worker.addressed(headers), raw, self._timeout, fresh=True)
        with contextlib.closing(answer):
            body = await answer.read()
        outcome = outcome_in(answer.header(OUTCOME_HEADER))
        return Replayed(answer.status, body, outcome.pin if outcome is not None else "")


@dataclass(eq=False)
class WarmUp(Part):
    """A worker that has restarted is given the prefixes that save most before it takes requests."""

    name = "warm_up"

    _prefixes: WarmupSet
    _replayer: Replayer
    _accounting: Accounting
    _replays: Counter

    @property
    def held(self) -> int:  # type: ignore[override]  # bytes of prompts
        return self._prefixes.held

    async def prepare(self, worker: Worker) -> None:
        if worker.takes_hints:
            await replay_all(
                self._prefixes.hottest(worker.names.templates), lambda prompt: self._replay(prompt, worker)
            )

    async def _replay(self, prompt: WarmupRequest, worker: Worker) -> None:
        try:
            answer = await self._replayer.send(worker, prompt)
            is_done = answer.status == 200
        except (Unreachable, Broken):
            is_done = False
        self._replays.labels(worker.name, "done" if is_done else "failed").inc()
        if is_done:
            self._accounting.replayed(prompt.model, worker, answer.usage)
