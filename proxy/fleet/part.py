"""The shape of a gateway's parts that work beside the requests, and the shelf that all of them stand on.

Whoever finds out what happened to a worker tells the shelf, and so each part that wants to know.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from proxy.fleet.worker import Worker
from proxy.metrics import Metrics

RESTART_SECONDS = 1.0  # until a part that failed is started again
CANCEL_SECONDS = 1.0  # until one that still runs is cancelled again

logger = logging.getLogger("seamark.gateway")


class Change(enum.Enum):
    TRIES = enum.auto()  # it tries its drafts; told again and again
    REMOVED = enum.auto()  # it is gone
    CLEARED = enum.auto()  # its cache was emptied, as it has to be for who puts other weights into a running engine
    ADAPTER = enum.auto()  # it has another adapter under a name; the states of the former one are reported gone
    REFUSED = enum.auto()  # nothing listened there when its health was checked
    DISTRUSTED = enum.auto()  # answers from its cache differ: nothing that it holds can be used


class Part:
    """Something beside the requests. A part says what of this it does."""

    name = ""  # in metrics and logs
    held = 0  # bytes of prompts in memory

    async def run(self) -> None:
        """For as long as the gateway is there. It is started again if it fails; it may also end."""

    async def aclose(self) -> None:
        """The gateway ends; `run` has been cancelled."""

    async def prepare(self, worker: Worker) -> None:
        """A worker has restarted. It gets no requests before this is done if another one can take them."""

    def on_worker(self, worker: Worker, change: Change, model: str = "") -> None:
        """Something has happened to a worker. `model`: the adapter's name."""


P = TypeVar("P", bound=Part)


class Shelf:
    def __init__(self, metrics: Metrics) -> None:
        self._failures = metrics.task_failures
        self._parts: list[Part] = []
        self._runs: dict[str, Callable[[], Awaitable[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def put(self, part: P) -> P:
        """Another part, before the gateway starts."""
        self._parts.append(part)
        if type(part).run is not Part.run:
            self.also_run(part.name, part.run)
        return part

    def also_run(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """What belongs to the core and runs beside the requests, too."""
        self._runs[name] = run
        self._failures.labels(name)  # 0 from the start: an alert reads it

    @property
    def held(self) -> int:
        return sum(part.held for part in self._parts)

    def tell(self, worker: Worker, change: Change, model: str = "") -> None:
        for part in self._parts:
            part.on_worker(worker, change, model)

    async def prepare(self, worker: Worker) -> None:
        """Have all parts do what they want to do at a worker that has restarted, one after the other."""
        for part in self._parts:
            await part.prepare(worker)

    def start(self) -> None:
        """Call it inside a running event loop."""
        self._tasks = [asyncio.create_task(self.keep_running(name, run)) for name, run in self._runs.items()]

    async def stop(self) -> None:
        running = set(self._tasks)
        while running:  # a cancellation can get lost in a library
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=CANCEL_SECONDS)

    async def aclose(self) -> None:
        """Close what parts hold open, once nothing runs any more."""
        for part in self._parts:
            await part.aclose()

    async def keep_running(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Whatever a worker, a file or a server does to it: what fails is started again."""
        failures = self._failures.labels(name)
        while True:
            try:
                return await run()
            except Exception as error:  # the kind alone: the message might hold a secret, or prompt text
                logger.error("%s failed and is started again: %s", name, type(error).__name__)
                failures.inc()
                await asyncio.sleep(RESTART_SECONDS)
