"""`python -m tests.bench.streams`: how much later the frames of many streams arrive through one gateway process.

A worker without an engine makes a frame for every stream at each step, all at once as an engine does. The same streams
are read directly and through the gateway, back to back.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from proxy.bench.harness.counters import CpuTime
from proxy.bench.harness.servers import Servers, narrator
from tests.bench.stream_client import Lateness
from tests.harness.mock_worker import mock_worker

STREAMS, TOKENS_PER_SECOND, SECONDS, RUNS = 256, 50, 10.0, 5

P99_LIMIT = 20e-3  # seconds added

WORDS = (
    "lateness: from the worker's step to the client, milliseconds, of every frame. added: the p99 through the gateway\n"
    "less that of the direct run before it; the median of the runs is judged. CPU: of one core, the gateway's share.\n"
    "Worker and client run on the same machine."
)


class Run(NamedTuple):
    """The same streams, first without the gateway."""

    direct: Lateness
    through: Lateness
    cpu: float  # of the gateway, for a frame; seconds
    load: float  # of the gateway, CPU seconds in a second of streaming

    def added(self, figure: str) -> float:
        """Seconds by which that figure is worse through the gateway."""
        return getattr(self.through, figure) - getattr(self.direct, figure)


class Load(NamedTuple):
    """What is streamed."""

    streams: int
    tokens_per_second: int
    seconds: float

    @property
    def frames(self) -> int:
        """Frames of each stream."""
        return round(self.seconds * self.tokens_per_second)


async def receive(url: str, load: Load) -> Lateness:
    """One run of the client's process. Raises `RuntimeError` if it fails or a stream breaks off."""
    step = round(1000 / load.tokens_per_second)
    flags = ["--streams", str(load.streams), "--frames", str(load.frames), "--step-ms", str(step)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.stream_client", url, *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"the client ended with {process.returncode}")
    lateness = Lateness(**json.loads(output))
    if lateness.complete < load.streams or lateness.received < load.streams * load.frames:
        raise RuntimeError(f"frames were lost: {lateness}")
    return lateness


async def measure(load: Load, runs: int, say: Callable[[str], None]) -> list[Run]:
    """Direct and through the gateway in turn."""
    found = []
    with tempfile.TemporaryDirectory(prefix="seamark-streams-") as folder, Servers(Path(folder)) as servers:
        worker = mock_worker(servers)
        worker.wait_until_ready()
        gateway = servers.gateway(worker)
        gateway.wait_until_ready("/ready", seconds=30)
        cpu = CpuTime(gateway.process.pid)
        for number in range(runs):
            say(f"run {number + 1} of {runs}: {load.streams} streams of {load.frames} frames")
            direct = await receive(worker.url, load)
            before = await cpu.settled()
            through = await receive(gateway.url, load)
            used = await cpu.settled() - before
            found.append(Run(direct, through, used / through.received, used / load.seconds))
    return found


def p99_added(runs: Sequence[Run]) -> float:
    """Seconds, median of the runs."""
    return statistics.median(run.added("p99") for run in runs)


def render(runs: Sequence[Run], load: Load) -> str:
    """A line for each run, and the verdict."""
    lines = [
        f"{load.streams} streams of {load.tokens_per_second} tokens per second",
        f"  {'direct p50':>10}{'p99':>8}{'through p50':>14}{'p99':>8}{'most':>8}{'added p50':>12}{'p99':>8}{'CPU':>7}",
    ]
    for run in runs:
        direct, through = run.direct, run.through
        figures = (direct.p50, direct.p99, through.p50, through.p99, through.most, run.added("p50"), run.added("p99"))
        cells = zip((10, 8, 14, 8, 8, 12, 8), figures, strict=True)
        lines.append("  " + "".join(f"{1000 * seconds:>{width}.2f}" for width, seconds in cells) + f"{run.load:>7.0%}")
    verdict = "held" if p99_added(runs) <= P99_LIMIT else "NOT HELD"
    each = 1e6 * statistics.median(run.cpu for run in runs)
    lines.append(f"  CPU of the gateway for a frame: {each:.0f} us")
    lines.append(f"{verdict}: added p99 {1000 * p99_added(runs):.2f} ms, at most {1000 * P99_LIMIT:.0f} ms wanted")
    return "\n".join(lines)


def report(runs: Sequence[Run], load: Load) -> dict[str, Any]:
    """Everything measured, for machines; seconds."""
    return {
        **load._asdict(),
        "runs": [
            {
                "direct": run.direct._asdict(),
                "through": run.through._asdict(),
                "added_p50": run.added("p50"),
                "added_p99": run.added("p99"),
                "cpu_per_frame": run.cpu,
                "cpu_load": run.load,
            }
            for run in runs
        ],
        "added_p99": p99_added(runs),
        "limit": P99_LIMIT,
        "held": p99_added(runs) <= P99_LIMIT,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.streams",
        description="how late frames come through the gateway when many streams run",
    )
    parser.add_argument("--streams", type=int, default=STREAMS, metavar="N", help=f"at once ({STREAMS})")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help=f"of each run ({SECONDS:g})")
    parser.add_argument("--runs", type=int, default=RUNS, metavar="N", help=f"of each kind ({RUNS})")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.streams < 1 or args.runs < 1 or args.seconds <= 1:
        parser.error("--streams, --runs: at least 1; --seconds: more than 1, the first is not counted")
    load = Load(args.streams, TOKENS_PER_SECOND, args.seconds)
    runs = asyncio.run(measure(load, args.runs, narrator()))
    print(json.dumps(report(runs, load), indent=1) if args.json else f"{render(runs, load)}\n\n{WORDS}")
    return 0 if p99_added(runs) <= P99_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
