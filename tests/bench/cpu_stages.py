"""`python -m tests.bench.cpu_stages`: where a request's CPU time goes in the gateway, and in a bare aiohttp proxy.

Both stand before a worker that computes nothing, and take turns with vllm-router, of which only the sum is known.
Sampling is the kernel's, by CPU time, and on in a batch of its own, so that it is not in the sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from proxy.bench.harness.counters import CpuTime
from proxy.bench.harness.servers import Server, Servers, narrator
from proxy.commands.render_server import free_port
from tests.bench.gateway_cost import BARE, MANY, SEAMARK, SMALL, Case, Contestant, chats
from tests.bench.peers import PEERS, VLLM_ROUTER, start
from tests.bench.sampled import STAGES
from tests.harness.mock_worker import mock_worker
from tests.harness.waiting import until

REQUESTS, ROUNDS, SAMPLED = 400, 6, 10_000

WORDS = (
    "microseconds of CPU time for a request, user and system: the sum is the median of the batches without sampling,\n"
    "its parts are the shares of the samples in a batch of its own. What a library does belongs to who called it."
)


class Shares(NamedTuple):
    """One way's CPU time for one kind of traffic."""

    name: str
    seconds: float  # for a request
    samples: dict[str, int]  # by stage; empty: it is not sampled


async def measure(
    ways: Sequence[Contestant], files: dict[str, Path], case: Case, requests: int, rounds: int, sampled: int
) -> list[Shares]:
    """Batches in turn, and one that is sampled for each way that has a file."""
    bodies = chats(case)
    sums: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(-1, rounds):  # the first warms up
        for way in ways:
            batch = await way.measure(case, list(itertools.islice(bodies, requests + case.clients)))
            if number >= 0 and batch.cpu is not None:
                sums[way.name].append(batch.cpu)
    found = []
    for way in ways:
        samples: dict[str, int] = {}
        if (file := files.get(way.name)) is not None:
            file.unlink(missing_ok=True)
            os.kill(way.server.process.pid, signal.SIGUSR1)
            await way.measure(case, list(itertools.islice(bodies, sampled + case.clients)))
            os.kill(way.server.process.pid, signal.SIGUSR2)
            await until(lambda file=file: file.exists() and file.read_text().endswith("}"))  # type: ignore[misc]
            samples = json.loads(file.read_text())
        found.append(Shares(way.name, statistics.median(sums[way.name]), samples))
    return found


def render(found: Sequence[Shares], case: Case) -> str:
    """A column for each way."""
    lines = [f"{case!s:<28}" + "".join(f"{each.name:>14}" for each in found)]
    for stage in STAGES:
        shown = ""
        for each in found:
            whole = sum(each.samples.values())
            shown += f"{1e6 * each.seconds * each.samples.get(stage, 0) / whole:>14.0f}" if whole else f"{'':>14}"
        lines.append(f"  {stage:<26}{shown}")
    lines.append(f"  {'sum':<26}" + "".join(f"{1e6 * each.seconds:>14.0f}" for each in found))
    return "\n".join(lines)


async def run(requests: int, rounds: int, sampled: int) -> list[str]:
    """A table for plain answers, and one for streams."""
    say = narrator()
    with tempfile.TemporaryDirectory(prefix="seamark-stages-") as folder, Servers(Path(folder)) as servers:
        worker = mock_worker(servers, 0)
        worker.wait_until_ready()
        files = {name: Path(folder) / f"{name}.json" for name in (SEAMARK, BARE)}

        def sampling(name: str, port: int, command: Sequence[str], ready: str) -> Server:
            whole = [sys.executable, "-m", "tests.bench.sampled", str(files[name]), *command]
            server = servers.start(name.split()[0], port, whole, {})
            server.wait_until_ready(ready, seconds=60)
            return server

        port = free_port()
        flags = ["--port", str(port), "--worker", worker.url, "--self-check-interval", "0", "--stop-delay", "0"]
        ours = sampling(SEAMARK, port, ["proxy.cli", "serve", *flags], "/ready")
        port = free_port()
        bare = sampling(BARE, port, ["tests.bench.bare_proxy", str(port), worker.url], "/health")
        ways = [
            Contestant(SEAMARK, ours, CpuTime(ours.process.pid)),
            Contestant(BARE, bare, CpuTime(bare.process.pid)),
        ]
        (peer,) = (peer for peer in PEERS if peer.name == VLLM_ROUTER)
        router = start(servers, peer, [worker.url], Path(folder), say).server
        if router is not None:
            ways.append(Contestant(VLLM_ROUTER, router, CpuTime(router.process.pid)))
        tables = []
        for streamed in (False, True):
            case = Case(SMALL, streamed, MANY)
            say(str(case))
            tables.append(render(await measure(ways, files, case, requests, rounds, sampled), case))
        return tables


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cpu_stages")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=f"in a batch ({REQUESTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"batches ({ROUNDS})")
    parser.add_argument("--sampled", type=int, default=SAMPLED, metavar="N", help=f"requests sampled ({SAMPLED})")
    args = parser.parse_args()
    print("\n\n".join([*uvloop.run(run(args.requests, args.rounds, args.sampled)), WORDS]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
