"""What an engine that drafts says in its feed: whether hints are in use beside its drafts, and how many it accepted.

The feed is that of `proxy/routing/engine_events.py`. Who tries drafts reads it beside that: a worker without a gateway
has nobody else who does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlencode

from proxy.fleet.worker import OWN_REQUESTS, GateReport, Worker
from proxy.fleet.worker_metrics import Accepted
from proxy.http.client import Upstream
from proxy.http.json_body import count, object_in_steps
from proxy.idle_work import IdleWork
from proxy.printable import printable

PATH = "/seamark/outcomes"

# Of what the plugin keeps and tells at once: a line, and the values in it. What is larger comes from something else.
MOST_BYTES, MOST_VALUES = 2**23, 2**15

MOST_NAME = 1024  # characters of a request's id, and of what names a state or a reason

READ_SECONDS = 5.0  # for one read

PAUSE_SECONDS = 0.05  # between two reads, while something is awaited

# A request that verified drafts is in the feed a moment after its answer; one that did not never is.
DRAFTED_SECONDS = 1.0

# Begins the names of trial requests, before a name of who sends them.
NAMED = f"{OWN_REQUESTS}drafts-"

STAND_BACK_SECONDS = 30.0  # since somebody else's trial request was seen

MAX_KEPT = 4096  # counts of finished requests


def gate_in(events: Mapping[str, Any]) -> GateReport | None:
    """The gate in what was read of a feed; None if the engine names none, as one without drafts.

    Raises `ValueError`, `KeyError` or `TypeError` for nonsense.
    """
    told = events.get("drafts")
    if told is None:
        return None
    return GateReport(
        word(told["state"]), word(told.get("id", "")), printable(word(told.get("why", ""))), time.perf_counter()
    )


def drafted_in(events: Mapping[str, Any]) -> dict[str, Accepted] | None:
    """Drafts of requests that have finished, by their ids; None if the engine counts none."""
    told = events.get("drafted")
    return None if told is None else {word(name): Accepted(count(steps), count(tokens)) for name, steps, tokens in told}


def word(value: Any) -> str:
    """A name or a reason. Raises `ValueError` for what is none."""
    if not isinstance(value, str) or len(value) > MOST_NAME:
        raise ValueError("no name")
    return value


class DraftFeed:
    """What a trial reads of one worker's feed."""

    def __init__(self, upstream: Upstream, worker: Worker, own: str) -> None:
        """`own`: who tries, a word."""
        self._upstream = upstream
        self._worker = worker
        self._own = own
        self._boot, self._cursor = "", 0
        self._foreign: dict[str, float] = {}  # time.monotonic() of the last request, by whose trial it was
        self.gate: GateReport | None = None
        self.counts = False  # the engine counts accepted drafts
        self.drafted: dict[str, Accepted] = {}  # by request id

    async def read(self) -> None:
        """Take what is new. Raises `Unreachable`, `Broken`, or `ValueError` for what is no feed."""
        query = urlencode({"boot": self._boot, "after": self._cursor, "wait": 0})
        if self._worker.rank:
            query += f"&engine={self._worker.rank}"
        url = f"{self._worker.reports_url}{PATH}?{query}"
        status, raw = await self._upstream.fetch("GET", url, timeout=READ_SECONDS)
        if status != 200 or len(raw) > MOST_BYTES:
            raise ValueError(f"status {status}, {len(raw):,} bytes")
        try:
            events = await IdleWork().finish(object_in_steps(raw, MOST_VALUES))
            first = not self._boot  # what is in it then may be from long ago
            self._boot, self._cursor = word(events["boot"]), count(events["cursor"])
            self.gate = gate_in(events)
            drafted = drafted_in(events)
            names = [word(name) for name, *_ in events["outcomes"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("no feed") from error
        self.counts = drafted is not None
        self.drafted |= drafted or {}
        for name in list(self.drafted)[: max(0, len(self.drafted) - MAX_KEPT)]:
            del self.drafted[name]
        for name in () if first else names:
            if name.startswith(NAMED) and not name.startswith(f"{NAMED}{self._own}-"):
                self._foreign[name.removeprefix(NAMED).partition("-")[0]] = time.monotonic()

    def stands_back(self, own: str) -> bool:
        """Whether somebody else tries this engine, too, whose name comes first."""
        now = time.monotonic()
        return any(name < own and now - at < STAND_BACK_SECONDS for name, at in self._foreign.items())

    async def accepted(self, names: Collection[str]) -> dict[str, Accepted]:
        """Drafts of these requests, which are answered; one that is missing after a moment verified none."""
        until = time.monotonic() + DRAFTED_SECONDS
        while True:
            await self.read()
            if not self.counts or self.drafted.keys() >= set(names) or time.monotonic() >= until:
                return {name: self.drafted[name] for name in names if name in self.drafted}
            await asyncio.sleep(PAUSE_SECONDS)
