"""A worker that has restarted is given hot prefixes again before it takes requests."""

from __future__ import annotations

from proxy.fleet.hot_prefixes import WarmupRequest, WarmupSet, replay_all
from proxy.fleet.part import Part
from proxy.fleet.worker import Worker
from proxy.http.client import Broken, Unreachable
from proxy.metrics import Metrics
from proxy.pipeline.accounting import Accounting
from proxy.pipeline.replayer import Replayer


class WarmUp(Part):
    """Replays what saves most."""

    name = "warm_up"

    def __init__(self, prefixes: WarmupSet, replayer: Replayer, accounting: Accounting, metrics: Metrics) -> None:
        self._prefixes = prefixes
        self._replayer = replayer
        self._accounting = accounting
        self._replays = metrics.replays

    @property
    def held(self) -> int:  # type: ignore[override]  # bytes of prompts
        return self._prefixes.held

    async def prepare(self, worker: Worker) -> None:
        if worker.takes_hints:
            await replay_all(
                self._prefixes.hottest(worker.names.templates), lambda prompt: self._replay(prompt, worker)
            )

    async def _replay(self, prompt: WarmupRequest, worker: Worker) -> None:
        try:
            answer = await self._replayer.send(worker, prompt)
            is_done = answer.status == 200
        except (Unreachable, Broken):
            is_done = False
        self._replays.labels(worker.name, "done" if is_done else "failed").inc()
        if is_done:
            self._accounting.replayed(prompt.model, worker, answer.body)
