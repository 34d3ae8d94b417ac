"""What the engines say, read from each worker's feed (`engine_patches/reporting/events_api.py`) in the background.

Of requests: the reason, where the gateway's own word may hide a deeper cause. Of states: which came and which went,
for the directory. Nothing here is on a request's way but a wait of at most `TIMEOUT` for an explanation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

from proxy.boundaries.boundary import Boundary
from proxy.fleet.worker import Worker
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.routing.held_states import HeldStates
from proxy.routing.prefix_index import PrefixIndex

logger = logging.getLogger("seamark.engine_events")

PATH = "/seamark/outcomes"

TIMEOUT = 0.2  # seconds for an explanation; it is not worth more

SILENT_SECONDS = 10.0  # a feed that failed is left alone for so long

MAX_REASONS = 8192  # of requests that nobody has asked about, per worker

POLL_SECONDS = 2.0  # the worker holds a question so long where nothing is new; one that is to stop waits as long

READ_TIMEOUT = POLL_SECONDS + 2.0

READS_PER_SECOND = 20.0  # on the average; more where somebody waits for a word

READS_AT_ONCE = 10.0  # before the average counts

IDLE_SECONDS = 600.0  # a worker that was sent nothing for so long is not read until it is


@dataclass
class _Feed:
    """What was read of one worker's feed, and the task that reads on."""

    held_states: HeldStates
    boot: str = ""
    cursor: int = 0
    read_as: str = ""  # what the worker was known as when it was last read
    former_boots: set[str] = field(default_factory=set)
    tells_states: bool = False  # so it can also be asked to wait for news
    several: bool = False  # API servers in turn, each with a part of the news: good for words only
    last_sent: float = 0.0  # time.monotonic()
    silent_until: float = 0.0  # time.monotonic(): it failed, and is not asked before
    reasons: OrderedDict[str, str] = field(default_factory=OrderedDict)  # reason by request id
    waiting: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # by request id
    wanted: asyncio.Event = field(default_factory=asyncio.Event)  # somebody waits for a word
    reader: asyncio.Task[None] | None = None

    @property
    def follows(self) -> bool:
        """Whether the feed is read without anybody asking."""
        return self.tells_states and not self.several


class EngineEvents:
    """The feeds of all workers. Use inside a running event loop; `aclose` when done."""

    def __init__(self, upstream: Upstream, prefix_index: PrefixIndex) -> None:
        self._upstream = upstream
        self._prefix_index = prefix_index
        self._feeds: dict[str, _Feed] = {}

    def sent(self, worker: Worker, request_id: str, boundaries: Sequence[Boundary]) -> None:
        """A request with these boundaries goes to a patched worker: its engine will tell of it."""
        feed = self._feed(worker)
        feed.last_sent = time.monotonic()
        if not feed.several:
            feed.held_states.sent(request_id, boundaries, worker.boot)
        self._read_on(worker, feed)

    def refused(self, worker: Worker, request_id: str) -> None:
        """The worker answered with an error: what was believed of the request is not there."""
        self._feed(worker).held_states.refused(request_id)

    def left(self, worker: Worker, request_id: str) -> None:
        """The client of a request has left."""
        feed = self._feed(worker)
        if feed.follows:
            feed.held_states.left(request_id)

    def fell_short(self, worker: Worker, prefixes: Sequence[bytes], left: Container[bytes], tokens: int) -> None:
        """A request that starts with `prefixes` found only `tokens`; it has itself `left` some of them behind."""
        unit = worker.engine.match_unit if worker.engine is not None else 1
        self._feed(worker).held_states.fell_short(prefixes, left, tokens, unit, worker.boot)

    async def reason_for(self, worker: Worker, request_id: str) -> str | None:
        """The engine's reason for a request that `worker` has answered; None where it does not say."""
        feed = self._feed(worker)
        if request_id not in feed.reasons and time.monotonic() >= feed.silent_until:
            told = feed.waiting.setdefault(request_id, asyncio.get_running_loop().create_future())
            feed.wanted.set()
            self._read_on(worker, feed)
            done, _ = await asyncio.wait((told,), timeout=TIMEOUT)
            feed.waiting.pop(request_id, None)
            if not done and not feed.follows:  # an engine that has answered has something to tell
                feed.silent_until = time.monotonic() + SILENT_SECONDS
        return feed.reasons.pop(request_id, None)

    def forget(self, worker: Worker) -> None:
        """The worker is not used any more."""
        feed = self._feeds.pop(worker.url, None)
        if feed is not None and feed.reader is not None:
            feed.reader.cancel()

    async def aclose(self) -> None:
        """Read no more."""
        readers = [feed.reader for feed in self._feeds.values() if feed.reader is not None]
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    def _feed(self, worker: Worker) -> _Feed:
        feed = self._feeds.get(worker.url)
        if feed is None:
            feed = self._feeds[worker.url] = _Feed(HeldStates(self._prefix_index))
        return feed

    def _read_on(self, worker: Worker, feed: _Feed) -> None:
        if (feed.reader is None or feed.reader.done()) and time.monotonic() >= feed.silent_until:
            feed.reader = asyncio.create_task(self._follow(worker, feed))

    async def _follow(self, worker: Worker, feed: _Feed) -> None:
        """Read for as long as that works; the next request begins anew after `SILENT_SECONDS`."""
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
                if now - feed.last_sent > IDLE_SECONDS and not feed.waiting:
                    return
                for request_id in asked_by:  # asked before this read began: what it brought not, none will soon
                    if not feed.follows or request_id in feed.reasons:
                        _resolve(feed, request_id)
        except (TimeoutError, Unreachable, Broken, ValueError, KeyError, TypeError, IndexError):
            pass  # gone, or without a feed
        except Exception as error:
            logger.error("feed of worker %s: %s", worker.name, type(error).__name__)
        feed.silent_until = time.monotonic() + SILENT_SECONDS
        for request_id in list(feed.waiting):
            _resolve(feed, request_id)

    async def _read(self, worker: Worker, feed: _Feed) -> None:
        wait = POLL_SECONDS if feed.follows else 0
        query = urlencode({"boot": feed.boot, "after": feed.cursor, "wait": wait})
        read = self._upstream.fetch("GET", f"{worker.url}{PATH}?{query}", timeout=READ_TIMEOUT)
        status, answer = await asyncio.wait_for(read, READ_TIMEOUT)
        if status != 200:
            raise ValueError(f"status {status}")
        self._take(worker, feed, json.loads(answer))

    def _take(self, worker: Worker, feed: _Feed, told: dict[str, Any]) -> None:
        boot = str(told["boot"])
        if boot in feed.former_boots and not feed.several:
            logger.warning("worker %s has several API servers: what its engine evicts is not learnt", worker.name)
            feed.several = True
            feed.held_states.forget_all(worker.boot)
        if boot != feed.boot and feed.boot:
            feed.former_boots.add(feed.boot)
        feed.tells_states = "states" in told
        if feed.follows:
            if told["reset"] and feed.read_as:  # at first sight nothing was believed that could be wrong
                feed.held_states.forget_all(feed.read_as)
            feed.read_as = worker.boot
            try:
                feed.held_states.apply(told["states"], worker.boot)
            except Exception as error:  # what follows it is as good as lost; reading it again would end the same way
                logger.error("states told by worker %s: %s", worker.name, type(error).__name__)
                feed.held_states.forget_all(worker.boot)
        for request_id, reason, _ in told["outcomes"]:
            feed.reasons[request_id] = str(reason)
            feed.reasons.move_to_end(request_id)
            if request_id in feed.waiting:
                _resolve(feed, request_id)
        while len(feed.reasons) > MAX_REASONS:
            feed.reasons.popitem(last=False)
        feed.boot, feed.cursor = boot, int(told["cursor"])


def _resolve(feed: _Feed, request_id: str) -> None:
    told = feed.waiting.get(request_id)
    if told is not None and not told.done():
        told.set_result(None)


async def _within(seconds: float, event: asyncio.Event) -> None:
    """Return once `event` is set, or after `seconds`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
