"""All workers: a health check every few seconds says which are up, their models, boot and engine."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.renderer import WorkerRenderer
from proxy.config_files import WatchedFile, read_workers, without_credentials
from proxy.errors import NoWorker
from proxy.fleet import worker_metrics
from proxy.fleet.worker import Worker
from proxy.http.client import Broken, Exhausted, Unreachable, Upstream
from proxy.metrics import Metrics
from proxy.settings import Settings

logger = logging.getLogger("seamark.workers")

# Seconds for each question of a probe; a worker busy with a long prefill still answers, its API server is another
# process.
PROBE_TIMEOUT = 5.0

# Seconds that a worker which has booted is given to render the small chats that teach its template, before it gets
# requests. Learning goes on after that.
FACTS_SECONDS = 5.0


class WorkerPool:
    """All workers that the settings and the workers file name, watched by a background task."""

    def __init__(self, settings: Settings, upstream: Upstream, metrics: Metrics, facts: FactsLearner) -> None:
        self._upstream = upstream
        self._facts = facts
        self._metrics = metrics
        self._settings = settings
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._learning: dict[str, asyncio.Task[None]] = {}  # templates, by the worker's address
        self._file = None
        if settings.workers_file is not None:
            self._file = WatchedFile(settings.workers_file, read_workers)
        self.workers: list[Worker] = []
        self.warm: Callable[[Worker], Awaitable[None]] | None = None  # before a restarted worker takes requests
        self.changed: Callable[[], None] = lambda: None  # which workers are ready may have changed
        self.removed: Callable[[Worker], None] = lambda worker: None
        self._reconcile()

    @property
    def is_current(self) -> bool:
        """Whether the workers file could be used when it was last read."""
        return self._file is None or self._file.is_current

    @property
    def up(self) -> list[Worker]:
        """Workers that the last health check found well."""
        return [worker for worker in self.workers if worker.up]

    def boots(self) -> list[str]:
        """Identities of the workers as they run now."""
        return [worker.boot for worker in self.workers if worker.boot]

    async def ready(self) -> list[Worker]:
        """Workers that are up, after a health check of all if none was."""
        if not self.up:
            await self.check_all()
        return self.up

    def serving(self, model: Any) -> list[Worker]:
        """Workers that are up and serve `model`, warm or not."""
        return [worker for worker in self.workers if worker.up and worker.serves(model)]

    def for_model(self, model: Any) -> list[Worker]:
        """Workers to choose from: those that are up and serve `model`, without those that fail while others do not.

        If no worker ever served it, all that are up: they word the refusal. Raises `NoWorker`.
        """
        if serving := self.serving(model):
            return _fit([worker for worker in serving if not worker.warming] or serving)
        if any(worker.serves(model) for worker in self.workers) or not (up := self.up):
            raise NoWorker("No worker is ready for this model. It may still be loading it.")
        return _fit(up)

    async def watch(self) -> None:
        """Check every worker's health, for ever."""
        while True:
            await self.check_all()
            await asyncio.sleep(self._settings.health_interval)

    def refresh(self) -> None:
        """Read the workers file again if it has changed."""
        if self._file is not None and self._file.refresh():
            self._reconcile()

    async def check_all(self) -> None:
        """Check the health of every worker, now."""
        await asyncio.gather(*(self.check_health(worker) for worker in self.workers))

    async def check_health(self, worker: Worker) -> None:
        """Probe a worker, and mark it up or down; callers at the same time share one probe."""
        task = self._checks.get(worker.url)
        if task is None or task.done():
            task = self._checks[worker.url] = asyncio.create_task(self._check_health(worker))
        await asyncio.shield(task)

    def mark_down(self, worker: Worker) -> None:
        """A connection was refused: no more requests until the next health check finds it well."""
        self._set_up(worker, False)

    def record_failure(self, worker: Worker, request: bytes) -> None:
        """A worker took a request with this body and gave no answer, or said that it failed."""
        if worker.breaker.failed(xxh3_64_intdigest(request)):
            logger.warning("worker %s fails: it gets one request at a time until one succeeds", worker.name)

    def record_success(self, worker: Worker) -> None:
        """A worker began to answer a request, and named no error."""
        was_open = worker.breaker.is_open
        worker.breaker.reset()
        if was_open:
            logger.info("worker %s answers again", worker.name)
            self.changed()

    def _reconcile(self) -> None:
        """Add and remove workers until they are those wanted now; a removed one finishes the requests it has."""
        settings = self._settings
        named: list[tuple[str, int | None]] = [(url, None) for url in settings.worker]
        named += self._file.value if self._file is not None else ()
        wanted: dict[str, int] = {}
        for url, limit in named:
            address, userinfo = without_credentials(url)
            wanted[address] = settings.max_inflight if limit is None else limit
            self._upstream.trust(address, userinfo)
        present = {worker.url: worker for worker in self.workers}
        for url in present.keys() - wanted.keys():
            logger.info("worker %s is removed", present[url].name)
            present[url].up = False
            for gauge in (self._metrics.worker_up, self._metrics.engine_patched, self._metrics.inflight):
                gauge.remove(present[url].name)
            self._checks.pop(url, None)
            self._upstream.trust(url, None)
            self._stop_learning(present[url])
            self.removed(present[url])
        self.workers = [present.get(url) or self._new(url) for url in wanted]
        for worker in self.workers:
            worker.max_inflight = wanted[worker.url]

    def _new(self, url: str) -> Worker:
        settings = self._settings
        worker = Worker(url, WorkerRenderer(self._upstream, url, settings.render_timeout, self._metrics.renders))
        self._metrics.worker_up.labels(worker.name).set_function(lambda: worker.is_sound)
        self._metrics.engine_patched.labels(worker.name).set(0)
        self._metrics.inflight.labels(worker.name).set_function(lambda: worker.inflight)
        return worker

    async def _check_health(self, worker: Worker) -> None:
        try:
            up = await self._probe(worker)
        except Exhausted:  # nothing is known of the worker
            up = worker.up
        except Broken:  # gone, or too busy for a probe: then its answers speak for it
            up = worker.up and time.monotonic() - worker.answered_at < 2 * self._settings.health_interval
        except (Unreachable, ValueError, KeyError, TypeError):  # gone, or not a vLLM server
            up = False
        except Exception as error:  # whatever stands at that address, the watch over the others goes on
            logger.error("worker %s: %s", worker.name, type(error).__name__)
            up = False
        if worker in self.workers:
            self._set_up(worker, up)

    async def _warm(self, worker: Worker, warm: Callable[[Worker], Awaitable[None]]) -> None:
        """Warm the worker up, within `replay_seconds`."""
        worker.warming = True
        try:
            async with asyncio.timeout(self._settings.replay_seconds):
                if worker.engine is not None:
                    for entry in worker.models:
                        await worker.identify(entry["id"])  # else it would be given no hints
                await warm(worker)
        except TimeoutError:
            pass
        except Exception as error:  # a warm-up that fails must not keep a worker away
            logger.error("warm-up of worker %s: %s", worker.name, type(error).__name__)
        finally:
            worker.warming = False
            self.changed()

    async def _probe(self, worker: Worker) -> bool:
        """Ask the worker for its health, metrics and models, and note them; whether it serves."""
        status, _ = await self._get(worker, "/health")
        if status != 200:
            return False
        probed_at = time.perf_counter()
        _, exposition = await self._get(worker, "/metrics")
        _, models = await self._get(worker, "/v1/models")
        found = worker_metrics.read(exposition.decode(errors="replace"))
        worker.engine = None if self._settings.shadow else found.engine  # then it is treated as one without the plugin
        if found.step_times.known or found.engine is None:
            worker.step_times = found.step_times  # a restarted engine learns them again: until then, the old ones stand
        worker.models = [entry for entry in json.loads(models)["data"] if isinstance(entry["id"], str)]
        worker.model_ids = frozenset(entry["id"] for entry in worker.models)
        boot = f"{worker.url}#{found.boot}"
        if boot != worker.boot:
            worker.boot = boot
            worker.breaker.reset()
            worker.cache.restarted()
            if self.warm is not None and self._settings.replay_seconds:
                self._spawn(self._warm(worker, self.warm))
            self._stop_learning(worker)
            for renderer_id in worker.renderer_ids.values():
                self._facts.forget(renderer_id)
            worker.renderer_ids.clear()
            worker.mute_models.clear()
            worker.renderer.forget_routes()
            worker.hits_before = found.hits
        worker.cache_tokens, worker.hits, worker.probed_at = found.cache_tokens, found.hits, probed_at
        self._metrics.engine_patched.labels(worker.name).set(found.engine is not None)
        if worker.engine is not None:
            await self._learn_templates(worker)
        return True

    async def _learn_templates(self, worker: Worker) -> None:
        """Learn the templates of its models, so that their first requests go out with a whole hint.

        A worker that is not up yet gets `FACTS_SECONDS` for that. Learning goes on beside the requests then.
        """
        task = self._learning.get(worker.url)
        if task is None or task.done():
            task = self._learning[worker.url] = asyncio.create_task(self._learn_all(worker))
        if not worker.up:
            await asyncio.wait((task,), timeout=FACTS_SECONDS)

    async def _learn_all(self, worker: Worker) -> None:
        for entry in worker.models:
            model = entry["id"]
            if await worker.identify(model):
                await self._facts.learn_common(worker.renderer, worker.renderer_ids[model], model)

    def _stop_learning(self, worker: Worker) -> None:
        """The worker has restarted or was removed: what it is being asked is of no use any more."""
        task = self._learning.pop(worker.url, None)
        if task is not None:
            task.cancel()

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        return await self._upstream.fetch("GET", worker.url + path, timeout=PROBE_TIMEOUT)

    def _set_up(self, worker: Worker, up: bool) -> None:
        if up != worker.up:
            logger.info("worker %s is %s", worker.name, "up" if up else "down")
            worker.up = up
            self.changed()
        elif worker.breaker.wants_trial:  # with one of those that wait, perhaps
            self.changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fit(workers: list[Worker]) -> list[Worker]:
    """Those that do not fail, or one that is to be tried again. If all fail, all: some requests may still succeed."""
    sound = [worker for worker in workers if not worker.breaker.is_open]
    if len(sound) == len(workers) or not sound:
        return workers
    trial = next((worker for worker in workers if worker.breaker.wants_trial and worker.has_room), None)
    return sound if trial is None else [trial]


def union_of_models(workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """Models of all workers, each once, as the first worker that has it describes it."""
    union: dict[Any, dict[str, Any]] = {}
    for worker in workers:
        for entry in worker.models:
            union.setdefault(entry.get("id"), entry)
    return list(union.values())
