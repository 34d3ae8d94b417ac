"""One worker and what is known of it, as it says itself."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_digest

from proxy.pace import UNKNOWN, Pace
from proxy.proved import ProvedRenderer
from proxy.render import Renderer, RenderFailed, WorkerRenderer
from proxy.trust import Trust

_SAMPLE = re.compile(r"^(seamark_engine_info)\{(.*?)\} ([0-9.eE+]+)$|^(process_start_time_seconds) (\S+)$", re.M)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# Rendered once for each boot: its tokens stand for tokenizer and template, so that a position learnt from one template
# is never used with another. The second serves templates without a system role.
PROBES: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "system", "content": "Seamark 1"},
        {"role": "user", "content": "probe"},
        {"role": "assistant", "content": "answer"},
        {"role": "user", "content": "again"},
    ],
    [{"role": "user", "content": "probe"}],
)


@dataclass(frozen=True)
class EngineInfo:
    """Labels of `seamark_engine_info`; lengths in tokens."""

    version: str
    vllm: str
    match_unit: int
    block_size: int


@dataclass
class Worker:
    """One vLLM server. `boot` changes when it restarts: what it held before is gone then."""

    url: str
    renderer: WorkerRenderer
    fast: ProvedRenderer | None = None  # the same, without asking the worker where that is proved
    up: bool = False
    boot: str = ""
    engine: EngineInfo | None = None  # None: no plugin, or the plugin left vLLM untouched
    pace: Pace = UNKNOWN  # of its engine
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
    trust: Trust = field(default_factory=Trust)  # in what it holds
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


async def identify_renderer(renderer: Renderer, model: Any) -> bytes | None:
    """A hash of what the probes render to; None where none of them renders."""
    for messages in PROBES:
        try:
            tokens = await renderer({"model": model, "messages": messages})
        except RenderFailed:
            continue
        return xxh3_128_digest(tokens.raw)
    return None


def read_metrics(text: str) -> tuple[str, EngineInfo | None]:
    """Boot identity and engine info out of a worker's `/metrics`."""
    boot, engine = "", None
    for match in _SAMPLE.finditer(text):
        if match[4]:
            boot = match[5]
        elif float(match[3]) == 1:
            labels = dict(_LABEL.findall(match[2]))
            engine = EngineInfo(labels["version"], labels["vllm"], int(labels["match_unit"]), int(labels["block_size"]))
    return boot, engine
