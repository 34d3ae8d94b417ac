"""All workers: a health check every few seconds says which are up, their models, boot and engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.renderer import WorkerRenderer
from proxy.config_files import WatchedFile, read_workers, without_credentials
from proxy.errors import BadRequest, NoWorker
from proxy.fleet import worker_metrics
from proxy.fleet.model_names import chosen_for, listed_names, name_keys
from proxy.fleet.part import Change, Shelf
from proxy.fleet.sleep import ASLEEP, EngineAnswers
from proxy.fleet.worker import Worker
from proxy.fleet.worker_metrics import WorkerMetrics
from proxy.http.client import Broken, Exhausted, Malformed, Silent, Unreachable, Upstream
from proxy.idle_work import SHORT_PATIENCE_SECONDS, IdleWork
from proxy.metrics import Metrics
from proxy.settings import Settings

logger = logging.getLogger("seamark.workers")

# Seconds for each question of a probe; a worker busy with a long prefill still answers, its API server is another
# process.
PROBE_TIMEOUT = 5.0

# Seconds for the question whether the engine sleeps, which it answers between two steps.
SLEEP_TIMEOUT = 1.0

# Seconds that a worker which has booted is given to render the small chats that teach its template, before it gets
# requests. Learning goes on after that.
FACTS_SECONDS = 5.0

MOST_CAUSES = 3  # of workers that are down, in what a client reads

MOST_NAMES = 4  # of models, in a line of the log or an error: adapters may be many

# Seconds from one question after a name that no worker lists to the next, and that its request waits for the answers.
ASK_NAMES_SECONDS, NAMES_SECONDS = 1.0, 1.0

MODELS = "/v1/models"

LOOP = "this is the gateway itself: --worker must name a vLLM server"


class Unwell(Exception):
    """A worker answered, and cannot be used; the message says why."""


class WorkerPool:
    """All workers that the settings and the workers file name, watched by a background task."""

    def __init__(
        self,
        settings: Settings,
        upstream: Upstream,
        metrics: Metrics,
        facts: FactsLearner,
        idle: IdleWork,
        shelf: Shelf,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`changed` is called when other workers may be ready than before."""
        self._upstream = upstream
        self._shelf = shelf
        self._changed = changed
        self._idle = idle
        self._facts = facts
        self._metrics = metrics
        self._settings = settings
        self.gateway_id = os.urandom(8).hex()  # what this gateway says at /health, and knows itself by
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._learning: dict[str, asyncio.Task[None]] = {}  # templates, by the worker's address
        self._name_keys: dict[str, str] = {}  # of all names in all lists, see `key_of`
        self._asking: asyncio.Future[Any] | None = None  # for a name that nobody lists
        self._asked_at = float("-inf")  # time.monotonic()
        self._naming: set[str] = set()  # addresses of workers that took a name which they do not list
        self.discovered: tuple[str, ...] = ()  # base URLs
        self.file = None
        if settings.workers_file is not None:
            self.file = WatchedFile(settings.workers_file, read_workers)
        self.workers: list[Worker] = []
        self._reconcile()

    @property
    def up(self) -> list[Worker]:
        """Workers that the last health check found well."""
        return [worker for worker in self.workers if worker.up]

    def boots(self) -> list[str]:
        """Identities of the workers as they run now."""
        return [worker.boot for worker in self.workers if worker.boot]

    async def exposition(self, worker: Worker) -> str:
        """A worker's own metrics, in Prometheus' text format; empty if it does not give them."""
        try:
            status, text = await self._get(worker, "/metrics")
        except (Unreachable, Broken):
            return ""
        return text.decode(errors="replace") if status == 200 else ""

    async def ready(self) -> list[Worker]:
        """Workers that are up, after a health check of all if none was."""
        if not self.up:
            await self.check_all()
        return self.up

    def serving(self, model: Any) -> list[Worker]:
        """Workers that are up and serve `model`, warm or not.

        A name that is empty, or that no worker lists, is left to the workers: see `_taking`.
        """
        if not isinstance(model, str):  # said once: this runs for every request, over all workers
            return []
        serving = [worker for worker in self.workers if worker.up and model in worker.model_ids]
        return serving or self._taking(model)

    def for_model(self, model: Any) -> list[Worker]:
        """Workers to choose from: those that are up and serve `model`, without those that fail while others do not.

        If the request names no model by its kind (None), all that are up. Raises `NoWorker`, or `BadRequest` for an
        empty name before several models.
        """
        if serving := self.serving(model):
            if not [worker for worker in serving if worker.warming or worker.breaker.is_open]:
                return serving
            return _fit([worker for worker in serving if not worker.warming] or serving)
        served_by = [worker for worker in self.workers if worker.serves(model)]
        if served_by or not (up := self.up):
            raise no_worker("No worker is ready for this model.", served_by or self.workers)
        if model == "" and len(models := self.base_models()) > 1:
            named = _some(models)
            raise BadRequest(f"This request names no model, and several are served here: {named}.", param="model")
        return _fit(up)

    def _taking(self, model: str) -> list[Worker]:
        """Workers that are up, for a name that is empty or that none of all workers lists.

        An empty one means the only model, and nothing before several ones. Any other goes to one model, the same each
        time: of workers that take any name (vLLM's VLLM_SKIP_MODEL_NAME_VALIDATION), if some are known to, and else of
        those that were not asked yet. Where none does, they word the refusal.
        """
        if self.lists(model):
            return []
        workers = [worker for worker in self.workers if worker.up and worker.names.base]
        if not model:
            return workers if len(self.base_models()) == 1 else []
        for wanted in (True, None):
            if found := [worker for worker in workers if worker.takes_any_name is wanted]:
                workers = found
                break
        models = {self._name_keys[worker.names.base] for worker in workers}
        if len(models) > 1:
            chosen = chosen_for(model, models)
            workers = [worker for worker in workers if self._name_keys[worker.names.base] == chosen]
        return workers

    def lists(self, model: Any) -> bool:
        """Whether any worker, up or not, lists `model`."""
        return isinstance(model, str) and model in self._name_keys

    def base_models(self) -> list[str]:
        """The different models of all workers, up or not, adapters left out: one name of each."""
        return sorted({self._name_keys[names[0]] for worker in self.workers for names in worker.names.bases})

    def key_of(self, model: Any) -> str | None:
        """The name under which all is kept that is known of `model`: one for all names of one model.

        None for what is no name.
        """
        if not isinstance(model, str):
            return None
        if (key := self._name_keys.get(model)) is not None:
            return key
        taking = self._taking(model)
        return self._name_keys[taking[0].names.base] if taking else model

    async def look_for(self, model: Any) -> None:
        """Ask all workers for their models if none lists `model`, once a second at most: it may be there since then."""
        if not isinstance(model, str) or not model or self.lists(model):
            return
        if any(worker.takes_any_name for worker in self.workers):
            return
        if self._asking is None or self._asking.done():
            if time.monotonic() - self._asked_at < ASK_NAMES_SECONDS:
                return
            self._asked_at = time.monotonic()
            self._asking = asyncio.ensure_future(asyncio.gather(*map(self.ask_models, self.up)))
        await asyncio.wait((self._asking,), timeout=NAMES_SECONDS)

    async def ask_models(self, worker: Worker) -> None:
        """Ask a worker which models it has now, out of turn. Nothing is learnt from one that does not answer."""
        try:
            status, answer = await self._get(worker, MODELS)
        except (Unreachable, Broken):
            return
        if status == 200 and (models := _models_in(answer)) is not None:
            self._list(worker, models)

    def answered_name(self, worker: Worker, model: Any, *, taken: bool) -> None:
        """A worker took a request for `model`, or said that there is no such model."""
        if not isinstance(model, str) or not model or worker.serves(model):
            return
        if not taken:
            worker.takes_any_name = False
        elif not worker.takes_any_name and worker.url not in self._naming:
            self._naming.add(worker.url)
            self._spawn(self._learn_name(worker, model))

    async def _learn_name(self, worker: Worker, model: str) -> None:
        """The worker took a name that was not in its list: it takes any, unless this one was added meanwhile."""
        boot = worker.boot
        await self.ask_models(worker)
        self._naming.discard(worker.url)
        if worker.boot == boot and not worker.serves(model):
            worker.takes_any_name = True

    def _list(self, worker: Worker, models: list[dict[str, Any]]) -> None:
        """The worker has these models now."""
        worker.models = models
        names = listed_names(models, one_engine=worker.is_vllm)
        if names != worker.names:
            worker.names, worker.model_ids = names, frozenset(names.templates)
            self._name_keys = name_keys(each.names for each in self.workers)

    async def watch(self) -> None:
        """Check every worker's health, for ever."""
        while True:
            await self.check_all()
            await asyncio.sleep(self._settings.health_interval)

    def refresh(self) -> None:
        """Read the workers file again if it has changed."""
        if self.file is not None and self.file.refresh():
            self._reconcile()

    def discover(self, urls: tuple[str, ...]) -> None:
        """The names in the settings have these addresses now. New ones are looked at before they get requests."""
        self.discovered = urls
        before = {worker.url for worker in self.workers}
        self._reconcile()
        for worker in self.workers:
            if worker.url not in before:
                self._spawn(self.check_health(worker))

    async def check_all(self) -> None:
        """Check the health of every worker, now."""
        await asyncio.gather(*(self.check_health(worker) for worker in self.workers))

    async def check_health(self, worker: Worker) -> None:
        """Probe a worker, and mark it up or down; callers at the same time share one probe."""
        task = self._checks.get(worker.url)
        if task is None or task.done():
            task = self._checks[worker.url] = asyncio.create_task(self._check_health(worker))
        await asyncio.shield(task)

    def mark_down(self, worker: Worker, why: str = "") -> None:
        """A connection could not be made: no more requests until the next health check finds it well."""
        self._set_up(worker, False, why or "no connection")

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
            self._changed()

    def _reconcile(self) -> None:
        """Add and remove workers until they are those wanted now; a removed one finishes the requests it has."""
        settings = self._settings
        named: list[tuple[str, int | None]] = [(url, None) for url in settings.worker]
        named += self.file.value if self.file is not None else ()
        named += [(url, None) for url in self.discovered]
        wanted: dict[str, int] = {}
        with_credentials: dict[str, bool] = {}
        for url, limit in named:
            address, userinfo = without_credentials(url)
            wanted[address] = settings.max_inflight if limit is None else limit
            self._upstream.trust(address, userinfo)
            with_credentials[address] = userinfo is not None
        present = {worker.url: worker for worker in self.workers}
        for url in present.keys() - wanted.keys():
            logger.info("worker %s is removed", present[url].name)
            present[url].up = False
            for gauge in (self._metrics.worker_up, self._metrics.engine_patched, self._metrics.inflight):
                gauge.remove(present[url].name)
            self._checks.pop(url, None)
            self._upstream.trust(url, None)
            self._stop_learning(present[url])
            self._shelf.tell(present[url], Change.REMOVED)
        self.workers = [present.get(url) or self._new(url) for url in wanted]
        self._name_keys = name_keys(worker.names for worker in self.workers)
        for worker in self.workers:
            worker.max_inflight = wanted[worker.url]
            worker.has_credentials = with_credentials[worker.url]

    def _new(self, url: str) -> Worker:
        settings = self._settings
        worker = Worker(url, WorkerRenderer(self._upstream, url, settings.render_timeout, self._metrics.renders))
        self._metrics.worker_up.labels(worker.name).set_function(lambda: worker.is_sound)
        self._metrics.engine_patched.labels(worker.name).set(0)
        self._metrics.inflight.labels(worker.name).set_function(lambda: worker.inflight)
        return worker

    async def _check_health(self, worker: Worker) -> None:
        up = False
        try:
            words = await self._probe(worker)
            up = True
        except Exhausted:  # nothing is known of the worker
            up, words = worker.up, worker.words
        except Broken as error:  # gone, or too busy for a probe: then its answers speak for it
            up = worker.up and time.monotonic() - worker.answered_at < 2 * self._settings.health_interval
            words = worker.words if up else _why_broken(error, worker)
        except Unreachable as error:
            words = str(error) or "no connection"
        except Unwell as error:
            words = str(error)
        except (ValueError, KeyError, TypeError):
            words = "not vLLM: its /metrics cannot be read"
        except Exception as error:  # whatever stands at that address, the watch over the others goes on
            logger.error("worker %s: %s", worker.name, type(error).__name__)
            words = f"its health check fails ({type(error).__name__})"
        if worker in self.workers:
            self._set_up(worker, up, words)

    async def _prepare(self, worker: Worker) -> None:
        """Warm the worker up, within `replay_seconds`."""
        worker.warming = True
        try:
            async with asyncio.timeout(self._settings.replay_seconds):
                if worker.engine is not None:
                    for model in set(worker.names.templates.values()):
                        await worker.identify(model)  # else it would be given no hints
                await self._shelf.prepare(worker)
        except TimeoutError:
            pass
        except Exception as error:  # a warm-up that fails must not keep a worker away
            logger.error("warm-up of worker %s: %s", worker.name, type(error).__name__)
        finally:
            worker.warming = False
            self._changed()

    async def _probe(self, worker: Worker) -> str:
        """Ask the worker for its health, metrics and models, and note them; returns what it serves, in words.

        Raises `Unwell` if it answers and cannot be used.
        """
        status, health = await self._get(worker, "/health")
        gateway_id = _gateway_id(health)
        if gateway_id == self.gateway_id:
            raise Unwell(LOOP)
        if status != 200:
            raise Unwell(self._why_refused(worker, "/health", status))
        probed_at = time.perf_counter()
        exposition = await self._metrics_of(worker)
        status, answer = await self._get(worker, MODELS)
        models = _models_in(answer)
        if models is None:
            raise Unwell(self._why_refused(worker, MODELS, status))
        await self._idle.lull(SHORT_PATIENCE_SECONDS)  # requests may wait for the first probe
        found = worker_metrics.read(exposition.decode(errors="replace"))
        boot = f"{worker.url}#{found.boot}"
        worker.is_vllm = gateway_id is None and (found.engine is not None or bool(worker.vllm))
        self._list(worker, models)
        if why := await self._why_asleep(worker, boot, found.sleep_levels):
            raise Unwell(why)
        worker.engine = None if self._settings.shadow else found.engine  # then it is treated as one without the plugin
        worker.refused = found.engine.refused if found.engine is not None else ""
        worker.drafts = found.drafts and found.engine is None
        if found.step_times.known or found.engine is None:
            worker.step_times = found.step_times  # a restarted engine learns them again: until then, the old ones stand
        if boot != worker.boot:
            worker.boot = boot
            worker.breaker.reset()
            worker.cache.restarted()
            if self._settings.replay_seconds:
                self._spawn(self._prepare(worker))
            self._stop_learning(worker)
            for renderer_id in worker.renderer_ids.values():
                self._facts.forget(renderer_id)
            worker.renderer_ids.clear()
            worker.mute_models.clear()
            worker.renderer.forget_routes()
            worker.hits_before = found.hits
            worker.takes_any_name = None
            worker.vllm = await self._vllm_version(worker) if found.engine is None else ""
        if found.engine is not None:
            worker.vllm = found.engine.vllm
        if worker.vllm and not worker.is_vllm and gateway_id is None:
            worker.is_vllm = True
            self._list(worker, models)
        worker.cache_tokens, worker.hits, worker.probed_at = found.cache_tokens, found.hits, probed_at
        if worker in self.workers:  # else it was removed meanwhile, with its series
            self._metrics.engine_patched.labels(worker.name).set(found.engine is not None)
        if worker.engine is not None:
            await self._learn_templates(worker)
        return _what_it_is(worker, found, is_gateway=gateway_id is not None)

    async def _metrics_of(self, worker: Worker) -> bytes:
        """The metrics that are read here. A worker without the plugin, or with an older one, gives all it has."""
        if worker.engine is not None:
            status, some = await self._get(worker, worker_metrics.OF_PLUGIN)
            if status == 200 and worker_metrics.ENGINE.encode() in some:
                return some
        _, exposition = await self._get(worker, "/metrics")
        return exposition

    async def _why_asleep(self, worker: Worker, boot: str, levels: Sequence[int | None]) -> str:
        """Why it computes nothing, in words; empty if it does. `levels`: of sleep, as its metrics tell."""
        if not levels:  # not vLLM, or none that sleeps
            return ""
        if worker.answers.boot != boot:
            worker.answers = EngineAnswers(boot)

        async def ask(path: str) -> None:
            try:
                answers.take(path, *await self._get(worker, path, SLEEP_TIMEOUT))
            except (Unreachable, Broken):
                answers.none(path)

        answers = worker.answers
        await asyncio.gather(*map(ask, tuple(answers.said)))
        return answers.why_asleep(levels)

    def _why_refused(self, worker: Worker, path: str, status: int) -> str:
        """Why a worker answers `path` with `status`, or with nothing that vLLM would say."""
        if status in (401, 403):
            if worker.has_credentials:
                return f"refuses the user and password in its URL ({path} answers {status})"
            if self._settings.worker_api_key_file is not None:
                return f"refuses the key in --worker-api-key-file ({path} answers {status})"
            return "wants a key: --worker-api-key-file FILE, with vLLM's --api-key in it"
        if status >= 500:
            return f"not well: {path} answers {status}"
        return f"not vLLM: {path} {'lists no models' if status == 200 else f'answers {status}'}"

    async def _vllm_version(self, worker: Worker) -> str:
        """As it says itself; with the plugin, its metrics do."""
        try:
            _, answer = await self._get(worker, "/version")
            version = json.loads(answer)["version"]
        except (Unreachable, Broken, ValueError, KeyError, TypeError):
            return ""
        return version if isinstance(version, str) and version.isprintable() else ""

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
        for model in dict.fromkeys(worker.names.templates.values()):
            if (renderer_id := await worker.identify(model)) is not None:
                await self._facts.learn_common(worker.renderer, renderer_id, model)

    def _stop_learning(self, worker: Worker) -> None:
        """The worker has restarted or was removed: what it is being asked is of no use any more."""
        task = self._learning.pop(worker.url, None)
        if task is not None:
            task.cancel()

    async def _get(self, worker: Worker, path: str, timeout: float = PROBE_TIMEOUT) -> tuple[int, bytes]:
        return await self._upstream.fetch("GET", worker.url + path, timeout=timeout)

    def _set_up(self, worker: Worker, up: bool, words: str) -> None:
        """`words`: what it serves, or why it is down. They are logged when they change, not with each health check."""
        if (up, words) != (worker.up, worker.words):
            level = logging.INFO if up else logging.WARNING
            state = "" if words.startswith(ASLEEP) else "up: " if up else "down: "
            logger.log(level, "worker %s is %s%s", worker.name, state, words)
            worker.words = words
        if up != worker.up:
            worker.up = up
            self._changed()
        elif worker.breaker.wants_trial:  # with one of those that wait, perhaps
            self._changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def no_worker(lead: str, workers: Sequence[Worker]) -> NoWorker:
    """The refusal that begins with `lead`, with why each of `workers` is down, as far as it is known."""
    causes = [f"{worker.name}: {worker.why_down}" for worker in workers if worker.why_down]
    if not causes:
        return NoWorker(f"{lead} It may still be loading.")
    more = f"; and {len(causes) - MOST_CAUSES} more" if len(causes) > MOST_CAUSES else ""
    return NoWorker(f"{lead} Worker {'; '.join(causes[:MOST_CAUSES])}{more}.")


def _why_broken(error: Broken, worker: Worker) -> str:
    if isinstance(error, Silent):
        return f"no answer within {PROBE_TIMEOUT:g} s"
    if isinstance(error, Malformed):
        return "what answers there does not speak HTTP: https:// instead of http://?"
    # One that has answered has the right address: it stops, or this gateway does.
    return "it closes the connection without an answer" + ("" if worker.boot else ": https:// instead of http://?")


def _gateway_id(health: bytes) -> str | None:
    """What a Seamark gateway says of itself at /health; vLLM's answer is empty."""
    try:
        return str(json.loads(health)["gateway"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _models_in(answer: bytes) -> list[dict[str, Any]] | None:
    """The models of a list as OpenAI's API answers it, None if it is none."""
    try:
        return [entry for entry in json.loads(answer)["data"] if isinstance(entry["id"], str)]
    except (ValueError, KeyError, TypeError):
        return None


def _some(names: Sequence[str]) -> str:
    """A list of names, or its beginning and how many there are beside."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _what_it_is(worker: Worker, found: WorkerMetrics, is_gateway: bool) -> str:
    models = _some(sorted(worker.model_ids)) or "no model"
    if is_gateway:
        return f"serves {models}; a Seamark gateway, not a worker: no hint is sent through it"
    if found.engine is not None:
        patched = f"patched (Seamark {found.engine.version}, match unit {found.engine.match_unit} tokens)"
        if found.engine.refused:
            patched += f", but it gets no hints: {found.engine.refused}"
        return f"serves {models}; vLLM {worker.vllm}; {patched}"
    if not worker.vllm and found.hits is None:
        return f"serves {models}; not vLLM, as far as it shows: requests pass through without hints"
    patched = f"not patched, so it gets no hints: seamark doctor --worker {worker.url}"
    return f"serves {models}; vLLM {worker.vllm or 'of unknown version'}; {patched}"


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
