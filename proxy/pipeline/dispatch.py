"""Giving a request to a worker: waiting for a slot, choosing among the workers that have one, and recording the choice.

Everything between finding a slot and counting it happens without an await, so a burst sees itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

from proxy.boundaries.boundary import Entry, Found
from proxy.chat.responses import StoredResponses
from proxy.errors import NoWorker
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet
from proxy.fleet.part import Change, Shelf
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import Slot, Worker
from proxy.http.auth import ApiKey
from proxy.observability.reasons import Expectation
from proxy.pipeline.prompt_reader import TOKENS_PER_BYTE
from proxy.pipeline.request import Choice, ProxiedRequest, affinity_key, user_key
from proxy.routing.engine_events import EngineEvents
from proxy.routing.policy import choose
from proxy.routing.prefix_index import Holding, PrefixIndex
from proxy.routing.queue import AdmissionQueue
from proxy.settings import Settings

NOT_FOUND = 404

TOO_LONG = 400  # among other things

# Workers that one request asks for a response whose worker is not known.
MOST_ASKED = 16


class Dispatcher:
    """One per gateway."""

    def __init__(
        self,
        settings: Settings,
        pool: WorkerPool,
        queue: AdmissionQueue,
        prefix_index: PrefixIndex,
        engine_events: EngineEvents,
        warmup: WarmupSet,
        stored: StoredResponses,
        shelf: Shelf,
    ) -> None:
        self._load_slack = settings.load_slack
        self._pool = pool
        self._queue = queue
        self._prefix_index = prefix_index
        self._engine_events = engine_events
        self._warmup = warmup
        self._stored = stored
        self._shelf = shelf
        self._prefilling: dict[str, Lease] = {}  # whose prompts count as not computed, by the engine's name of each
        engine_events.on_computed = self._computed

    def lease(self, request: ProxiedRequest) -> Lease:
        """`async with` it: a slot at a worker for as long as the request is under way there."""
        return Lease(self, request)

    async def acquire(self, lease: Lease) -> None:
        """Take a slot; wait while there is none.

        However often a request is in the queue, it is there for no longer than one may. Raises `NoWorker`, `Overloaded`
        or `KeyBusy`.
        """
        request = lease.request
        model = request.model
        timings = request.timings
        with timings.waiting():
            await self._pool.find(model)
            kept = request.kept_id
            wants = (
                model if isinstance(model, str) else None,
                self._stored.boot(kept, request.client.owner) if kept is not None else None,
                *[worker.name for worker in request.asked],
            )
            timings.asked = time.perf_counter()
            await self._queue.acquire(lease.key, wants, partial(self._take, lease), Lease.never_sent, lease.waited)
            lease.waited += time.perf_counter() - timings.asked

    @contextlib.contextmanager
    def counted(self, key: ApiKey | None) -> Iterator[None]:
        """Count at its key a request that needs no slot."""
        slot = KeySlot(key)
        try:
            yield
        finally:
            if slot.give_back():
                self.released()

    def seeks_on(self, request: ProxiedRequest, worker: Worker, status: int) -> bool:
        """Whether a worker that has not been asked may keep what the request names and `worker` does not know.

        The worker of a response is remembered once one has answered for it, that of anything else if another has not:
        what all know, such as a list, is no one's.
        """
        keeper = self._keeper(request)
        if status == TOO_LONG and worker not in request.asked and keeper is None:
            model, length = request.model, worker.length(request.model)
            request.asked += [each for each in self._pool.serving(model) if each.length(model) <= length]
            return bool(self._unasked(request))
        if (kept := request.kept_id) is None or keeper is worker:
            return False
        if status == NOT_FOUND:
            request.asked.append(worker)
            # Another gateway may have told meanwhile whose it is.
            return len(request.asked) < MOST_ASKED and (keeper is not None or bool(self._unasked(request)))
        if 200 <= status < 300 and (request.asked or request.response_id is not None):
            self._stored.keep(kept, worker.boot, request.client.owner)
        return False

    def taken(self, lease: Lease, worker: Worker) -> None:
        """The request goes to `worker`, which is to compute its prompt."""
        self._prefilling[lease.request.engine_id] = lease
        self._shelf.tell(worker, Change.GIVEN)

    def prefilled(self, lease: Lease) -> None:
        """Nothing of the request's prompt is left to compute."""
        self._prefilling.pop(lease.request.engine_id, None)

    def released(self) -> None:
        """A slot has become free."""
        if len(self._queue):
            self._queue.wake()

    def _computed(self, engine_id: str, tokens: int, is_last: bool) -> None:
        """An engine has computed so many tokens of a prompt; `is_last`: all boundaries of it.

        An answer that comes as a whole says so too late: its worker would count as busy with a prompt to the end.
        """
        if (lease := self._prefilling.get(engine_id)) is None:
            return
        found = lease.request.prompt.found
        if is_last and found is not None and any(boundary.kind == "turn" for boundary in found.boundaries):
            lease.prefilled()  # the prompt's end is among them, and its length was an estimate
        else:
            lease.prefilled_to(tokens)

    def not_computed(self, request: ProxiedRequest) -> None:
        """The worker never got the request: what was recorded for it is not there."""
        if (choice := request.choice) is not None and choice.expected is not None:
            self._engine_events.refused(choice.worker, request.engine_id)
            if not choice.worker.takes_hints and (found := request.prompt.found) is not None:
                self._prefix_index.forget([boundary.key for boundary in found.boundaries], choice.worker.boot)

    def _take(self, lease: Lease) -> Lease | None:
        """The lease with a slot; None if the workers that could serve the request are full."""
        request = lease.request
        if lease.key is not None and not lease.key.has_room:
            return None
        roomy = self._roomy(request)
        if not roomy:
            return None
        request.timings.choosing = time.perf_counter()
        lease.take(self._choose(request, roomy))
        return lease

    def other_worker(self, lease: Lease) -> Choice | None:
        """A worker that has a slot for the request now, other than the one that has had it; recorded as chosen."""
        request, refused = lease.request, lease.worker
        try:
            others = [worker for worker in self._roomy(request) if worker is not refused]
        except NoWorker:
            return None
        if not others:
            return None
        self.not_computed(request)
        return self._choose(request, others)

    def _roomy(self, request: ProxiedRequest) -> list[Worker]:
        """Workers that have a slot for it."""
        if (keeper := self._keeper(request)) is not None:
            if not keeper.up:
                raise no_worker("The worker that stores what this request names is not ready.", [keeper])
            workers = [keeper]
        elif not (workers := self._unasked(request)):
            # Whose response it continues decides before a model that is not named.
            workers = self._pool.for_model(request.model or None if request.kept_id is not None else request.model)
        # As `has_room` says, and `takes_hints` below: for a thousand workers, a property costs more than all else here.
        return [worker for worker in workers if not worker.max_inflight or worker.inflight < worker.max_inflight]

    def _choose(self, request: ProxiedRequest, workers: Sequence[Worker]) -> Choice:
        """Choose and record it in one go, so that a request arriving right behind already follows."""
        found, model = request.prompt.found, request.model
        # A name that no worker lists goes to one worker for as long as nothing else decides.
        together = model if model and not workers[0].serves(model) else None
        if found is None:
            return Choice(choose(workers, {}, self._load_slack, together))
        # All that could hold it, because a worker that is full or not ready yet has not lost it.
        serving = self._pool.serving(model)
        boots = {worker.boot for worker in serving if worker.takes_hints}
        held = self._prefix_index.longest(found.prefixes, {worker.boot for worker in serving if worker.match_unit})
        session = affinity_key(request.client.headers, request.body.parsed)
        user = user_key(request.body.parsed, found) if session is None else None
        worker = choose(workers, held, self._load_slack, session or user or together, found.shared, waits=user is None)
        boot, engine, takes_hints = worker.boot, worker.engine, worker.takes_hints
        here, longest = held.get(boot), max((held[boot] for boot in held.keys() & boots), default=None)
        if (earlier := request.expected) is not None:  # it is sent again, elsewhere: the first try counts for nothing
            sent, ever_sent, told = earlier.sent, earlier.ever_sent, earlier.held
        else:
            sent = self._prefix_index.sent(found.prefixes, boots)
            ever_sent = self._prefix_index.ever_sent(found.prefixes)
            told = longest.tokens if longest is not None and longest.is_told else 0
        expected = Expectation(
            failure=found.failure if takes_hints else _failure(worker),
            sent=sent,
            sent_here=sent is not None and boot in sent.held,
            ever_sent=ever_sent,
            held=told,
            predicted=_predicted(here) if takes_hints else 0,
            match_unit=engine.match_unit if engine is not None else 1,
            ahead=engine.ahead if engine is not None else 0,
        )
        hint: tuple[Entry, ...] = ()
        if takes_hints:
            hint = worker.hint(found)
            self._engine_events.sent(worker, request.engine_id, found.boundaries, hint)
            self._prefix_index.record(found.boundaries, boot, hint)
            if longest is not None:
                self._keep_for_warmup(request, found, worker, longest)
        else:  # vLLM keeps what it computes, and says nothing of it
            self._prefix_index.record(found.boundaries, boot)
        return Choice(worker, expected, here.tokens if here is not None else 0, hint)

    def _keep_for_warmup(self, request: ProxiedRequest, found: Found, worker: Worker, shared: Holding) -> None:
        """The request shares a prefix: a restarted worker is to be given it again."""
        key, body = shared.key, request.body
        if not found.boundaries or self._warmup.used_again(key):
            return
        put = {name: value for name, value in body.put.items() if name == "cache_salt"}
        kept = found.without_request()
        replay = WarmupRequest(request.client.endpoint, body.raw, body.names, put, kept, worker.listed(request.model))
        shorter = found.prefixes[: found.prefixes.index(key)] if key in found.prefixes else ()
        self._warmup.add(key, shared.tokens, shorter, replay)

    def is_stored(self, request: ProxiedRequest) -> bool:
        """Whether it names a stored response, or what a known worker has made: worth waiting for a slot."""
        return request.response_id is not None or self._keeper(request) is not None

    def _keeper(self, request: ProxiedRequest) -> Worker | None:
        """The worker that stores the response or whatever this request asks for; others would not know it."""
        if (kept := request.kept_id) is None:
            return None
        boot = self._stored.boot(kept, request.client.owner)
        return next((worker for worker in self._pool.workers if worker.boot == boot), None) if boot else None

    def _unasked(self, request: ProxiedRequest) -> list[Worker]:
        """Once one does not know the response: the others that may, failing ones too. Nobody else can answer for it."""
        if not request.asked:
            return []
        workers = self._pool.serving(request.model) or self._pool.up
        return [worker for worker in workers if worker not in request.asked]


class KeySlot:
    """A request's place among those of its key that are under way. It is counted here and nowhere else."""

    __slots__ = ("_key",)

    def __init__(self, key: ApiKey | None) -> None:
        self._key = key
        if key is not None:
            key.under_way += 1

    def give_back(self) -> bool:
        """Does nothing the second time. Whether another request may have waited for it."""
        key, self._key = self._key, None
        if key is None:
            return False
        was_full = not key.has_room
        key.under_way -= 1
        return was_full and key.queued > 0


class Lease:
    """One request's slot. The request is counted at its worker and its key, and un-counted, here and nowhere else."""

    __slots__ = (
        "_dispatcher",
        "_is_trial",
        "_key_slot",
        "_slot",
        "_was_idle",
        "key",
        "moves",
        "prompt",
        "request",
        "waited",
    )

    def __init__(self, dispatcher: Dispatcher, request: ProxiedRequest) -> None:
        self._dispatcher = dispatcher
        self.request = request
        self.key = request.client.key  # at which it counts
        self.waited = 0.0  # seconds in the queue so far
        self.moves: Callable[[], object] = bool  # called when it has to wait again
        self.prompt = 0  # tokens, roughly
        self._key_slot: KeySlot | None = None
        self._slot: Slot | None = None  # None: not taken yet, or given back
        self._is_trial = False  # of a worker that failed
        self._was_idle = False  # the worker had no other request when it got this one

    async def __aenter__(self) -> Lease:
        await self._dispatcher.acquire(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def worker(self) -> Worker:
        """The worker that has the request, or had it last."""
        if (worker := self.request.worker) is None:
            raise RuntimeError("The lease has not been entered.")
        return worker

    @property
    def has_slot(self) -> bool:
        """Whether the request is counted at a worker."""
        return self._slot is not None

    @property
    def prefill_tokens(self) -> int:
        """What the worker has still to compute of the prompt, as it is counted."""
        return self._slot.prefill_tokens if self._slot is not None else 0

    @property
    def is_alone(self) -> bool:
        """Whether the worker has had no other request since it got this one."""
        return self._was_idle and self._slot is not None and self.worker.dispatched == self._slot.number

    def seeks_on(self, status: int) -> bool:
        """Whether to `move`, since the worker says by `status` that it does not store the response that is named."""
        return self._dispatcher.seeks_on(self.request, self.worker, status)

    @property
    def is_stored(self) -> bool:
        """As the dispatcher says of the request."""
        return self._dispatcher.is_stored(self.request)

    async def move(self) -> None:
        """The worker has computed nothing of the request: give its slot back, and wait for another one."""
        self.never_sent()
        self.moves()
        await self._dispatcher.acquire(self)

    def move_now(self) -> bool:
        """The worker has refused the request: go to another one, if one has a slot now."""
        choice = self._dispatcher.other_worker(self)
        if choice is None:
            return False
        self._end()
        self.take(choice)
        self._dispatcher.released()
        return True

    def never_sent(self) -> None:
        """The worker never got the request: nothing of it is there."""
        self._dispatcher.not_computed(self.request)
        self.release()

    def unused(self) -> None:
        """The request is answered without a worker: if it has a slot, give it back, as if it had not been chosen."""
        if self.has_slot:
            self.never_sent()
            self.request.give(None)
            self.waited = 0.0  # it has had its turn

    def take(self, choice: Choice) -> None:
        """A slot at the worker that was chosen."""
        request, worker = self.request, choice.worker
        request.give(choice)
        self.prompt = request.prompt.tokens or round(len(request.body.raw) * TOKENS_PER_BYTE)
        self._was_idle = not worker.inflight
        self._slot = Slot(worker, self.prompt - choice.held)
        self._is_trial = worker.breaker.is_open and worker.breaker.begin_trial()
        self._key_slot = KeySlot(self.key)
        self._dispatcher.taken(self, worker)
        request.timings.leased = time.perf_counter()

    def prefilled(self) -> None:
        """The answer has begun: the prompt is computed."""
        self.prefilled_to(self.prompt)
        self._dispatcher.prefilled(self)

    def prefilled_to(self, tokens: int) -> None:
        """So many tokens of the prompt are computed."""
        if self._slot is not None:
            self._slot.left_to_compute(max(0, self.prompt - tokens))

    def release(self) -> None:
        """The worker is done with the request. Does nothing the second time."""
        if self._slot is not None:
            self._end()
            self._dispatcher.released()

    def _end(self) -> None:
        if (slot := self._slot) is None:
            return
        self.prefilled()
        self._slot = None
        slot.give_back()
        if self._is_trial:
            self.worker.breaker.end_trial()
        if self._key_slot is not None:
            self._key_slot.give_back()


def _predicted(holding: Holding | None) -> int:
    """Tokens that are expected from a worker's cache: what an engine has told, no guess."""
    return holding.tokens if holding is not None and holding.is_told else 0


def _failure(worker: Worker) -> str:
    """Why a worker gets no hint whatever the request is."""
    # In shadow mode a plugin that refuses hints is known, too.
    return "unpatched" if worker.engine is None and not worker.refused else "hint_ignored"
