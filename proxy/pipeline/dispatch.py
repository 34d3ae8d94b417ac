"""Giving a request to a worker: waiting for a slot, choosing among the workers that have one, and recording the choice.

Everything between finding a slot and counting it happens without an await, so a burst sees itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from proxy.boundaries.boundary import Entry, Found
from proxy.chat.responses import StoredResponses
from proxy.errors import NoWorker
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet
from proxy.fleet.part import Change, Shelf
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import Slot, Worker
from proxy.http.auth import ApiKey
from proxy.observability.reasons import Expectation
from proxy.pipeline.exchange import Choice, Exchange, affinity_key, user_key
from proxy.pipeline.prompt_reader import TOKENS_PER_BYTE
from proxy.routing.engine_events import EngineEvents
from proxy.routing.policy import choose
from proxy.routing.prefix_index import Holding, PrefixIndex
from proxy.routing.queue import AdmissionQueue

NOT_FOUND = 404
TOO_LONG = 400  # among other things
MOST_ASKED = 16  # workers that one request asks for a response whose worker is not known


@dataclass(eq=False)
class Dispatcher:
    _load_slack: int  # setting
    _pool: WorkerPool
    _queue: AdmissionQueue
    _prefix_index: PrefixIndex
    _engine_events: EngineEvents
    _warmup: WarmupSet
    _stored: StoredResponses
    shelf: Shelf
    prefilling: dict[str, Lease]  # whose prompts count as not computed, by what engines call each: `prompt_computed`

    def lease(self, exchange: Exchange) -> Lease:
        """`async with` it: a slot at a worker for as long as the request is under way there."""
        return Lease(self, exchange)

    async def acquire(self, lease: Lease) -> None:
        """Take a slot; its waits together last no longer than one. Raises `NoWorker`, `Overloaded` or `KeyBusy`."""
        exchange, key = lease.exchange, lease.exchange.head.key
        model = exchange.model
        timings = exchange.timings
        with timings.waiting():
            await self._pool.find(model)
            kept = exchange.kept_id
            boot = self._stored.boot(kept, exchange.head.owner) if kept is not None else None
            wants = (model if isinstance(model, str) else None, boot, *[worker.name for worker in exchange.asked])
            timings.asked = time.perf_counter()
            await self._queue.acquire(key, wants, partial(self._take, lease), Lease.never_sent, lease.waited)
            lease.waited += time.perf_counter() - timings.asked

    @contextlib.contextmanager
    def counted(self, key: ApiKey | None) -> Iterator[None]:
        """Count at its key a request that needs no slot."""
        count_at(key, 1)
        try:
            yield
        finally:
            is_awaited = key is not None and not key.has_room and key.queued > 0
            count_at(key, -1)
            if is_awaited:
                self.released()

    def should_retry_elsewhere(self, exchange: Exchange, worker: Worker, status: int) -> bool:
        """Whether a worker that has not been asked may keep what the request names and `worker` does not know.

        The worker of a response is remembered once one has answered for it, that of anything else if another has not:
        what all know, such as a list, is no one's.
        """
        keeper = self.keeper(exchange)
        if status == TOO_LONG and worker not in exchange.asked and keeper is None:
            model, length = exchange.model, worker.length(exchange.model)
            exchange.asked += [each for each in self._pool.serving(model) if each.length(model) <= length]
            return bool(self._unasked(exchange))
        if (kept := exchange.kept_id) is None or keeper is worker:
            return False
        if status == NOT_FOUND:
            exchange.asked.append(worker)
            # Another gateway may have told meanwhile whose it is.
            return len(exchange.asked) < MOST_ASKED and (keeper is not None or bool(self._unasked(exchange)))
        if 200 <= status < 300 and (exchange.asked or exchange.response_id is not None):
            self._stored.keep(kept, worker.boot, exchange.head.owner)
        return False

    def released(self) -> None:
        if len(self._queue):
            self._queue.wake()

    def not_computed(self, exchange: Exchange) -> None:
        """The worker never got the request: what was recorded for it is not there."""
        if (choice := exchange.choice) is not None and choice.expected is not None:
            self._engine_events.refused(choice.worker, exchange.engine_id)
            if not choice.worker.takes_hints and (found := exchange.prompt.found) is not None:
                self._prefix_index.forget([boundary.key for boundary in found.boundaries], choice.worker.boot)

    def _take(self, lease: Lease) -> Lease | None:
        """The lease with a slot; None if the workers that could serve the request are full."""
        exchange = lease.exchange
        if (key := exchange.head.key) is not None and not key.has_room:
            return None
        roomy = self._roomy(exchange)
        if not roomy:
            return None
        exchange.timings.choosing = time.perf_counter()
        lease.take(self._choose(exchange, roomy))
        return lease

    def other_worker(self, exchange: Exchange, refused: Worker) -> Choice | None:
        """A worker other than `refused` that has a slot for the request now, recorded as chosen."""
        try:
            others = [worker for worker in self._roomy(exchange) if worker is not refused]
        except NoWorker:
            return None
        if not others:
            return None
        self.not_computed(exchange)
        return self._choose(exchange, others)

    def _roomy(self, exchange: Exchange) -> list[Worker]:
        """Workers that have a slot for it."""
        if (keeper := self.keeper(exchange)) is not None:
            if not keeper.up:
                raise no_worker("The worker that stores what this request names is not ready.", [keeper])
            workers = [keeper]
        elif not (workers := self._unasked(exchange)):
            # Whose response it continues decides before a model that is not named.
            workers = self._pool.for_model(exchange.model or None if exchange.kept_id is not None else exchange.model)
        # As `has_room` says, and `takes_hints` below: for a thousand workers, a property costs more than all else here.
        return [worker for worker in workers if not worker.max_inflight or worker.inflight < worker.max_inflight]

    def _choose(self, exchange: Exchange, workers: Sequence[Worker]) -> Choice:
        """Choose and record it in one go, so that a request arriving right behind already follows."""
        found, model = exchange.prompt.found, exchange.model
        # A name that no worker lists goes to one worker for as long as nothing else decides.
        together = model if model and not workers[0].serves(model) else None
        if found is None:
            return Choice(choose(workers, {}, self._load_slack, together))
        # All that could hold it, because a worker that is full or not ready yet has not lost it.
        serving = self._pool.serving(model)
        boots = {worker.boot for worker in serving if worker.takes_hints}
        held = self._prefix_index.longest(found.prefixes, {worker.boot for worker in serving if worker.match_unit})
        session = affinity_key(exchange.head.headers, exchange.body.parsed)
        user = user_key(exchange.body.parsed, found) if session is None else None
        worker = choose(workers, held, self._load_slack, session or user or together, found.shared, waits=user is None)
        boot, engine, takes_hints = worker.boot, worker.engine, worker.takes_hints
        here, longest = held.get(boot), max((held[boot] for boot in held.keys() & boots), default=None)
        if (earlier := exchange.expected) is not None:  # it is sent again, elsewhere: the first try counts for nothing
            sent, ever_sent, told = earlier.sent, earlier.ever_sent, earlier.held
        else:
            sent = self._prefix_index.sent(found.prefixes, boots)
            ever_sent = self._prefix_index.ever_sent(found.prefixes)
            told = longest.tokens if longest is not None and longest.is_told else 0
        # In shadow mode a plugin that refuses hints is known, too.
        without = "unpatched" if engine is None and not worker.refused else "hint_ignored"
        expected = Expectation(
            failure=found.failure if takes_hints else without,
            sent=sent,
            sent_here=sent is not None and boot in sent.held,
            ever_sent=ever_sent,
            held=told,
            # What an engine has told, no guess.
            predicted=here.tokens if takes_hints and here is not None and here.is_told else 0,
            match_unit=engine.match_unit if engine is not None else 1,
            ahead=engine.ahead if engine is not None else 0,
        )
        hint: tuple[Entry, ...] = ()
        if takes_hints:
            hint = worker.hint(found)
            self._engine_events.sent(worker, exchange.engine_id, found.boundaries, hint)
            self._prefix_index.record(found.boundaries, boot, hint)
            if longest is not None:
                self._keep_for_warmup(exchange, found, worker, longest)
        else:  # vLLM keeps what it computes, and says nothing of it
            self._prefix_index.record(found.boundaries, boot)
        return Choice(worker, expected, here.tokens if here is not None else 0, hint)

    def _keep_for_warmup(self, exchange: Exchange, found: Found, worker: Worker, shared: Holding) -> None:
        """The request shares a prefix: a restarted worker is to be given it again."""
        key, body = shared.key, exchange.body
        if not found.boundaries or self._warmup.used_again(key):
            return
        put = {name: value for name, value in body.put.items() if name == "cache_salt"}
        kept = found.without_request()
        replay = WarmupRequest(exchange.head.endpoint, body.raw, body.names, put, kept, worker.listed(exchange.model))
        shorter = found.prefixes[: found.prefixes.index(key)] if key in found.prefixes else ()
        self._warmup.add(key, shared.tokens, shorter, replay)

    def keeper(self, exchange: Exchange) -> Worker | None:
        """The worker that stores the response or whatever this request asks for; others would not know it."""
        if (kept := exchange.kept_id) is None:
            return None
        boot = self._stored.boot(kept, exchange.head.owner)
        return next((worker for worker in self._pool.workers if worker.boot == boot), None) if boot else None

    def _unasked(self, exchange: Exchange) -> list[Worker]:
        """Once one does not know the response: the others that may, failing ones too. Nobody else can answer for it."""
        if not exchange.asked:
            return []
        workers = self._pool.serving(exchange.model) or self._pool.up
        return [worker for worker in workers if worker not in exchange.asked]


@dataclass(slots=True, eq=False)
class Lease:
    """One request's slot. The request is counted at its worker and its key, and un-counted, here and nowhere else."""

    _dispatcher: Dispatcher
    exchange: Exchange
    waited: float = 0.0  # seconds in the queue so far
    prompt: int = 0  # tokens, roughly
    _slot: Slot | None = None  # None: not taken yet, or given back
    _is_trial: bool = False  # of a worker that failed
    _was_idle: bool = False  # the worker had no other request when it got this one

    async def __aenter__(self) -> Lease:
        await self._dispatcher.acquire(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    @property
    def worker(self) -> Worker:
        """The worker that has the request, or had it last."""
        if (worker := self.exchange.worker) is None:
            raise RuntimeError("The lease has not been entered.")
        return worker

    @property
    def has_slot(self) -> bool:
        return self._slot is not None

    @property
    def prefill_tokens(self) -> int:
        """What the worker has still to compute of the prompt, as it is counted."""
        return self._slot.prefill_tokens if self._slot is not None else 0

    @property
    def is_alone(self) -> bool:
        """Whether the worker has had no other request since it got this one."""
        return self._was_idle and self._slot is not None and self.worker.dispatched == self._slot.number

    async def move(self) -> None:
        """The worker has computed nothing of the request: give its slot back, and wait for another one."""
        self.never_sent()
        if (landed := self.exchange.landed) is not None:
            landed.set()
        await self._dispatcher.acquire(self)

    def move_now(self) -> bool:
        """The worker has refused the request: go to another one, if one has a slot now."""
        choice = self._dispatcher.other_worker(self.exchange, self.worker)
        if choice is None:
            return False
        self._end()
        self.take(choice)
        self._dispatcher.released()
        return True

    def never_sent(self) -> None:
        """The worker never got the request: nothing of it is there."""
        self._dispatcher.not_computed(self.exchange)
        self.release()

    def unused(self) -> None:
        """The request is answered without a worker: if it has a slot, give it back, as if it had not been chosen."""
        if self.has_slot:
            self.never_sent()
            self.exchange.give(None)
            self.waited = 0.0  # it has had its turn

    def take(self, choice: Choice) -> None:
        """A slot at the worker that was chosen."""
        exchange, worker = self.exchange, choice.worker
        exchange.give(choice)
        self.prompt = exchange.prompt.tokens or round(len(exchange.body.raw) * TOKENS_PER_BYTE)
        self._was_idle = not worker.inflight
        self._slot = Slot(worker, self.prompt - choice.held)
        self._is_trial = worker.breaker.is_open and worker.breaker.begin_trial()
        count_at(exchange.head.key, 1)
        self._dispatcher.prefilling[exchange.engine_id] = self
        self._dispatcher.shelf.tell(worker, Change.GIVEN)
        exchange.timings.leased = time.perf_counter()

    def prefilled(self) -> None:
        """The answer has begun: the prompt is computed."""
        if self._slot is not None:
            self._slot.left_to_compute(0)
        self._dispatcher.prefilling.pop(self.exchange.engine_id, None)

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
        count_at(self.exchange.head.key, -1)


def prompt_computed(prefilling: Mapping[str, Lease], engine_id: str, tokens: int, is_last: bool) -> None:
    """An engine has computed so many tokens of a prompt; `is_last`: all boundaries of it.

    An answer that comes as a whole says so too late: its worker would count as busy with a prompt to the end.
    """
    if (lease := prefilling.get(engine_id)) is None:
        return
    found = lease.exchange.prompt.found
    if is_last and found is not None and any(boundary.kind == "turn" for boundary in found.boundaries):
        lease.prefilled()  # the prompt's end is among them, and its length was an estimate
    else:
        lease.prefilled_to(tokens)


def count_at(key: ApiKey | None, requests: int) -> None:
    """So many more requests of an API key are under way. They are counted here and nowhere else."""
    if key is not None:
        key.under_way += requests
