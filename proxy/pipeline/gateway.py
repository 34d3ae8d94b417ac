"""The parts of a gateway, composed, started and stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.boundaries.facts_learner import FactsLearner
from proxy.config_files import WatchedFile, read_secret
from proxy.errors import SettingsError
from proxy.fleet.discovery import Discovery
from proxy.fleet.pool import WorkerPool
from proxy.fleet.self_check import SelfCheck
from proxy.fleet.warmup import WarmupRequest, WarmupSet, replay_all
from proxy.fleet.worker import Worker
from proxy.http.auth import KeyRing
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.observability.shadow import Shadow
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.adapter_changes import AdapterChanges
from proxy.pipeline.answering import Answering, WorkerAnswers
from proxy.pipeline.cached_answers import CachedAnswers
from proxy.pipeline.dispatch import Dispatcher
from proxy.pipeline.forward import ResponseRelay
from proxy.pipeline.handler import RequestHandler
from proxy.pipeline.pinned_prompts import PinnedPrompts
from proxy.pipeline.prefill import Prefills
from proxy.pipeline.preflight import Preflights
from proxy.pipeline.prompt_reader import PromptReader
from proxy.pipeline.response_cache import ResponseCache
from proxy.pipeline.sse import Heartbeats
from proxy.routing.engine_events import EngineEvents
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.queue import AdmissionQueue
from proxy.settings import Settings

if TYPE_CHECKING:
    from proxy.observability.tracing import Tracing
    from proxy.routing.redis_sync import RedisSync

# Seconds between two looks at the files that are read again when they change.
FILES_INTERVAL = 1.0

# Seconds until a part that failed beside the requests is started again.
RESTART_SECONDS = 1.0

CANCEL_SECONDS = 1.0  # until a part that still runs is cancelled again

logger = logging.getLogger("seamark.gateway")


class Gateway:
    """All parts of one gateway; `handler` is the ASGI application for what goes to a worker."""

    def __init__(self, settings: Settings, upstream: Upstream | None = None) -> None:
        """`upstream`: connections other than its own. Raises `SettingsError` for a file that cannot be used."""
        self.settings = settings
        self.created = time.time()
        self.is_stopping = False  # it serves for a while, and is to get no new clients
        self.metrics = metrics = Metrics()
        self.idle = idle = IdleWork()
        worker_key = _secret("worker_api_key_file", settings.worker_api_key_file)
        self.upstream = upstream or Upstream(settings.connect_timeout, settings.max_header_bytes, worker_key)
        self.keys: KeyRing | None = None
        if settings.api_keys is not None:
            self.keys = KeyRing(settings.api_keys, _secret("salt_secret_file", settings.salt_secret_file))
        self.facts = FactsLearner()
        self.pool = WorkerPool(settings, self.upstream, metrics, self.facts, idle)
        self.reader = reader = PromptReader(settings, metrics, self.facts, self.pool.key_of)
        self.queue = AdmissionQueue(settings.max_queue, settings.queue_timeout, metrics.queue_seconds)
        self.prefix_index = PrefixIndex(settings.memory_bytes * 3 // 8, metrics.directory_evictions)
        self.engine_events = EngineEvents(self.upstream, self.prefix_index, idle, reader.told, self.pool.gateway_id)
        self.warmup = WarmupSet(settings.text_bytes // 8)
        dispatcher = Dispatcher(
            settings, self.pool, self.queue, self.prefix_index, self.engine_events, self.warmup, reader.stored
        )
        self.shadow = Shadow(settings, reader.find_boundaries, reader.recent, metrics, idle, self.pool.boots)
        self.accounting = Accounting(
            metrics, self.pool, reader, self.prefix_index, self.engine_events, self.shadow, idle, settings.excerpts
        )
        self.self_check = SelfCheck(
            settings, self.pool, self.warmup, reader.stored, self.upstream, metrics, idle, self._void_cache
        )
        dispatcher.on_given = self.self_check.leave
        self.pinned = PinnedPrompts(
            settings, self.pool, self.upstream, self.keys, reader, self.engine_events, self.prefix_index
        )
        self.heartbeats = Heartbeats(settings.heartbeat, metrics.heartbeats)
        self.prefill_pool: WorkerPool | None = None
        prefills = None
        if settings.prefill_worker:
            theirs = {"worker": settings.prefill_worker, "workers_file": None, "workers_dns": (), "replay_seconds": 0.0}
            self.prefill_pool = WorkerPool(settings.model_copy(update=theirs), self.upstream, metrics, self.facts, idle)
            self.prefill_pool.gateway_id = self.pool.gateway_id
            prefills = Prefills(settings, self.prefill_pool, self.upstream, self.prefix_index, metrics)
        relay = ResponseRelay(settings, metrics, self.pool, self.upstream, self.accounting, self.heartbeats, prefills)
        self.response_cache: ResponseCache | None = None
        answers: Answering
        answers = of_workers = WorkerAnswers(dispatcher, reader, relay)
        if settings.response_cache:
            self.response_cache = ResponseCache(settings.response_cache, metrics)
            answers = CachedAnswers(self.response_cache, settings.response_cache_models, self.pool, of_workers)
        self.engine_events.on_cleared = self._cleared
        self.tracing: Tracing | None = None
        if settings.otlp_traces_endpoint is not None:
            self.tracing = _tracing(settings.otlp_traces_endpoint, metrics)
        self.handler = RequestHandler(
            settings,
            metrics,
            self.keys,
            self.pool,
            reader,
            dispatcher,
            answers,
            self.accounting,
            idle,
            Preflights(self.pool, self.upstream),
            AdapterChanges(
                [pool for pool in (self.pool, self.prefill_pool) if pool is not None],
                self.upstream,
                settings.silence_timeout,
            ),
            self.tracing,
        )
        self.redis_sync: RedisSync | None = None  # with other gateways
        metrics.shadow_mode.set(settings.shadow)
        metrics.queued.set_function(lambda: len(self.queue))
        self._count_failures("workers_file", self.pool.file)
        self._count_failures("prefixes_file", self.pinned.file)
        self._count_failures("api_keys", self.keys.file if self.keys is not None else None)
        self.pool.changed = self.queue.wake
        self.pool.warm = self._warm
        self.pool.removed = self._forget
        self._leaving: list[Worker] = []  # removed, with requests under way
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin what runs beside the requests. Call it inside a running event loop."""
        parts = {
            "workers": self.pool.watch,
            "heartbeats": self.heartbeats.run,
            "files": self._watch_files,
            "shadow": self.shadow.run,
            "self_check": self.self_check.run,
            "pinned_prompts": self.pinned.run,
        }
        if self.prefill_pool is not None:
            parts["prefill_workers"] = self.prefill_pool.watch
        if names := self.settings.workers_dns:
            settings = self.settings
            interval, keep = settings.workers_dns_interval, settings.workers_dns_keep
            parts["discovery"] = Discovery(names, interval, keep, self.metrics, self.pool.discover).run
        if self.settings.redis is not None:
            from proxy.routing.redis_sync import RedisSync  # and with it redis: not imported if it is not wanted

            tables = self.prefix_index, self.reader.positions, self.reader.stored
            self.redis_sync = RedisSync(self.settings.redis, *tables, self.metrics, self.idle, self.pool.boots)
            parts["redis"] = self.redis_sync.run
        self._tasks = [asyncio.create_task(self._keep_running(name, run)) for name, run in parts.items()]

    async def stop(self) -> None:
        """End it, and close all connections."""
        running = set(self._tasks)
        while running:  # a cancellation can get lost in a library
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=CANCEL_SECONDS)
        if self.redis_sync is not None:
            await self.redis_sync.aclose()
        await self.engine_events.aclose()
        await self.upstream.aclose()
        if self.tracing is not None:
            await self.idle.caught_up()
            await self.tracing.aclose()

    async def _keep_running(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Whatever a worker, a file or a server does to it: a part that fails is started again."""
        failures = self.metrics.task_failures.labels(name)
        while True:
            try:
                await run()
            except Exception as error:  # the kind alone: the message might hold a secret, or prompt text
                logger.error("%s failed and is started again: %s", name, type(error).__name__)
                failures.inc()
                await asyncio.sleep(RESTART_SECONDS)
            else:
                return

    def _count_failures(self, setting: str, file: WatchedFile[Any] | None) -> None:
        if file is not None:
            self.metrics.file_current.labels(setting).set_function(lambda: file.is_current)
            file.failed = self.metrics.config_reload_errors.labels(setting).inc

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILES_INTERVAL)
            await self.idle.lull()
            self.read_files()
            self._forget_figures()

    def read_files(self) -> None:
        """Read again those files that have changed."""
        self.pool.refresh()
        if self.keys is not None:
            self.keys.refresh()
        self.pinned.refresh()

    def _forget(self, worker: Worker) -> None:
        """The worker was removed."""
        self.engine_events.forget(worker)
        self.shadow.forget(worker)
        self.self_check.forget(worker)
        self.pinned.removed(worker)

        self._leaving.append(worker)

    def _forget_figures(self) -> None:
        """Of workers that are gone and have answered their last request."""
        present = {worker.name for worker in self.pool.workers}
        for worker in [worker for worker in self._leaving if not worker.inflight]:
            self._leaving.remove(worker)
            if worker.name not in present:
                self.accounting.forget(worker.name)

    def _cleared(self, worker: Worker) -> None:
        """The worker's cache was emptied, as it has to be for who puts other weights into a running engine."""
        self.pinned.forget(worker)
        if self.response_cache is not None:
            self.response_cache.void(worker.boot)

    def _void_cache(self, worker: Worker) -> None:
        """Nothing that the worker held can be used any more."""
        self.prefix_index.forget_all(worker.boot)
        if self.response_cache is not None:
            self.response_cache.void(worker.boot)

    async def _warm(self, worker: Worker) -> None:
        """Replay hot prefixes on a worker that has restarted."""

        async def replay(warmup: WarmupRequest) -> None:
            hint = worker.hint(warmup.found)
            raw = warmup.body_with(hint)
            try:
                status, answer = await self.upstream.fetch("POST", worker.url + warmup.endpoint, raw)
            except (Unreachable, Broken):
                status, answer = 0, b""
            self.metrics.replays.labels(worker.name, "done" if status == 200 else "failed").inc()
            if status == 200:
                self.accounting.replayed(warmup.model, worker, answer)
                self.prefix_index.record(warmup.found.boundaries, worker.boot, hint)

        if worker.takes_hints:
            await self.pinned.make(worker)
            await replay_all(self.warmup.hottest(worker.model_ids), replay)


def _tracing(endpoint: str, metrics: Metrics) -> Tracing:
    """Raises `SettingsError` where the OpenTelemetry SDK is not installed; it is imported only if it is wanted."""
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
