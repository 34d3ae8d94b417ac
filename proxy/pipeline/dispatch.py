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
from proxy.chat.chat import GENERATE, RESPONSES, flag, number
from proxy.chat.responses import StoredResponses
from proxy.chat.usage import MAX_TOKENS
from proxy.errors import NoWorker
from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet
from proxy.fleet.pool import WorkerPool, no_worker
from proxy.fleet.worker import Slot, Worker
from proxy.http.auth import ApiKey
from proxy.http.token_limits import Charge
from proxy.observability.reasons import Expectation
from proxy.pipeline.exchange import (
    SESSION_TOKEN,
    Exchange,
    Prompt,
    affinity_key,
    choices_of,
    session_token,
    user_key,
)
from proxy.pipeline.prompt_reader import TOKENS_PER_BYTE
from proxy.routing.engine_events import EngineEvents
from proxy.routing.policy import choose
from proxy.routing.prefix_index import Holding, PrefixIndex
from proxy.routing.queue import AdmissionQueue

NOT_FOUND = 404
TOO_LONG = 400  # among other things
MOST_OUTPUT = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # a field of each API
MOST_ASKED = 16  # workers that one request asks for a response whose worker is not known


@dataclass(eq=False)
class Dispatcher:
    """Gives requests their slots: each is counted at its worker and its key, and un-counted, here and nowhere else."""

    _load_slack: int  # setting
    _pool: WorkerPool
    _queue: AdmissionQueue
    _prefix_index: PrefixIndex
    _engine_events: EngineEvents
    _warmup: WarmupSet
    _stored: StoredResponses
    prefilling: dict[str, Exchange]  # whose prompts count as not computed, by engines' names of them: `prompt_computed`

    async def acquire(self, exchange: Exchange) -> None:
        """Take a slot; its waits together last no longer than one. Raises `NoWorker`, `Overloaded` or `KeyBusy`."""
        timings, model = exchange.timings, exchange.model
        began = timings.asked = time.perf_counter()
        serving, key = self._pool.listing(model), exchange.head.key
        if (charge := exchange.reply.charge) is not None and charge.held is None:
            self._hold_tokens(exchange, charge, serving)
        is_first = not self._queue.waiting and (key is None or key.has_room)
        if serving and is_first and self._take(exchange, serving) is not None:
            return
        try:
            if not serving:
                await self._pool.find(model)
            kept = exchange.kept_id
            boot = self._stored.boot(kept, exchange.head.owner) if kept is not None else None
            wants = (model if isinstance(model, str) else None, boot, *[worker.name for worker in exchange.asked])
            timings.asked = time.perf_counter()
            take = partial(self._take, exchange)
            await self._queue.acquire(key, wants, take, self.never_sent, timings.queued_seconds)
            timings.queued_seconds += time.perf_counter() - timings.asked
        finally:
            timings.waited_seconds += time.perf_counter() - began

    def release(self, exchange: Exchange) -> None:
        """The worker is done with the request. Does nothing the second time."""
        if exchange.slot is not None:
            self._end(exchange, exchange.slot)
            if self._queue.waiting:
                self._queue.wake()

    def never_sent(self, exchange: Exchange) -> None:
        """The worker never got the request: nothing of it is there."""
        self.not_computed(exchange)
        self.release(exchange)

    def unused(self, exchange: Exchange) -> None:
        """The request is answered without a worker: if it has a slot, give it back, as if it had not been chosen."""
        if exchange.slot is not None:
            self.never_sent(exchange)
            exchange.give(None)
            exchange.timings.queued_seconds = 0.0  # it has had its turn

    async def move(self, exchange: Exchange) -> None:
        """The worker has computed nothing of the request: give its slot back, and wait for another one."""
        self.never_sent(exchange)
        if exchange.landed is not None:
            exchange.landed.set()
        await self.acquire(exchange)

    def move_now(self, exchange: Exchange) -> bool:
        """The worker has refused the request: go to another one, if one has a slot now."""
        serving = self._pool.serving(exchange.model)
        try:
            others = [worker for worker in self._roomy(exchange, serving) if worker is not exchange.worker]
        except NoWorker:
            return False
        if not others:
            return False
        self.not_computed(exchange)
        if exchange.slot is not None:
            self._end(exchange, exchange.slot)
        self._give(exchange, others, serving)
        self._queue.wake()
        return True

    def prefilled(self, exchange: Exchange) -> None:
        if exchange.slot is not None:
            exchange.slot.left_to_compute(0)
        self.prefilling.pop(exchange.engine_id, None)

    @contextlib.contextmanager
    def counted(self, key: ApiKey | None) -> Iterator[None]:
        """Count at its key a request that needs no slot."""
        if key is None:
            yield
            return
        key.under_way += 1
        try:
            yield
        finally:
            is_awaited = not key.has_room and key.queued > 0
            key.under_way -= 1
            if is_awaited:
                self._queue.wake()

    def should_retry_elsewhere(self, exchange: Exchange, worker: Worker, status: int) -> bool:
        """Whether a worker that has not been asked may keep what the request names and `worker` does not know.

        The worker of a response is remembered once one has answered for it, that of anything else if another has not:
        what all know, such as a list, is no one's.
        """
        keeper, kept, model = self.keeper(exchange), exchange.kept_id, exchange.model
        if status == TOO_LONG and worker not in exchange.asked and keeper is None:
            length = worker.length(model)
            exchange.asked += [each for each in self._pool.serving(model) if each.length(model) <= length]
            return bool(exchange.asked and self._unasked(exchange))
        if kept is None or keeper is worker:
            return False
        if status == NOT_FOUND:
            exchange.asked.append(worker)
            # Another gateway may have told meanwhile whose it is.
            return len(exchange.asked) < MOST_ASKED and (keeper is not None or bool(self._unasked(exchange)))
        if 200 <= status < 300 and (exchange.asked or exchange.response_id is not None):
            self._stored.keep(kept, worker.boot, exchange.head.owner)
        return False

    def not_computed(self, exchange: Exchange) -> None:
        """The worker never got the request: what was recorded for it is not there."""
        if (worker := exchange.worker) is not None and exchange.expected is not None:
            self._engine_events.refused(worker, exchange.engine_id)
            if not worker.takes_hints and (found := exchange.prompt.found) is not None:
                self._prefix_index.forget([boundary.key for boundary in found.boundaries], worker.boot)

    def _hold_tokens(self, exchange: Exchange, charge: Charge, serving: Sequence[Worker]) -> None:
        """Count at its key what the request may take, however often it is sent. Raises `KeyBusy`."""
        head, body, chat, found = exchange.head, exchange.body, exchange.prompt.chat, exchange.prompt.found
        prompt = cached = output = 0
        if head.method != "POST" or head.path.endswith("/cancel"):
            return
        if body.parsed:
            params = body.parsed.get("sampling_params") if head.endpoint == GENERATE else body.parsed
            params = params if isinstance(params, dict) else {}
            asked: list[float] = [number(params.get(name)) or 0 for name in MOST_OUTPUT]
            charge.goes_on = head.endpoint == RESPONSES and flag(params.get("background")) is True
            if charge.goes_on and asked[-1] <= 0:  # all that there is room for
                asked = [worker.length(exchange.model) for worker in serving]
            output = round(min(max([0, *asked]) * max(1, choices_of(params)), MAX_TOKENS))
            text = len(body.raw) - (chat.media_bytes if chat is not None else 0)
            prompt = round(max(0, text) * (exchange.prompt.tokens / len(body.raw) or TOKENS_PER_BYTE))
        if found is not None:
            held = self._prefix_index.longest(found.prefixes, {worker.boot for worker in serving})
            cached = max([each.tokens for each in held.values() if each.is_told], default=0)
            prompt = max([prompt, *[boundary.tokens for boundary in found.boundaries]])
        charge.hold(prompt, cached, output)

    def _take(self, exchange: Exchange, serving: Sequence[Worker] = ()) -> Exchange | None:
        """The request, with a slot; None if the workers that could serve it (`serving`, if that is known) are full."""
        serving = serving or self._pool.serving(exchange.model)
        if not (roomy := self._roomy(exchange, serving)):
            return None
        exchange.timings.choosing = time.perf_counter()
        self._give(exchange, roomy, serving)
        return exchange

    def _roomy(self, exchange: Exchange, serving: Sequence[Worker]) -> list[Worker]:
        keeper = self.keeper(exchange) if exchange.kept_id is not None else None
        if keeper is not None and not keeper.up:
            raise no_worker("The worker that stores what this request names is not ready.", [keeper])
        workers: Sequence[Worker] = (
            [keeper] if keeper is not None else self._unasked(exchange) if exchange.asked else ()
        )
        if not workers and exchange.kept_id is not None and not exchange.model:
            workers = self._pool.for_model(None, ())  # whose response it continues decides before a model
        elif not workers:
            workers = self._pool.for_model(exchange.model, serving)
        # As `has_room` says: for a thousand workers, a property costs more than all else here.
        return [worker for worker in workers if not worker.max_inflight or worker.inflight < worker.max_inflight]

    def _give(self, exchange: Exchange, workers: Sequence[Worker], serving: Sequence[Worker]) -> None:
        """Choose, record and count in one go, so that a request arriving right behind already follows."""
        found, held = exchange.prompt.found, 0
        if found is None:
            worker = workers[0] if len(workers) == 1 else self._chosen(exchange, workers, {})
            exchange.give(worker)
        else:
            worker, held = self._record(exchange, found, workers, serving)
        prompt = exchange.prompt.tokens or round(len(exchange.body.raw) * TOKENS_PER_BYTE)
        exchange.slot = Slot(worker, prompt, held)
        if exchange.head.key is not None:
            exchange.head.key.under_way += 1
        self.prefilling[exchange.engine_id] = exchange
        if worker.engine is not None and not worker.is_followed:
            self._engine_events.follow(worker)
        if worker.self_check is not None:
            worker.self_check.cancel()  # and with it its requests: the engine is free once its step is finished
        exchange.timings.leased = time.perf_counter()

    def _chosen(self, exchange: Exchange, workers: Sequence[Worker], held: Mapping[str, Holding]) -> Worker:
        found, parsed, model = exchange.prompt.found, exchange.body.parsed, exchange.model
        # A name that no worker lists goes to one worker for as long as nothing else decides.
        together = model if model and not workers[0].serves(model) else None
        if found is None:
            return choose(workers, held, self._load_slack, together)
        if (token := dict(exchange.head.headers).get(SESSION_TOKEN)) is not None:
            exchange.gets_token = True
            last = next((worker for worker in workers if token and session_token(worker) == token), None)
            if last is not None and (had := found.continued):  # a guess, as where nothing is told of what was sent
                guess = Holding(had, b"", False)
                held = {**held, last.boot: max(held.get(last.boot, guess), guess)}
        session = affinity_key(exchange.head.headers, parsed)
        user = user_key(parsed, found) if session is None else None
        return choose(workers, held, self._load_slack, session or user or together, found.shared, waits=user is None)

    def _record(
        self, exchange: Exchange, found: Found, workers: Sequence[Worker], serving: Sequence[Worker]
    ) -> tuple[Worker, int]:
        """The worker that was chosen, and the tokens of the prompt that it holds, guesses included."""
        # All that could hold it, because a worker that is full or not ready yet has not lost it.
        boots = {worker.boot for worker in serving if worker.takes_hints}
        usable = {worker.boot for worker in serving if worker.match_unit}
        held, sent, ever_sent = self._prefix_index.look_up(found.prefixes, usable, boots)
        worker = workers[0] if len(workers) == len(serving) == 1 else self._chosen(exchange, workers, held)
        boot, engine, takes_hints = worker.boot, worker.engine, worker.takes_hints
        here, longest = held.get(boot), max([held[each] for each in held if each in boots], default=None)
        told = longest.tokens if longest is not None and longest.is_told else 0
        if (earlier := exchange.expected) is not None:  # it is sent again, elsewhere: the first try counts for nothing
            sent, ever_sent, told = earlier.sent, earlier.ever_sent, earlier.held
        if exchange.keep:
            failure: str | None = "not_kept"
        elif takes_hints:
            failure = found.failure
        else:  # in shadow mode a plugin that refuses hints is known, too
            failure = "unpatched" if engine is None and not worker.refused else "hint_ignored"
        expected = Expectation(
            failure=failure,
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
        if exchange.keep:  # from here on, nobody knows of its prompt
            exchange.prompt = Prompt(tokens=exchange.prompt.tokens, rewrites=exchange.prompt.rewrites)
        elif takes_hints:
            hint = worker.hint(found)
            self._engine_events.sent(worker, exchange.engine_id, found.boundaries, hint)
            self._prefix_index.record(found.boundaries, boot, hint)
            if longest is not None and found.boundaries and not self._warmup.used_again(longest.key):
                self._keep_for_warmup(exchange, found, worker, longest)
        else:  # vLLM keeps what it computes, and says nothing of it
            self._prefix_index.record(found.boundaries, boot)
        exchange.give(worker, expected, hint)
        return worker, here.tokens if here is not None else 0

    def _keep_for_warmup(self, exchange: Exchange, found: Found, worker: Worker, shared: Holding) -> None:
        """The request is the first that shares a prefix: a restarted worker is to be given it again."""
        key, body = shared.key, exchange.body
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
        workers = self._pool.serving(exchange.model) or self._pool.up
        return [worker for worker in workers if worker not in exchange.asked]

    def _end(self, exchange: Exchange, slot: Slot) -> None:
        self.prefilling.pop(exchange.engine_id, None)
        exchange.slot = None
        slot.give_back()
        if exchange.head.key is not None:
            exchange.head.key.under_way -= 1


def prompt_computed(prefilling: Mapping[str, Exchange], engine_id: str, tokens: int, is_last: bool) -> None:
    """An engine has computed so many tokens of a prompt; `is_last`: all boundaries of it.

    An answer that comes as a whole says so too late: its worker would count as busy with a prompt to the end.
    """
    exchange = prefilling.get(engine_id)
    if exchange is None or (slot := exchange.slot) is None:
        return
    found = exchange.prompt.found
    # Where the prompt's end is among them, its length was an estimate.
    is_end = is_last and found is not None and any(boundary.kind == "turn" for boundary in found.boundaries)
    slot.left_to_compute(0 if is_end else max(0, slot.prompt - tokens))
