"""The parts of a gateway, composed, started and stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.boundaries.facts_learner import FactsLearner
from proxy.config_files import WatchedFile, read_secret
from proxy.errors import SettingsError
from proxy.fleet.discovery import Discovery
from proxy.fleet.hot_prefixes import WarmupSet
from proxy.fleet.part import Change, Shelf
from proxy.fleet.pool import WorkerPool
from proxy.fleet.self_check import SelfCheck
from proxy.fleet.worker import Worker
from proxy.http.auth import KeyRing
from proxy.http.client import Upstream
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.observability.shadow import Shadow
from proxy.observability.traffic_trace import TrafficTrace
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.adapter_changes import AdapterChanges
from proxy.pipeline.dispatch import Dispatcher, prompt_computed
from proxy.pipeline.exchange import Exchange
from proxy.pipeline.forward import ResponseRelay
from proxy.pipeline.handler import Answering, BodyReader, Preflights, RequestHandler
from proxy.pipeline.pinned_prompts import PinnedPrompts
from proxy.pipeline.prefill import Prefills
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.replayer import Replayer, WarmUp
from proxy.pipeline.response_cache import ResponseCache
from proxy.pipeline.sse import Heartbeats
from proxy.routing.engine_events import EngineEvents
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.queue import AdmissionQueue
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.observability.tracing import Tracing
    from proxy.routing.redis_sync import RedisSync

FILES_INTERVAL = 1.0  # seconds between two looks at the files that are read again when they change


class Gateway:
    """What one gateway is made of; `handler` is the ASGI application for what goes to a worker."""

    def __init__(self, settings: Settings, upstream: Upstream | None = None) -> None:
        """`upstream`: connections other than its own. Raises `SettingsError` for a file that cannot be used."""
        self.settings = settings
        self.created = time.time()
        self.is_stopping = False  # it serves for a while, and is to get no new clients
        self.metrics = metrics = Metrics()
        self.idle = idle = IdleWork()
        self.shelf = shelf = Shelf(metrics)

        # The core: what every request needs.
        worker_key = _secret("worker_api_key_file", settings.worker_api_key_file)
        self.upstream = upstream or Upstream(settings.connect_timeout, settings.max_header_bytes, worker_key)
        self.keys: KeyRing | None = None
        if settings.api_keys is not None:
            self.keys = KeyRing(settings.api_keys, _secret("salt_secret_file", settings.salt_secret_file))
        self.facts = FactsLearner()
        self.queue = AdmissionQueue(settings.max_queue, settings.queue_timeout, metrics.queue_seconds)
        beside = self.upstream, metrics, self.facts, idle
        self.pool = WorkerPool(settings, *beside, shelf, self.queue.wake)
        self.reader = reader = PromptReader(settings, metrics, self.facts, self.pool)
        self.prefix_index = PrefixIndex(settings.memory_bytes * 3 // 8, metrics.directory_evictions)
        prefilling: dict[str, Exchange] = {}
        computed = partial(prompt_computed, prefilling)
        events = shelf.put(
            EngineEvents(self.upstream, self.prefix_index, idle, shelf, reader.told, self.pool.gateway_id, computed)
        )
        self.warmup = WarmupSet(settings.text_bytes // 8)
        known = self.prefix_index, events, self.warmup, reader.stored
        dispatcher = Dispatcher(settings.load_slack, self.pool, self.queue, *known, prefilling)
        self.shadow = shelf.put(Shadow(settings, reader.find_boundaries, reader.recent, metrics, idle, self.pool.boots))
        tracing = _tracing(settings.otlp_traces_endpoint, metrics)
        trace = None
        if settings.trace is not None:
            trace = shelf.put(TrafficTrace(settings.trace, settings.text_bytes // 8, metrics.traced, idle))
        told = self.shadow, idle, settings.excerpts, tracing, trace
        self.accounting = shelf.put(Accounting(metrics, self.pool, reader, self.prefix_index, events, *told))
        heartbeats = shelf.put(Heartbeats(settings.heartbeat, metrics.heartbeats))
        shelf.also_run("workers", self.pool.watch)
        shelf.also_run("files", self._watch_files)

        # What it can do without.
        replayer = Replayer(self.upstream, self.prefix_index, events, settings.silence_timeout)
        self.pinned = shelf.put(PinnedPrompts(settings, self.pool, self.keys, reader, replayer))
        shelf.put(WarmUp(self.warmup, replayer, self.accounting, metrics.replays))
        prompts = self.warmup, reader.stored
        self.self_check = shelf.put(
            SelfCheck(settings, self.pool, *prompts, self.upstream, metrics, idle, self._distrust)
        )
        self.prefill_pool: WorkerPool | None = None
        prefills = None
        if settings.prefill_worker:
            theirs = {"worker": settings.prefill_worker, "workers_file": None, "workers_dns": (), "replay_seconds": 0.0}
            its = settings.model_copy(update=theirs)
            self.prefill_pool = WorkerPool(its, *beside, Shelf(metrics), gateway_id=self.pool.gateway_id)
            shelf.also_run("prefill_workers", self.prefill_pool.watch)
            prefills = Prefills(settings, self.prefill_pool, self.upstream, self.prefix_index, metrics.prefills)
        answer: Answering
        answer = relay = ResponseRelay(
            settings, metrics, self.pool, self.upstream, dispatcher, reader, self.accounting, heartbeats, prefills
        )
        self.response_cache: ResponseCache | None = None
        if settings.response_cache:
            answer = self.response_cache = shelf.put(ResponseCache(settings, metrics, self.pool, dispatcher, relay))
        if names := settings.workers_dns:
            interval, keep = settings.workers_dns_interval, settings.workers_dns_keep
            shelf.put(Discovery(names, interval, keep, metrics, self.pool.discover))
        self.redis_sync: RedisSync | None = None  # with other gateways
        if settings.redis is not None:
            from proxy.routing.redis_sync import RedisSync  # and with it redis: not imported if it is not wanted

            tables = self.prefix_index, reader.positions, reader.stored
            self.redis_sync = shelf.put(RedisSync(settings.redis, *tables, metrics, idle, self.pool.boots, self.keys))
        if tracing is not None:
            shelf.put(tracing)
        pools = [self.pool] if self.prefill_pool is None else [self.pool, self.prefill_pool]
        bodies, preflights = BodyReader(settings, idle, reader.bodies), Preflights(self.pool, self.upstream)
        adapters = AdapterChanges(pools, self.upstream, settings.silence_timeout)
        self.handler = RequestHandler(self.keys, bodies, reader, answer, self.accounting, preflights, adapters)
        metrics.shadow_mode.set(settings.shadow)
        metrics.queued.set_function(lambda: len(self.queue.waiting))
        self._files: list[tuple[str, WatchedFile[Any], Callable[[], None]]] = []
        self._watch("workers_file", self.pool.file, self.pool.refresh)
        if self.keys is not None:
            self._watch("api_keys", self.keys.file, self.keys.refresh)
        self._watch("prefixes_file", self.pinned.file, self.pinned.refresh)

    def start(self) -> None:
        """Begin what runs beside the requests. Call it inside a running event loop."""
        self.shelf.start()

    async def stop(self) -> None:
        """End it, and close all connections."""
        await self.pinned.let_go()
        await self.shelf.stop()
        await self.idle.caught_up()  # parts are told of the last requests before they close
        await self.shelf.aclose()
        await self.upstream.aclose()

    def _watch(self, setting: str, file: WatchedFile[Any] | None, refresh: Callable[[], None]) -> None:
        if file is not None:
            self._files.append((setting, file, refresh))
            self.metrics.file_current.labels(setting).set_function(lambda: file.is_current)
            self.metrics.config_reload_errors.labels(setting)

    async def _watch_files(self) -> None:
        """A file that differs from look to look is still being written."""
        while True:
            await asyncio.sleep(FILES_INTERVAL)
            await self.idle.lull()
            self.read_files(only_still=True)

    def read_files(self, *, only_still: bool = False) -> None:
        """Read again those files that have changed; `only_still`: and that are as they were at the last look."""
        for setting, file, refresh in self._files:
            if file.is_still() or not only_still:
                failures = file.failures
                refresh()
                self.metrics.config_reload_errors.labels(setting).inc(file.failures - failures)

    def _distrust(self, worker: Worker) -> None:
        """Answers from the worker's cache differ."""
        self.prefix_index.forget_all(worker.boot)
        self.shelf.tell(worker, Change.DISTRUSTED)


def _tracing(endpoint: str | None, metrics: Metrics) -> Tracing | None:
    """Raises `SettingsError` where the OpenTelemetry SDK is not installed; it is imported only if it is wanted."""
    if endpoint is None:
        return None
    try:
        from proxy.observability.tracing import Tracing
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        cure = "pip install 'vllm-seamark[tracing]'"
        raise SettingsError(f"otlp_traces_endpoint: OpenTelemetry is not installed here: {cure}") from None
    return Tracing(endpoint, metrics)


def _secret(setting: str, path: Path | None) -> str | None:
    """The secret in the file that `setting` names, None if it names none."""
    return read_secret(setting, path) if path is not None else None
