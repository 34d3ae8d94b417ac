"""One worker and what is known of it, as it says itself."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.boundaries.boundary import Boundary, worth_sending
from proxy.boundaries.local_renderer import VerifiedRenderer
from proxy.boundaries.renderer import RenderFailed, WorkerRenderer, identify_renderer
from proxy.boundaries.token_ids import TokenIds
from proxy.chat.chat import CHAT, Chat
from proxy.fleet.worker_metrics import UNKNOWN, EngineInfo, StepTimes

SALT_BYTES = 16


class CacheQuarantine:
    """In one worker. Each doubt takes a step: its hints and all it holds first, then whatever it caches."""

    def __init__(self) -> None:
        self.in_hints = True  # states may be kept on it
        self.in_cache = True  # anything may be taken from its cache
        self._salt = ""  # that parts requests from what was there when it was doubted; empty: nothing was

    def doubt(self) -> None:
        """Its answers from the cache were found to differ from those computed anew."""
        self.in_cache = self.in_hints
        self.in_hints = False
        self._salt = fresh_salt()

    def restore(self) -> None:
        """An operator has seen to it. What was there when it was doubted stays out of use."""
        self.in_hints = self.in_cache = True

    def restarted(self) -> None:
        """The worker has, and its cache is empty."""
        self._salt = ""

    def salt(self, body: Mapping[str, Any]) -> str | None:
        """The cache salt to send with the request `body` instead of its own; None where that stands.

        `body` is empty where it was not read: then it is no request for tokens.
        """
        if (self.in_cache and not self._salt) or not body:
            return None
        given = body.get("cache_salt")
        if given is None:
            given = ""
        elif not isinstance(given, str) or not given:
            return None  # the worker's to refuse
        return given + (self._salt if self.in_cache else fresh_salt())


def fresh_salt() -> str:
    """Under which nothing is in any cache."""
    return os.urandom(SALT_BYTES).hex()


@dataclass
class Worker:
    """One vLLM server. `boot` changes when it restarts: what it held before is gone then."""

    url: str
    renderer: WorkerRenderer
    fast: VerifiedRenderer | None = None  # the same, without asking the worker where that is proved
    up: bool = False
    boot: str = ""
    engine: EngineInfo | None = None  # None: no plugin, or the plugin left vLLM untouched
    pace: StepTimes = UNKNOWN  # of its engine
    # Prompt tokens that its prefix cache gave since its start, as vLLM counts, and of them those before the gateway saw
    # it first; None: it does not say.
    hits: int | None = None
    hits_before: int | None = None
    cache_tokens: int = 0  # that fit into its cache; 0: it does not say
    looked_at: float = 0.0  # time.perf_counter() when it said so
    models: list[dict[str, Any]] = field(default_factory=list)
    model_ids: frozenset[str] = frozenset()
    renderer_ids: dict[str, bytes] = field(default_factory=dict)  # by model
    mute_models: set[str] = field(default_factory=set)  # that render nothing, as far as was tried
    max_inflight: int = 0  # requests at it at once, 0 for no limit
    trust: CacheQuarantine = field(default_factory=CacheQuarantine)  # in what it holds
    warming: bool = False  # prefixes are replayed on it; it gets requests only where no other worker can take them
    inflight: int = 0
    prefill_tokens: int = 0  # of requests that have not answered yet, as far as it does not hold them
    dispatched: int = 0  # requests ever sent
    failures: int = 0  # in a row
    answered_at: float = float("-inf")  # time.monotonic() of its last answer's beginning

    @property
    def name(self) -> str:
        """Label in metrics and headers: host and port."""
        return self.url.split("://", 1)[-1]

    @property
    def takes_hints(self) -> bool:
        """Whether states can be kept on it, and may be."""
        return self.engine is not None and self.trust.in_hints

    def hint(self, boundaries: Sequence[Boundary], budget: int) -> tuple[int, ...]:
        """Token positions of those `boundaries` that are worth a state on it, at most `budget` match units."""
        if self.engine is None or not self.takes_hints:
            return ()
        return worth_sending(boundaries, self.engine.match_unit, budget)

    @property
    def has_room(self) -> bool:
        """Whether it may get another request."""
        return not self.max_inflight or self.inflight < self.max_inflight

    def answered(self) -> None:
        """It began to answer a request."""
        self.failures = 0
        self.answered_at = time.monotonic()

    def serves(self, model: Any) -> bool:
        """Whether `model` is one of its models."""
        return isinstance(model, str) and model in self.model_ids

    async def identify(self, model: Any) -> bool:
        """Whether it is known what `model` is rendered with; asks for it where it is not yet."""
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
