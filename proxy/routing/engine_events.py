"""The engines' events, read from each worker's endpoint (`engine_patches/reporting/events_api.py`) in the background.

They give the reason of a request, which the gateway's own reason may hide, and the states that were stored and evicted,
for the prefix index. No request waits for anything here: its explanation comes with the news, so that reading them
costs the worker the same however many streams end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from proxy.boundaries.boundary import Boundary, Entry
from proxy.fleet.part import Change, Part, Shelf
from proxy.fleet.worker import GateReport, Load, Worker
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.http.json_body import OverBound
from proxy.idle_work import IdleWork, Steps
from proxy.printable import printable
from proxy.routing import feed_lines
from proxy.routing.feed_lines import AdapterGone, Admitted, Cleared, FeedLine, Pinned
from proxy.routing.held_states import HeldStates, Learnt, PromptComputed
from proxy.routing.prefix_index import PrefixIndex

logger = logging.getLogger("seamark.engine_events")

PATH = "/seamark/outcomes"

PATIENCE = 2.0  # seconds until an explanation is taken not to come; no client waits for it
PIN_PATIENCE = 10.0  # seconds to wait for what became of a pin; nothing but the pin's own answer waits for it
SILENT_SECONDS = 10.0  # a feed that failed is not read again before
MAX_OUTCOMES = 8192  # kept for requests that nobody has asked about, per worker
POLL_SECONDS = 2.0  # the worker tells its news for so long; stopping the worker may take as long
READ_TIMEOUT = POLL_SECONDS + 2.0
READS_PER_SECOND, READS_AT_ONCE = 10.0, 10.0  # on the average, and before that counts
MOST_LINES = 256  # of one read; a worker tells ten in a second
STEP_EVENTS = 4  # applied in one step; some microseconds each


# In an answer of a worker that was asked for it: `reason,hit,shared,position:position:...`, and `,fate` of a pin.
OUTCOME_HEADER = "x-seamark-outcome"


def outcome_in(header: str | None) -> Admitted | None:
    """The outcome in the header of an answer; None if there is none, or nonsense."""
    try:
        reason, hit, shared, positions, *pin = (header or "").split(",")
        if len(pin) > 1 or not all(map(str.isidentifier, pin)):
            return None
        resolved = tuple(map(int, filter(None, positions.split(":"))))
        return Admitted("", reason, int(hit), int(shared), resolved, "".join(pin))
    except ValueError:
        return None


@dataclass
class _FeedReader:
    """What was read of one worker's events, and the task that reads them."""

    held_states: HeldStates
    boot: str = ""
    cursor: int = 0
    read_as: str = ""  # the worker's boot identity at the last read
    silent_until: float = 0.0  # time.monotonic(): it failed, and is not read before
    outcomes: OrderedDict[str, Admitted] = field(default_factory=OrderedDict)  # by request id
    # For these, by request id: who is told, and when at the latest.
    waiting: dict[str, tuple[Callable[[Admitted | None], None], asyncio.TimerHandle]] = field(default_factory=dict)
    pins: dict[str, asyncio.Future[str]] = field(default_factory=dict)  # asked for, by request id
    reader: asyncio.Task[None] | None = None
    load: Load | None = None  # of other gateways, as it was last read
    refused: str = ""  # the worker's boot identity when a read was beyond all bounds, which is logged once


@dataclass(eq=False)
class EngineEvents(Part):
    """The feeds of all workers. Use inside a running event loop; `aclose` when done."""

    name = "engine_events"

    _upstream: Upstream
    _prefix_index: PrefixIndex
    _idle: IdleWork
    _shelf: Shelf
    _learnt: Learnt = lambda *_: None
    _gateway_id: str = ""  # what workers know this gateway's requests by, hexadecimal; they tell what others have there
    _computed: PromptComputed = lambda *_: None

    def __post_init__(self) -> None:
        # By the worker's URL.
        self._feeds = defaultdict[str, _FeedReader](
            lambda: _FeedReader(HeldStates(self._prefix_index, self._learnt, self._computed))
        )

    def sent(self, worker: Worker, request_id: str, boundaries: Sequence[Boundary], entries: Sequence[Entry]) -> None:
        """A request with these boundaries goes to a worker with the plugin: its engine will report on it."""
        feed = self._feeds[worker.url]
        ahead = worker.engine.ahead if worker.engine is not None else 0
        feed.held_states.sent(request_id, boundaries, entries, worker.boot, ahead)
        self.follow(worker)

    def refused(self, worker: Worker, request_id: str) -> None:
        """The worker answered with an error: what was recorded for the request is not held."""
        if (feed := self._feeds.get(worker.url)) is not None:  # else the worker was removed meanwhile
            feed.held_states.refused(request_id)

    def left(self, worker: Worker, request_id: str) -> None:
        if (feed := self._feeds.get(worker.url)) is not None and feed.boot:
            feed.held_states.left(request_id)

    def fell_short(self, worker: Worker, prefixes: Sequence[bytes], left: Container[bytes], tokens: int) -> None:
        """A request that starts with `prefixes` found only `tokens`; it has `left` some of them behind."""
        unit = worker.engine.match_unit if worker.engine is not None else 1
        if (feed := self._feeds.get(worker.url)) is not None:
            feed.held_states.fell_short(prefixes, left, tokens, unit, worker.boot)

    def ask(self, worker: Worker, request_id: str, then: Callable[[Admitted | None], None]) -> None:
        """Have `then` called once with what the engine says of a request, which has been answered; None: nothing."""
        feed = self._feeds[worker.url]
        told = feed.outcomes.pop(request_id, None)
        if told is not None or time.monotonic() < feed.silent_until:
            then(told)
            return
        _answer(feed, request_id, None)  # of another request of that name
        late = asyncio.get_running_loop().call_later(PATIENCE, _answer, feed, request_id, None)
        feed.waiting[request_id] = then, late
        self.follow(worker)

    @contextlib.contextmanager
    def pin_asked(self, worker: Worker, request_id: str) -> Iterator[Callable[[], Awaitable[str]]]:
        """While a request is sent that pins its prompt: gives what to await once it is answered.

        That is what became of the wish; empty if the engine does not say.
        """
        feed = self._feeds[worker.url]
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
        """It is followed while it tries its drafts, too, though nothing is sent to it, and until it is removed."""
        if change is Change.TRIES:
            self.follow(worker)
        feed = self._feeds.pop(worker.url, None) if change is Change.REMOVED else None
        if feed is not None and feed.reader is not None:
            feed.reader.cancel()
            worker.is_followed = False  # its task may not have begun

    async def aclose(self) -> None:
        readers = [feed.reader for feed in self._feeds.values() if feed.reader is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def follow(self, worker: Worker) -> None:
        """Read the feed of a worker with the plugin: from its first request on, whatever that is."""
        feed = self._feeds[worker.url]
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
                if credit < 1:
                    await asyncio.sleep((1 - credit) / READS_PER_SECOND)
                await self._read(worker, feed)
                credit -= 1
        except OverBound as error:  # what else it says is lost
            feed.held_states.forget_all(worker.boot)
            if feed.refused != worker.boot:
                feed.refused = worker.boot
                logger.warning("events of worker %s are not read: %s", worker.name, error)
        except (TimeoutError, Unreachable, Broken, ValueError):
            pass  # gone, or without a feed
        except Exception as error:
            logger.error("events of worker %s: %s", worker.name, type(error).__name__)
        finally:
            feed.load, worker.others, worker.is_followed = None, Load(), False
        feed.silent_until = time.monotonic() + SILENT_SECONDS
        for request_id in list(feed.waiting):
            _answer(feed, request_id, None)

    async def _read(self, worker: Worker, feed: _FeedReader) -> None:
        place = {"boot": feed.boot, "after": feed.cursor, "wait": POLL_SECONDS, "gateway": self._gateway_id}
        if worker.rank:
            place["engine"] = worker.rank
        if feed.load is not None:
            place["load"] = f"{feed.load.requests}:{feed.load.prefill_tokens}"
        url = f"{worker.probed.reports.url or worker.address}{PATH}?{urlencode(place)}"
        async with asyncio.timeout(READ_TIMEOUT):  # not `wait_for`: until Python 3.12 it can swallow a cancellation
            answer = await self._upstream.ask("GET", url, timeout=READ_TIMEOUT)
            try:
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}")
                lines = 0
                async for line in answer.lines(feed_lines.MOST_BYTES):
                    lines += 1
                    if lines > MOST_LINES:
                        raise OverBound(f"more than {MOST_LINES} lines in {POLL_SECONDS:g} s")
                    # Not in a lull: a worker that says more than there are lulls for would be read too slowly.
                    await self._idle.finish(self._apply(worker, feed, feed_lines.read_line(line)))
                    await asyncio.sleep(0)
            finally:
                answer.close()

    def _apply(self, worker: Worker, feed: _FeedReader, line: FeedLine) -> Steps[None]:
        if line.reset and feed.read_as:  # at the first read, nothing is recorded that could be wrong
            feed.held_states.forget_all(feed.read_as)
        feed.read_as = worker.boot
        changes: dict[tuple[Change, str], None] = {}
        is_lost, failed = False, None
        for number, raw in enumerate(line.events):
            if number % STEP_EVENTS == 0:
                yield
            try:
                event = feed_lines.read_event(raw)
                feed.held_states.apply(event, worker.boot)
            except Exception as error:  # reading it again would fail in the same way
                failed = error
                continue
            match event:
                case Admitted() if not _answer(feed, event.request_id, event):
                    feed.outcomes[event.request_id] = event
                    feed.outcomes.move_to_end(event.request_id)
                    if len(feed.outcomes) > MAX_OUTCOMES:
                        feed.outcomes.popitem(last=False)
                case Pinned() if (asked := feed.pins.get(event.request_id)) is not None and not asked.done():
                    asked.set_result(event.fate)
                case Cleared():
                    changes[Change.CLEARED, ""] = None
                    is_lost = is_lost or bool(event.why)
                case AdapterGone():
                    changes[Change.ADAPTER, event.name] = None
        if failed is not None:
            logger.error("events reported by worker %s: %s", worker.name, type(failed).__name__)
            feed.held_states.forget_all(worker.boot)
        if is_lost:
            logger.warning("worker %s: reports were lost, so what it holds is forgotten", worker.name)
        for change, name in changes:
            self._shelf.tell(worker, change, name)
            yield
        gate = None
        if line.drafts is not None:
            state, figures = map(printable, line.drafts)
            gate = GateReport(state, figures, time.perf_counter())
        worker.hear_of_drafts(gate)
        feed.boot, feed.cursor, feed.load = line.boot, line.cursor, Load(*line.load) if line.load else None
        worker.others = feed.load or Load()


def _answer(feed: _FeedReader, request_id: str, told: Admitted | None) -> bool:
    """Whether somebody has waited for this."""
    if (asked := feed.waiting.pop(request_id, None)) is None:
        return False
    then, late = asked
    late.cancel()
    then(told)
    return True
