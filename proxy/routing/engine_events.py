"""The engines' events, read from each worker's endpoint (`engine_patches/reporting/events_api.py`) in the background.

They give the reason of a request, which the gateway's own reason may hide, and the states that were stored and evicted,
for the prefix index. A request waits for nothing here, except at most `TIMEOUT` for its explanation; that of a stream,
for which nobody waits, comes with the news, so that reading them costs the worker the same however many streams end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlencode

from proxy.boundaries.boundary import Boundary, Entry
from proxy.fleet.part import Change, Part, Shelf
from proxy.fleet.worker import GateReport, Load, Worker
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import OverBound, count, object_in_steps
from proxy.idle_work import IdleWork, Steps, batched
from proxy.printable import printable
from proxy.routing.held_states import HeldStates, word
from proxy.routing.prefix_index import PrefixIndex

logger = logging.getLogger("seamark.engine_events")

PATH = "/seamark/outcomes"

# Of what the plugin keeps and tells at once: a line, and the values in it. What is larger comes from something else.
MOST_BYTES, MOST_VALUES = 2**23, 2**15

TIMEOUT = 0.2  # seconds to wait for an explanation; it is not worth more

PATIENCE = 2.0  # seconds until one for which nobody waits is taken not to come

PIN_PATIENCE = 10.0  # seconds to wait for what became of a pin; nothing but the pin's own answer waits for it

SILENT_SECONDS = 10.0  # a feed that failed is not read again before

MAX_OUTCOMES = 8192  # kept for requests that nobody has asked about, per worker

POLL_SECONDS = 2.0  # the worker holds a read so long if nothing is new; stopping the worker may take as long

READ_TIMEOUT = POLL_SECONDS + 2.0

READS_PER_SECOND = 10.0  # on the average; more if a client waits for a reason

READS_AT_ONCE = 10.0  # before the average counts

MOST_LINES = 256  # of one read; a worker tells ten in a second

MOST_POSITIONS = 64  # of one request; its hint has fewer entries

STEP_EVENTS = 16  # applied in one step; some microseconds each


class EngineOutcome(NamedTuple):
    """What an engine says of one request; lengths in tokens."""

    reason: str
    shared: int | None = None  # with an earlier prompt that the engine has seen; None: it does not say
    positions: tuple[int, ...] = ()  # what the hint's entries became, in their order; 0 for what is not there
    pin: str = ""  # what became of the wish to pin its prompt, or to release it


# In an answer of a worker that was asked for it: `reason,hit,shared,position:position:...`, and `,fate` of a pin.
OUTCOME_HEADER = "x-seamark-outcome"


def outcome_in(header: str | None) -> EngineOutcome | None:
    """The outcome in the header of an answer; None if there is none, or nonsense."""
    try:
        reason, _, shared, positions, *pin = (header or "").split(",")
        if len(pin) > 1 or not all(map(str.isidentifier, pin)):
            return None
        return EngineOutcome(reason, int(shared), tuple(map(int, filter(None, positions.split(":")))), "".join(pin))
    except ValueError:
        return None


@dataclass
class _FeedReader:
    """What was read of one worker's events, and the task that reads them."""

    held_states: HeldStates
    boot: str = ""
    cursor: int = 0
    read_as: str = ""  # the worker's boot identity at the last read
    follows: bool = False  # it reports states, so it is read even if nobody asks
    silent_until: float = 0.0  # time.monotonic(): it failed, and is not read before
    outcomes: OrderedDict[str, EngineOutcome] = field(default_factory=OrderedDict)  # by request id
    waiting: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # by request id
    pins: dict[str, asyncio.Future[str]] = field(default_factory=dict)  # asked for, by request id
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # somebody waits for an outcome
    reader: asyncio.Task[None] | None = None
    load: Load | None = None  # of other gateways, as it was last read
    refused: str = ""  # the worker's boot identity when a read was beyond all bounds, which is logged once


class EngineEvents(Part):
    """The feeds of all workers. Use inside a running event loop; `aclose` when done."""

    name = "engine_events"

    def __init__(
        self,
        upstream: Upstream,
        prefix_index: PrefixIndex,
        idle: IdleWork,
        shelf: Shelf,
        learnt: Callable[[bytes, int], None] = lambda *_: None,
        gateway_id: str = "",
    ) -> None:
        """`learnt` is called with the key and the tokens of each boundary that an engine has resolved.

        `gateway_id`: what workers know this gateway's requests by, hexadecimal; they tell it what others have there.
        """
        self._gateway_id = gateway_id
        self._upstream = upstream
        self._prefix_index = prefix_index
        self._idle = idle
        self._shelf = shelf
        self._learnt = learnt
        self._feeds: dict[str, _FeedReader] = {}
        # Called with a request's identity, the tokens of its prompt that are computed, and whether all boundaries are.
        self.on_computed: Callable[[str, int, bool], None] = lambda *_: None

    def sent(self, worker: Worker, request_id: str, boundaries: Sequence[Boundary], entries: Sequence[Entry]) -> None:
        """A request with these boundaries goes to a worker with the plugin: its engine will report on it."""
        feed = self._feed(worker)
        ahead = worker.engine.ahead if worker.engine is not None else 0
        feed.held_states.sent(request_id, boundaries, entries, worker.boot, ahead)
        self._ensure_reader(worker, feed)

    def follow(self, worker: Worker) -> None:
        """Read what a worker tells though nothing is sent to it."""
        self._ensure_reader(worker, self._feed(worker))

    def refused(self, worker: Worker, request_id: str) -> None:
        """The worker answered with an error: what was recorded for the request is not held."""
        if (feed := self._feeds.get(worker.url)) is not None:  # else the worker was removed meanwhile
            feed.held_states.refused(request_id)

    def left(self, worker: Worker, request_id: str) -> None:
        """The client of a request has left."""
        feed = self._feeds.get(worker.url)
        if feed is not None and feed.follows:
            feed.held_states.left(request_id)

    def fell_short(self, worker: Worker, prefixes: Sequence[bytes], left: Container[bytes], tokens: int) -> None:
        """A request that starts with `prefixes` found only `tokens`; it has `left` some of them behind."""
        unit = worker.engine.match_unit if worker.engine is not None else 1
        if (feed := self._feeds.get(worker.url)) is not None:
            feed.held_states.fell_short(prefixes, left, tokens, unit, worker.boot)

    async def outcome_of(self, worker: Worker, request_id: str) -> EngineOutcome | None:
        """What the engine says of a request that `worker` has answered; None if it says nothing.

        A feed that is read anyway is not read sooner for it.
        """
        feed = self._feed(worker)
        if request_id not in feed.outcomes and time.monotonic() >= feed.silent_until:
            reported = feed.waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
            hurries = not feed.follows
            if hurries:
                feed.wanted.set()
            self._ensure_reader(worker, feed)
            done, _ = await asyncio.wait((reported,), timeout=TIMEOUT if hurries else PATIENCE)
            feed.waiting.pop(request_id, None)
            if not done and not feed.follows:  # an engine that has answered has an outcome to report
                feed.silent_until = time.monotonic() + SILENT_SECONDS
        return feed.outcomes.pop(request_id, None)

    @contextlib.contextmanager
    def pin_asked(self, worker: Worker, request_id: str) -> Iterator[Callable[[], Awaitable[str]]]:
        """While a request is sent that pins its prompt: gives what to await once it is answered.

        That is what became of the wish; empty if the engine does not say.
        """
        feed = self._feed(worker)
        told = feed.pins[request_id] = asyncio.get_running_loop().create_future()

        async def fate() -> str:
            if not told.done() and feed.reader is not None:
                await asyncio.wait((told, feed.reader), timeout=PIN_PATIENCE, return_when=asyncio.FIRST_COMPLETED)
            return told.result() if told.done() else ""

        try:
            yield fate
        finally:
            feed.pins.pop(request_id, None)

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """That of a worker with the plugin is read from its first request on, whatever that is, till it is removed."""
        if change is Change.GIVEN and worker.engine is not None:
            self._ensure_reader(worker, self._feed(worker))
        feed = self._feeds.pop(worker.url, None) if change is Change.REMOVED else None
        if feed is not None and feed.reader is not None:
            feed.reader.cancel()

    async def aclose(self) -> None:
        """Stop reading."""
        readers = [feed.reader for feed in self._feeds.values() if feed.reader is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def _feed(self, worker: Worker) -> _FeedReader:
        feed = self._feeds.get(worker.url)
        if feed is None:
            feed = self._feeds[worker.url] = _FeedReader(HeldStates(self._prefix_index, self._learnt, self._computed))
        return feed

    def _computed(self, request_id: str, tokens: int, is_last: bool) -> None:
        self.on_computed(request_id, tokens, is_last)

    def _ensure_reader(self, worker: Worker, feed: _FeedReader) -> None:
        if (feed.reader is None or feed.reader.done()) and time.monotonic() >= feed.silent_until:
            feed.reader = asyncio.create_task(self._follow(worker, feed))
            worker.is_followed = True

    async def _follow(self, worker: Worker, feed: _FeedReader) -> None:
        """Read as long as that works; after a failure, the first request after `SILENT_SECONDS` starts it again."""
        credit, counted = READS_AT_ONCE, time.monotonic()
        try:
            while True:
                now = time.monotonic()
                credit, counted = min(credit + (now - counted) * READS_PER_SECOND, READS_AT_ONCE), now
                if feed.boot and not feed.follows:
                    await feed.wanted.wait()
                elif credit < 1:
                    await _within((1 - credit) / READS_PER_SECOND, feed.wanted)
                feed.wanted.clear()
                asked_by = list(feed.waiting)
                await self._read(worker, feed)
                credit -= 1
                for request_id in asked_by:  # asked before this read began, so no later one is likely to bring more
                    if not feed.follows or request_id in feed.outcomes:
                        _resolve(feed, request_id)
        except OverBound as error:  # what else it says is lost
            feed.held_states.forget_all(worker.boot)
            if feed.refused != worker.boot:
                feed.refused = worker.boot
                logger.warning("events of worker %s are not read: %s", worker.name, error)
        except (TimeoutError, Unreachable, Broken, ValueError, KeyError, TypeError, IndexError, AttributeError):
            pass  # gone, or without a feed
        except Exception as error:
            logger.error("events of worker %s: %s", worker.name, type(error).__name__)
        finally:
            feed.load, worker.others, worker.is_followed = None, Load(), False
        feed.silent_until = time.monotonic() + SILENT_SECONDS
        for request_id in list(feed.waiting):
            _resolve(feed, request_id)

    async def _read(self, worker: Worker, feed: _FeedReader) -> None:
        wait = POLL_SECONDS if feed.follows else 0
        query = urlencode({"boot": feed.boot, "after": feed.cursor, "wait": wait, "gateway": self._gateway_id})
        if worker.rank:
            query += f"&engine={worker.rank}"
        if feed.load is not None:
            query += f"&load={feed.load.requests}:{feed.load.prefill_tokens}"
        async with asyncio.timeout(READ_TIMEOUT):  # not `wait_for`: until Python 3.12 it can swallow a cancellation
            answer = await self._upstream.ask("GET", f"{worker.reports_url}{PATH}?{query}", timeout=READ_TIMEOUT)
            try:
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}")
                lines = 0
                async for line in answer.lines(MOST_BYTES):
                    lines += 1
                    if lines > MOST_LINES:
                        raise OverBound(f"more than {MOST_LINES} lines in {POLL_SECONDS:g} s")
                    # Not in a lull: a worker that says more than there are lulls for would be read too slowly.
                    events = await self._idle.finish(object_in_steps(line, MOST_VALUES))
                    await self._idle.finish(self._apply(worker, feed, events))
                    await asyncio.sleep(0)
            finally:
                answer.close()

    def _apply(self, worker: Worker, feed: _FeedReader, events: dict[str, Any]) -> Steps[None]:
        boot = word(events["boot"])
        feed.follows = worker.is_followed = "states" in events
        said: dict[str, tuple[int, tuple[int, ...]]] = {}
        if feed.follows:
            if events["reset"] and feed.read_as:  # at the first read, nothing is recorded that could be wrong
                feed.held_states.forget_all(feed.read_as)
            feed.read_as = worker.boot
        try:
            for resolved in batched(events.get("resolved", ()), STEP_EVENTS):
                for request_id, shared, positions in resolved:
                    if len(positions) > MOST_POSITIONS:
                        raise ValueError("no positions")
                    said[request_id] = (count(shared), tuple(map(count, positions)))
                    if feed.follows:
                        feed.held_states.resolved(request_id, said[request_id][1])
                yield
            if feed.follows:
                yield from self._apply_states(worker, feed, events["states"])
        except Exception as error:  # the events behind it are lost; reading them again would fail in the same way
            logger.error("states reported by worker %s: %s", worker.name, type(error).__name__)
            feed.held_states.forget_all(worker.boot)
        fates: dict[str, str] = {}
        for pins in batched(events.get("pins", ()), STEP_EVENTS):
            fates.update((word(name), word(fate)) for name, fate in pins)
            yield
        tells_pins = feed.follows and "pins" in events
        for name, asked in feed.pins.items():
            if not asked.done() and (name in fates or not tells_pins):
                asked.set_result(fates.get(name, ""))
        worker.draft_gate = _gate_in(events)
        for outcomes in batched(events["outcomes"], STEP_EVENTS):
            for request_id, reason, _ in outcomes:
                feed.outcomes[word(request_id)] = EngineOutcome(word(reason), *said.get(request_id, ()))
                feed.outcomes.move_to_end(request_id)
                if request_id in feed.waiting:
                    _resolve(feed, request_id)
            while len(feed.outcomes) > MAX_OUTCOMES:
                feed.outcomes.popitem(last=False)
            yield
        load = Load(*map(count, events["load"])) if feed.follows and "load" in events else None
        feed.boot, feed.cursor, feed.load = boot, count(events["cursor"]), load
        worker.others = feed.load or Load()

    def _apply_states(self, worker: Worker, feed: _FeedReader, states: Sequence[Sequence[Any]]) -> Steps[None]:
        cleared: set[str] = set()
        adapters: set[str] = set()
        is_cleared = False
        for some in batched(states, STEP_EVENTS):
            feed.held_states.apply(some, worker.boot)
            for kind, *event in some:
                if kind == "cleared":
                    is_cleared = True
                    cleared.update(map(word, event))
                elif kind == "adapter":
                    adapters.update(map(word, event))
            yield
        if is_cleared:
            self._shelf.tell(worker, Change.CLEARED)
        if "lost" in cleared:
            logger.warning("worker %s: reports were lost, so what it holds is forgotten", worker.name)
        for name in adapters:
            self._shelf.tell(worker, Change.ADAPTER, name)
            yield


def _resolve(feed: _FeedReader, request_id: str) -> None:
    reported = feed.waiting.get(request_id)
    if reported is not None and not reported.done():
        reported.set_result(None)


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Return once `event` is set, or after `seconds`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _gate_in(events: Mapping[str, Any]) -> GateReport | None:
    """Whether hints are in use beside drafts, in what was read of a feed; None if the engine has none."""
    if (told := events.get("drafts")) is None:
        return None
    state, why, figures = (printable(word(told.get(name, ""))) for name in ("state", "why", "figures"))
    return GateReport(state, why, figures, time.perf_counter())
