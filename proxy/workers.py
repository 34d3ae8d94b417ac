"""The workers and what is known of each: up or not, models, boot, engine; looked at every few seconds."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128_digest

from proxy.local_render import LocalRender
from proxy.metrics import Metrics
from proxy.proved import ProvedRenderer
from proxy.render import Renderer, RenderFailed, WorkerRenderer
from proxy.settings import Settings
from proxy.upstream import Broken, Unreachable, Upstream

logger = logging.getLogger("seamark.workers")

# Seconds one look may take; a worker busy with a long prefill still answers, its API server is another process.
LOOK_TIMEOUT = 5.0

# Most of what a local renderer keeps of texts and their tokens, bytes.
LOCAL_BYTES = 2**26

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
    models: list[dict[str, Any]] = field(default_factory=list)
    renderer_ids: dict[str, bytes] = field(default_factory=dict)  # by model
    inflight: int = 0
    dispatched: int = 0  # requests ever sent

    @property
    def name(self) -> str:
        """Label in metrics and headers: host and port."""
        return self.url.split("://", 1)[-1]

    def serves(self, model: Any) -> bool:
        """Whether `model` is one of its models."""
        return any(entry.get("id") == model for entry in self.models)


class WorkerPool:
    """All configured workers, watched by a background task."""

    def __init__(self, settings: Settings, upstream: Upstream, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._interval = settings.health_interval
        self._looks: dict[str, asyncio.Task[None]] = {}
        self.workers = [Worker(url, WorkerRenderer(upstream, url, settings.render_timeout)) for url in settings.worker]
        if settings.tokenizer is not None:
            local = LocalRender(settings.tokenizer, min(LOCAL_BYTES, settings.text_bytes))
            for worker in self.workers:
                worker.fast = ProvedRenderer(worker.renderer, local)
        for worker in self.workers:
            metrics.worker_up.labels(worker.name).set(0)
            metrics.engine_patched.labels(worker.name).set(0)

    @property
    def up(self) -> list[Worker]:
        """Workers that answered last time."""
        return [worker for worker in self.workers if worker.up]

    async def ready(self) -> list[Worker]:
        """Workers that are up, after a look at all of them if none was."""
        if not self.up:
            await self.look_at_all()
        return self.up

    async def watch(self) -> None:
        """Look at every worker, for ever."""
        while True:
            await self.look_at_all()
            await asyncio.sleep(self._interval)

    async def look_at_all(self) -> None:
        """One look at every worker, now."""
        await asyncio.gather(*(self.look(worker) for worker in self.workers))

    async def look(self, worker: Worker) -> None:
        """One look at a worker; callers at the same time share it."""
        task = self._looks.get(worker.url)
        if task is None or task.done():
            task = self._looks[worker.url] = asyncio.create_task(self._look(worker))
        await asyncio.shield(task)

    def mark_down(self, worker: Worker) -> None:
        """A connection was refused: no more requests until the next look says otherwise."""
        self._set_up(worker, False)

    async def _look(self, worker: Worker) -> None:
        try:
            up = await self._examine(worker)
        except (Unreachable, Broken, ValueError, KeyError, TypeError):  # gone, or not a vLLM server
            up = False
        except Exception as error:  # whatever stands at that address, the watch over the others goes on
            logger.error("worker %s: %s", worker.name, type(error).__name__)
            up = False
        self._set_up(worker, up)

    async def _examine(self, worker: Worker) -> bool:
        """Read what the worker says of itself; whether it serves."""
        status, _ = await self._get(worker, "/health")
        if status != 200:
            return False
        _, metrics = await self._get(worker, "/metrics")
        _, models = await self._get(worker, "/v1/models")
        boot, worker.engine = read_metrics(metrics.decode(errors="replace"))
        worker.models = [entry for entry in json.loads(models)["data"] if isinstance(entry["id"], str)]
        boot = f"{worker.url}#{boot}"
        if boot != worker.boot:
            worker.boot = boot
            worker.renderer_ids.clear()
            worker.renderer.forget_routes()
            if worker.fast is not None:
                worker.fast.forget()
        self._metrics.engine_patched.labels(worker.name).set(worker.engine is not None)
        if worker.engine is not None:
            for entry in worker.models:
                await self._identify_renderer(worker, entry["id"])
        return True

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        return await self._upstream.fetch("GET", worker.url + path, timeout=LOOK_TIMEOUT)

    async def _identify_renderer(self, worker: Worker, model: Any) -> None:
        if model not in worker.renderer_ids:
            renderer_id = await identify_renderer(worker.renderer, model)
            if renderer_id is not None:
                worker.renderer_ids[model] = renderer_id

    def _set_up(self, worker: Worker, up: bool) -> None:
        if up != worker.up:
            logger.info("worker %s is %s", worker.name, "up" if up else "down")
        worker.up = up
        self._metrics.worker_up.labels(worker.name).set(up)


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


def union_of_models(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Models of all workers, each once, as the first worker that has it describes it."""
    union: dict[Any, dict[str, Any]] = {}
    for worker in workers:
        for entry in worker.models:
            union.setdefault(entry.get("id"), entry)
    return list(union.values())
