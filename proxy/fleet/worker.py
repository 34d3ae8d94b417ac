"""One worker: what it said of itself when it was last probed, what it has to do, and whether its cache may be used."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proxy.boundaries.boundary import Found
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.boundaries.resolve import Entry
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT, Chat
from proxy.fleet.worker_metrics import UNKNOWN, EngineInfo, StepTimes

# Requests in a row that a worker took and gave no byte for; it gets no more until a probe finds it well.
BREAKER_FAILURES = 3

SALT_BYTES = 16


class CircuitBreaker:
    """Opens after `BREAKER_FAILURES` failures in a row."""

    def __init__(self) -> None:
        self._failures = 0

    def failed(self) -> bool:
        """Count a failure; whether the breaker opens with it. The count then starts again."""
        self._failures = (self._failures + 1) % BREAKER_FAILURES
        return not self._failures

    def reset(self) -> None:
        """A request was answered, or the worker has restarted."""
        self._failures = 0


class CacheQuarantine:
    """What of one worker's cache may be used. Quarantine takes two steps: hints and all held states, then the cache."""

    def __init__(self) -> None:
        self.hints_allowed = True  # states may be kept on the worker
        self.cache_allowed = True  # anything may be taken from its cache
        self._salt = ""  # keeps requests away from what was cached before the quarantine; empty: nothing was

    def quarantine(self) -> None:
        """Answers from the cache differed from recomputed ones: take the next step."""
        self.cache_allowed = self.hints_allowed
        self.hints_allowed = False
        self._salt = fresh_salt()

    def restore(self) -> None:
        """An operator has seen to the worker. What was cached before the quarantine stays out of use."""
        self.hints_allowed = self.cache_allowed = True

    def restarted(self) -> None:
        """The worker has restarted, and its cache is empty."""
        self._salt = ""

    def salt(self, body: Mapping[str, Any]) -> str | None:
        """The cache salt to send with the request `body` instead of its own; None if that stands.

        `body` is empty if it was not read: then it is no request for tokens.
        """
        if (self.cache_allowed and not self._salt) or not body:
            return None
        given = body.get("cache_salt")
        if given is None:
            given = ""
        elif not isinstance(given, str) or not given:
            return None  # the worker's to refuse
        return given + (self._salt if self.cache_allowed else fresh_salt())


def fresh_salt() -> str:
    """A salt under which no cache holds anything."""
    return os.urandom(SALT_BYTES).hex()


@dataclass
class Worker:
    """One vLLM server. `boot` changes when it restarts: what it held before is gone then."""

    url: str
    renderer: WorkerRenderer
    max_inflight: int = 0  # requests at it at once, 0 for no limit

    # What the last probe found.
    up: bool = False
    boot: str = ""
    engine: EngineInfo | None = None  # None: no plugin, or the plugin left vLLM untouched
    step_times: StepTimes = UNKNOWN
    # Prompt tokens that its prefix cache gave since its start, as vLLM counts, and how many of them before the gateway
    # first saw it; None: it does not say.
    hits: int | None = None
    hits_before: int | None = None
    cache_tokens: int = 0  # that fit into its cache; 0: it does not say
    probed_at: float = 0.0  # time.perf_counter() before it was asked for these
    models: list[dict[str, Any]] = field(default_factory=list)
    model_ids: frozenset[str] = frozenset()
    renderer_ids: dict[str, bytes] = field(default_factory=dict)  # by model
    mute_models: set[str] = field(default_factory=set)  # that render nothing, as far as was tried

    # What the gateway makes of it.
    cache: CacheQuarantine = field(default_factory=CacheQuarantine)
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    warming: bool = False  # prefixes are replayed on it; it gets requests only if no other worker can take them
    inflight: int = 0
    prefill_tokens: int = 0  # of requests that have not answered yet, as far as it does not hold them
    dispatched: int = 0  # requests ever sent
    answered_at: float = float("-inf")  # time.monotonic() when its last answer began

    @property
    def name(self) -> str:
        """Label in metrics and headers: host and port."""
        return self.url.split("://", 1)[-1]

    @property
    def takes_hints(self) -> bool:
        """Whether states can be kept on it, and may be."""
        return self.engine is not None and self.cache.hints_allowed

    def hint(self, found: Found | None) -> tuple[Entry, ...]:
        """The hint that it gets; an older plugin takes positions only, so just what was told of this very head.

        A worker that renders by another template than the one whose facts were used gets none.
        """
        if found is None or self.engine is None or not self.takes_hints:
            return ()
        if found.renderer_id not in self.renderer_ids.values():
            return ()
        return found.entries(by_template=self.engine.takes_entries)

    @property
    def has_room(self) -> bool:
        """Whether it may get another request."""
        return not self.max_inflight or self.inflight < self.max_inflight

    def answered(self) -> None:
        """It began to answer a request."""
        self.breaker.reset()
        self.answered_at = time.monotonic()

    def serves(self, model: Any) -> bool:
        """Whether `model` is one of its models."""
        return isinstance(model, str) and model in self.model_ids

    async def identify(self, model: Any) -> bool:
        """Whether it is known what `model` is rendered with; asks the worker if it is not known yet."""
        if model not in self.renderer_ids:
            renderer_id = await identify_renderer(self.renderer, model)
            if renderer_id is not None:
                self.renderer_ids[model] = renderer_id
        return model in self.renderer_ids


async def prompt_of(chat: Chat, worker: Worker) -> TokenIds:
    """The prompt as the worker computes it. Raises `RenderFailed`."""
    if chat.ids is not None:
        return TokenIds.of(chat.ids)
    try:
        return await worker.renderer(chat.asked, chat.path)
    except RenderFailed:
        if chat.native is None:
            raise
        return await worker.renderer(chat.body, CHAT)
