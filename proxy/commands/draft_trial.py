"""`python -m proxy.commands.draft_trial`: the trial of hints beside drafts, for a worker without a gateway.

`seamark worker` starts it beside vLLM, with the address that this will serve. It waits until the server answers, leaves
the trial to a gateway that has taken it, ends once hints are open or closed, or with the worker, and is seen in the log
alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Sequence

from proxy.boundaries.renderer import WorkerRenderer
from proxy.fleet.draft_gates import OVERDUE_SECONDS, DraftGates
from proxy.fleet.draft_prompts import TrialPrompt
from proxy.fleet.idle_turns import IDLE_SECONDS
from proxy.fleet.probe import Probe, Probed, Unwell
from proxy.fleet.worker import TRIAL, Worker
from proxy.http.client import Broken, Unreachable, Upstream
from proxy.metrics import Metrics
from proxy.printable import PrintableFormatter
from proxy.settings import Settings

DEFAULTS = Settings.model_validate({})  # of a gateway

CONNECT_SECONDS, POLL_SECONDS = 2.0, 1.0

# After the server has come up, a gateway has so long to begin. Names of gateways are hexadecimal: they come first.
GRACE_SECONDS, OWN = 20.0, "worker"

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own, from which it takes the key unless a flag gives one

FAILED = (Unreachable, Broken, Unwell)


class OwnTrial:
    """Of the worker at one address. A request of others is seen between two prompts, so one prompt may meet it."""

    def __init__(self, upstream: Upstream, url: str, rank: str = "") -> None:
        """`rank`: of one of several engines behind the address."""
        self._upstream, self._url = upstream, url
        self._probe = Probe(upstream, url)
        timeout = DEFAULTS.silence_timeout
        metrics = Metrics()
        name = f"{url}#{rank}" if rank else url
        self.worker = Worker(name, WorkerRenderer(upstream, url, DEFAULTS.render_timeout, metrics.renders))
        self._gates = DraftGates(upstream, metrics.self_checks, timeout, own=OWN)

    async def run(self) -> None:
        """Return when nothing is left to be tried."""
        while not await self._look():  # noqa: ASYNC110  # nobody tells when a server is up
            await asyncio.sleep(POLL_SECONDS)
        if not self.worker.rank and (ranks := self.worker.probed.reports.ranks):
            for rank in ranks:
                await OwnTrial(self._upstream, self._url, str(rank)).run()
            return
        busy_at = began = time.monotonic()
        await asyncio.sleep(GRACE_SECONDS)
        while self.worker.draft_state == TRIAL:
            now = time.monotonic()
            if self.worker.probed.metrics.requests:
                busy_at = now
            is_idle, is_overdue = now - busy_at >= IDLE_SECONDS, now - began >= OVERDUE_SECONDS
            if (is_idle or is_overdue) and self._gates.wants(self.worker):
                await self._gates.step(self.worker, _no_clients, beside=not is_idle)
            else:
                await asyncio.sleep(POLL_SECONDS)
            await self._look()

    async def _look(self) -> bool:
        """Ask the worker what it is; whether it answers."""
        try:
            probed = await self._probe.probe(
                self.worker.probed, own_id="", of_plugin=self.worker.engine is not None, lull=_at_once
            )
        except FAILED:
            return False
        if self.worker.boot and probed.boot != self.worker.boot:
            probed = Probed()  # another one listens there now: the worker that this was started for is gone
        self.worker.probed, self.worker.up = probed, bool(probed.boot)
        return True


async def _at_once() -> None:
    pass


async def _no_clients() -> Sequence[TrialPrompt]:
    return ()


async def with_worker(work: OwnTrial, parent: int) -> None:
    """Run it for as long as the process `parent`, which has started this one, is there."""
    running = asyncio.create_task(work.run())
    while not running.done() and os.getppid() == parent:
        await asyncio.wait((running,), timeout=POLL_SECONDS)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="try whether hints are right beside the drafts of a worker", allow_abbrev=False
    )
    parser.add_argument("--worker", metavar="URL", required=True)
    parser.add_argument(
        "--parent", metavar="PID", type=int, required=True, help="the process that has started this one"
    )
    args = parser.parse_args(argv)
    logged = logging.StreamHandler(sys.stderr)
    logged.setFormatter(PrintableFormatter("%(levelname)s %(asctime)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[logged])
    logging.getLogger("seamark.drafts").setLevel(logging.INFO)

    async def try_drafts() -> None:
        upstream = Upstream(CONNECT_SECONDS, DEFAULTS.max_header_bytes, os.environ.get(KEY_VARIABLE) or None)
        try:
            await with_worker(OwnTrial(upstream, args.worker), args.parent)
        finally:
            await upstream.aclose()

    try:
        asyncio.run(try_drafts())
    except KeyboardInterrupt:
        pass  # the worker's, too
    except Exception as error:  # the kind alone: the message might hold prompt text
        logging.getLogger("seamark.drafts").error("hints beside drafts stay on trial: %s", type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
