"""All workers: a health check every few seconds says which are up, their models, boot and engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from xxhash import xxh3_64_intdigest

from proxy.boundaries.facts_learner import FactsLearner
from proxy.boundaries.renderer import WorkerRenderer
from proxy.config_files import EXAMPLE_WORKERS, WatchedFile, without_credentials, workers_in
from proxy.errors import BadRequest, NoWorker
from proxy.fleet.discovery import is_other_family
from proxy.fleet.model_names import chosen_for, name_keys, some_of
from proxy.fleet.part import Change, Shelf
from proxy.fleet.probe import ASLEEP, Probe, Probed, Unwell, why_broken
from proxy.fleet.worker import CLOSED, DRAFT_STATES, OPEN, TRIAL, Worker, sound_of
from proxy.http.client import Broken, Exhausted, Refused, Unreachable, Upstream
from proxy.idle_work import SHORT_PATIENCE_SECONDS, IdleWork, beside
from proxy.metrics import Metrics
from proxy.settings import Settings

logger = logging.getLogger("seamark.workers")

# Seconds that a worker which has booted is given to render the small chats that teach its template, before it gets
# requests. Learning goes on after that.
FACTS_SECONDS = 5.0
MOST_CAUSES = 3  # of workers that are down, in what a client reads

# Seconds from one question after a name that no worker lists to the next, and that its request waits for the answers.
ASK_NAMES_SECONDS, NAMES_SECONDS = 1.0, 1.0


@dataclass(eq=False)
class WorkerPool:
    """All workers that the settings and the workers file name, watched by a background task."""

    _settings: Settings
    _upstream: Upstream
    _metrics: Metrics
    _facts: FactsLearner
    _idle: IdleWork
    _shelf: Shelf
    _changed: Callable[[], None] = lambda: None  # is called when other workers may be ready than before
    # What this gateway says at /health, and knows itself by.
    gateway_id: str = field(default_factory=lambda: os.urandom(8).hex())

    def __post_init__(self) -> None:
        self._checks: dict[str, asyncio.Task[None]] = {}
        self._learning: dict[str, asyncio.Task[None]] = {}  # templates, by the worker's address
        self._ranks: dict[str, tuple[int, ...]] = {}  # of engines behind one address, if there are several
        self._name_keys: dict[str, str] = {}  # of all names in all lists, see `key_of`
        self._asking: asyncio.Future[Any] | None = None  # for a name that nobody lists
        self._asked_at = float("-inf")  # time.monotonic()
        self._naming: set[str] = set()  # addresses of workers that took a name which they do not list
        self.discovered: tuple[str, ...] = ()  # base URLs
        path = self._settings.workers_file
        self.file = WatchedFile("workers_file", path, workers_in, EXAMPLE_WORKERS) if path is not None else None
        self.workers: list[Worker] = []
        self._all: list[Worker] = []  # with further addresses of some
        self._twins: set[str] = set()  # URLs of these
        self._answering: set[str] = set()  # URLs that answered when they were last asked
        # Those that were removed and have requests under way, too: one that comes back still has them.
        self._known = WeakValueDictionary[str, Worker]()
        self._reconcile()

    @property
    def up(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.up]

    def boots(self) -> list[str]:
        return [worker.boot for worker in self.workers if worker.boot]

    async def exposition(self, worker: Worker) -> str:
        """A worker's own metrics, in Prometheus' text format; empty if it does not give them."""
        return (await self._probe_of(worker).page("/metrics")).decode(errors="replace")

    async def ready(self) -> list[Worker]:
        """Workers that are up, after a health check of all if none was."""
        if not self.up:
            await self.check_all()
        return self.up

    async def find(self, model: Any) -> list[Worker]:
        """As `serving`, after a look at the workers, since none that is known to be up lists it."""
        await self.ready()
        await self.look_for(model)
        return self.serving(model)

    def listing(self, model: Any) -> list[Worker]:
        """Workers that are up and list `model`, warm or not. It runs for every request, over all workers."""
        if not isinstance(model, str):
            return []
        return [worker for worker in self.workers if worker.up and model in worker.names.templates]

    def serving(self, model: Any) -> list[Worker]:
        """The same; a name that is empty, or that no worker lists, is left to the workers: see `_taking`."""
        return self.listing(model) or self._taking(model)

    def for_model(self, model: Any, serving: Sequence[Worker]) -> Sequence[Worker]:
        """Workers to choose from: of those `serving` the `model`, the ones that do not fail while others do not.

        If the request names no model by its kind (None), all that are up. Raises `NoWorker`, or `BadRequest` for an
        empty name before several models.
        """
        if serving:
            if not [worker for worker in serving if worker.warming or worker.breaker.is_open]:
                return serving
            return sound_of([worker for worker in serving if not worker.warming] or serving)
        served_by = [worker for worker in self.workers if worker.serves(model)]
        if served_by or not (up := self.up):
            raise no_worker("No worker is ready for this model.", served_by or self.workers)
        if model == "" and len(models := self.base_models()) > 1:
            named = some_of(models)
            raise BadRequest(f"This request names no model, and several are served here: {named}.", param="model")
        return sound_of(up)

    def _taking(self, model: Any) -> list[Worker]:
        """Workers that are up, for a name that is empty or that none of all workers lists.

        An empty one means the only model, and nothing before several ones. Any other goes to one model, the same each
        time: of workers that take any name (vLLM's VLLM_SKIP_MODEL_NAME_VALIDATION), if some are known to, and else of
        those that were not asked yet. Where none does, they word the refusal.
        """
        if not isinstance(model, str) or model in self._name_keys:
            return []
        workers = [worker for worker in self.workers if worker.up and worker.names.base]
        if not model:
            return workers if len(self.base_models()) == 1 else []
        by_what_is_known = ([each for each in workers if each.takes_any_name is known] for known in (True, None))
        workers = next(filter(None, by_what_is_known), workers)
        models = {self._name_keys[worker.names.base] for worker in workers}
        if len(models) > 1:
            chosen = chosen_for(model, models)
            workers = [worker for worker in workers if self._name_keys[worker.names.base] == chosen]
        return workers

    def lists(self, model: Any) -> bool:
        return isinstance(model, str) and model in self._name_keys

    def base_models(self) -> list[str]:
        """The different models of all workers, up or not, adapters left out: one name of each."""
        return sorted({self._name_keys[names[0]] for worker in self.workers for names in worker.names.bases})

    def key_of(self, model: Any) -> str | None:
        """The name under which all is kept that is known of `model`, by whichever name; None for what is no name."""
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
        with suppress(Unreachable, Broken, Unwell):
            models = await self._probe_of(worker).models()
            self._note(worker, replace(worker.probed, models=models))

    def answered_name(self, worker: Worker, model: Any, *, taken: bool) -> None:
        """A worker took a request for `model`, or said that there is no such model."""
        if not isinstance(model, str) or not model or worker.serves(model):
            return
        if not taken:
            worker.takes_any_name = False
        elif not worker.takes_any_name and worker.url not in self._naming:
            self._naming.add(worker.url)
            beside(self._learn_name(worker, model))

    async def _learn_name(self, worker: Worker, model: str) -> None:
        """The worker took a name that was not in its list: it takes any, unless this one was added meanwhile."""
        boot = worker.boot
        await self.ask_models(worker)
        self._naming.discard(worker.url)
        if worker.boot == boot and not worker.serves(model):
            worker.takes_any_name = True

    def _note(self, worker: Worker, probed: Probed) -> None:
        """The worker has said this of itself. Odd lists raise here, before anybody else reads them."""
        is_other = (probed.names, probed.boot) != (worker.names, worker.boot)
        worker.learn(probed)
        if is_other:
            self._name_keys = name_keys(each.names for each in self.workers)
            if all(each.names.base for each in self.workers):
                for model in {*self._settings.response_cache_models} - {*self._name_keys, "*"}:
                    logger.warning("response_cache_models: no worker lists %s now", model)
            for model in self.uneven_models():
                logger.warning("workers differ in the tokens they take for %s (max_model_len)", model)

    def uneven_models(self) -> list[str]:
        """Base models whose workers take prompts of different lengths."""
        lengths = {(each.names.base, each.length(each.names.base)) for each in self.workers if each.boot}
        return sorted(model for model, count in Counter(model for model, _ in lengths).items() if count > 1)

    async def watch(self) -> None:
        while True:
            await self.check_all()
            await asyncio.sleep(self._settings.health_interval)

    def refresh(self) -> None:
        if self.file is not None and self.file.refresh():
            self._reconcile()

    def discover(self, urls: tuple[str, ...]) -> None:
        self.discovered = urls
        self._reconcile_and_look()

    def _reconcile_and_look(self) -> None:
        """Reconcile; whoever is new is looked at before the next health check."""
        before = {worker.url for worker in self._all}
        self._reconcile()
        for worker in self._all:
            if worker.url not in before:
                beside(self.check_health(worker))

    async def check_all(self) -> None:
        await asyncio.gather(*(self.check_health(worker) for worker in self._all))

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
            ranks, limit = self._ranks.get(address, ()), settings.max_inflight if limit is None else limit
            self._upstream.trust(address, userinfo)
            for name in [f"{address}#{rank}" for rank in ranks] or [address]:
                wanted[name] = max(1, limit // len(ranks)) if limit and ranks else limit
                with_credentials[name] = userinfo is not None
        present = {worker.url: worker for worker in self._all}
        for worker in (present[url] for url in present.keys() - wanted.keys()):
            logger.info("worker %s is removed", worker.name)
            self._checks.pop(worker.url, None)
            if worker.address not in {name.partition("#")[0] for name in wanted}:
                self._upstream.trust(worker.address, None)
            if worker.url not in self._twins:
                self._remove(worker)
        self._twins, self._answering = self._twins & wanted.keys(), self._answering & wanted.keys()
        self._all = [present.get(url) or self._new(url) for url in wanted]
        self._select()
        for worker in self._all:
            worker.max_inflight = wanted[worker.url]
            worker.has_credentials = with_credentials[worker.url]

    def _select(self) -> None:
        self.workers = [worker for worker in self._all if worker.url not in self._twins]
        self._name_keys = name_keys(worker.names for worker in self.workers)

    def _remove(self, worker: Worker) -> None:
        worker.up = False
        for gauge in (self._metrics.worker_up, self._metrics.engine_patched, self._metrics.inflight):
            gauge.remove(worker.name)
        self._metrics.drafts.remove_by_labels({"worker": worker.name})
        self._stop_learning(worker)
        self._shelf.tell(worker, Change.REMOVED)

    def _is_twin(self, worker: Worker) -> bool:
        """Whether one that answers is a further address of another worker, whose place it takes if that does not."""
        self._answering.add(worker.url)
        if worker.up:
            return False
        other = next((each for each in self.workers if each is not worker and each.is_same_server(worker)), None)
        is_twin = other is not None and other.url in self._answering
        if (hidden := worker if is_twin else other) is not None:
            self._hide(hidden)
        if not is_twin and worker.url in self._twins:
            self._twins.remove(worker.url)
            self._show(worker)
            self._select()
        return is_twin

    def _hide(self, worker: Worker) -> None:
        if worker.url not in self._twins:
            logger.info("worker %s is left out: it is another address of one that is there", worker.name)
            self._twins.add(worker.url)
            self._remove(worker)
            self._select()

    def _new(self, url: str) -> Worker:
        if (worker := self._known.get(url)) is None:
            address, seconds = url.partition("#")[0], self._settings.render_timeout
            renderer = WorkerRenderer(self._upstream, address, seconds, self._metrics.renders)
            worker = self._known[url] = Worker(url, renderer, in_shadow=self._settings.shadow)
        self._show(worker)
        return worker

    def _show(self, worker: Worker) -> None:
        self._metrics.worker_up.labels(worker.name).set_function(lambda: worker.up and not worker.breaker.is_open)
        self._metrics.engine_patched.labels(worker.name).set(0)
        self._metrics.inflight.labels(worker.name).set_function(lambda: worker.inflight)

    async def _check_health(self, worker: Worker) -> None:
        up, gone, refusals = False, False, 0
        try:
            words, up = await self._probe(worker), True
        except Exhausted:  # nothing is known of the worker
            up, words = worker.up, worker.words
        except Broken as error:  # gone, or too busy for a probe: then its answers speak for it
            up = worker.up and time.monotonic() - worker.answered_at < 2 * self._settings.health_interval
            words, gone = worker.words if up else why_broken(error, bool(worker.boot)), not up
        except Unreachable as error:
            words, gone = str(error) or "no connection", True
            refusals = worker.refusals + 1 if isinstance(error, Refused) else 0
            if not worker.boot and is_other_family(worker.url, self.discovered, self.up):
                self._hide(worker)
        except Unwell as error:
            words = self._why_unwell(worker, error)
        except Exception as error:  # whatever stands at that address, the watch over the others goes on
            logger.error("worker %s: %s", worker.name, type(error).__name__)
            words = f"its health check fails ({type(error).__name__})"
        if gone:
            self._answering.discard(worker.url)
        worker.refusals = refusals
        if refusals:
            self._shelf.tell(worker, Change.REFUSED)
        if worker in self.workers:
            self._set_up(worker, up, words)

    def _show_drafts(self, worker: Worker) -> None:
        """Whether hints are in use beside its drafts; one that takes them only now is warmed up beside its requests."""
        state, before = worker.draft_state, worker.shown_drafts
        for each in DRAFT_STATES:
            self._metrics.drafts.labels(worker.name, each).set(each == state)
        if state == TRIAL:
            self._shelf.tell(worker, Change.TRIES)
        if state == before:
            return
        worker.shown_drafts = state
        if state == TRIAL:
            logger.info("worker %s drafts: hints are on trial, and off until it is over", worker.name)
        elif state == CLOSED:
            figures = f" ({worker.trial_figures})" if worker.trial_figures else ""
            logger.error("worker %s: hints are off until it restarts: %s%s", worker.name, worker.refused, figures)
        elif state == OPEN:
            logger.info("worker %s: hints are on beside drafts", worker.name)
            if before == TRIAL and self._settings.replay_seconds:
                beside(self._prepare(worker))

    async def _prepare(self, worker: Worker) -> None:
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
        """Ask the worker what it is, and note it; returns what it serves, in words.

        Raises `Unwell` if it answers and cannot be used.
        """
        last, asked, of_plugin = worker.probed, self._probe_of(worker), worker.engine is not None
        probed = await asked.probe(last, own_id=self.gateway_id, of_plugin=of_plugin, lull=self._lull)
        self._note(worker, probed)
        if probed.reports.ranks != self._ranks.get(worker.address, ()):
            # Each engine has a cache of its own: it is a worker of its own, and requests are sent to it by its rank.
            self._ranks[worker.address] = probed.reports.ranks
            self._reconcile_and_look()
        if probed.boot != last.boot:
            self._stop_learning(worker)
            for renderer_id in worker.renderer_ids.values():
                self._facts.forget(renderer_id)
            worker.restarted()
        if worker not in self._all or self._is_twin(worker):
            return probed.words
        if probed.asleep:
            raise Unwell(probed.asleep)
        if probed.boot != last.boot and self._settings.replay_seconds:
            worker.warming = True
            beside(self._prepare(worker))
        if worker in self.workers:  # else it was removed meanwhile, with its series
            self._metrics.engine_patched.labels(worker.name).set(probed.metrics.engine is not None)
            if worker.draft_state:
                self._show_drafts(worker)
        if worker.engine is not None:
            await self._learn_templates(worker)
        return probed.words

    def _why_unwell(self, worker: Worker, error: Unwell) -> str:
        if error.status not in (401, 403):
            return str(error)
        if worker.has_credentials:
            return f"refuses the user and password in its URL ({error.path} answers {error.status})"
        if self._settings.worker_api_key_file is not None:
            return f"refuses the key in --worker-api-key-file ({error.path} answers {error.status})"
        return "wants a key: --worker-api-key-file FILE, with vLLM's --api-key in it"

    async def _learn_templates(self, worker: Worker) -> None:
        """Learn the templates of its models, so that their first requests go out with a whole hint."""
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
        if (task := self._learning.pop(worker.url, None)) is not None:
            task.cancel()

    async def _lull(self) -> None:
        await self._idle.lull(SHORT_PATIENCE_SECONDS)  # requests may wait for the first probe

    def _probe_of(self, worker: Worker) -> Probe:
        return Probe(self._upstream, worker.address, worker.url)

    def _set_up(self, worker: Worker, up: bool, words: str) -> None:
        """`words`: what it serves, or why it is down. They are logged when they change, not with each health check."""
        if (up, words) != (worker.up, worker.words):
            level = logging.INFO if up and not worker.other_version else logging.WARNING
            state = "" if words.startswith(ASLEEP) else "up: " if up else "down: "
            logger.log(level, "worker %s is %s%s", worker.name, state, words)
            worker.words = words
        was_up, worker.up = worker.up, up
        if up != was_up or worker.breaker.wants_trial:  # with one of those that wait, perhaps
            self._changed()


def no_worker(lead: str, workers: Sequence[Worker]) -> NoWorker:
    """The refusal that begins with `lead`, with why each of `workers` is down, as far as it is known."""
    if not workers:
        return NoWorker(f"{lead} There is none: workers_file says so, or a name in workers_dns has no address.")
    causes = [f"{worker.name}: {worker.why_down}" for worker in workers if worker.why_down]
    if not causes:
        return NoWorker(f"{lead} It may still be loading.")
    more = f"; and {len(causes) - MOST_CAUSES} more" if len(causes) > MOST_CAUSES else ""
    return NoWorker(f"{lead} Worker {'; '.join(causes[:MOST_CAUSES])}{more}.")
