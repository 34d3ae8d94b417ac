"""`python -m tests.bench.attacks`: honest streams through one gateway, without attackers and beside attackers.

The attackers have a core of their own, so that what they take of the gateway's is what the gateway gives them. Exit
status 1 when an honest request fails that would not fail without them, a page or a stream waits too long, memory grows
past what the settings allow, or connections stay open.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.bench.harness.servers import Server, Servers, narrator
from proxy.settings import Settings
from tests.bench.attackers import KINDS
from tests.bench.soak import bad_lines, resident_bytes
from tests.harness.load import CHAT, open_files
from tests.harness.mock_worker import FRAMES_FIELD, MODEL, STEP_FIELD, mock_worker
from tests.harness.raw_http import Connection, Cut, request

ATTACKERS, STREAMS, SECONDS, QUIET_SECONDS = 16, 64, 1800.0, 60.0

STEP_MS, FRAMES = 50, 100  # of an honest stream

HEALTH_INTERVAL = 0.05

HEALTH_P99, STREAM_GAP = 0.1, 0.25  # seconds, at most

PER_SECOND = 5.0  # attacks of each kind, at least, while it is its turn

SETTLE_SECONDS = 60.0

_SENT = re.compile(rb'"sent":(\d+)')  # in a frame: time.monotonic_ns() of the worker's step

# Small tables, and so a small bound.
FLAGS = ("--memory-bytes", "16000000", "--text-bytes", "16000000", "--max-bodies-bytes", "268435456")

# What the gateway takes beside its settings (proxy/README.md, "Limits"): the interpreter with all that it has imported.
CODE_BYTES = 160 * 2**20

# The limit of bodies holds for all bytes together, but the allocator has one store for small objects, such as parsed
# values, and another for large ones, such as bodies as they came; each keeps what it needed at its own worst moment.
BODY_BYTES_HELD = 2.0

WORDS = """
late: from the worker's step to the client; most: the worst of all. health: from asking GET /health to its answer, on
one connection. memory: resident; its bound: the three settings of memory plus the program's own. files: descriptors
open before, and once all clients have left. Three of four attackers send one kind after the other; a rate is that of a
kind in its own time."""


@dataclass(frozen=True)
class Run:
    """Honest clients, beside so many attackers; times in seconds, memory in bytes."""

    attackers: int
    seconds: float
    streams: int  # honest ones that began
    failed: int  # of them: broken off, or refused
    frames: int
    late_p99: float
    late_most: float
    health_p50: float
    health_p99: float
    health_most: float
    health_failed: int
    memory_most: int
    files_before: int
    files_after: int
    attacks: Mapping[str, int]  # sent, by kind
    failures: Mapping[str, int]  # what failed streams were told
    log: Sequence[str]  # lines that name an error


class Honest:
    """Clients that stream all the time. HTTP is not taken apart: a frame's time stands in it."""

    def __init__(self, gateway: Server) -> None:
        self._gateway = gateway
        self.lateness = array("q")  # nanoseconds
        self.streams = 0
        self.failures: Counter[str] = Counter()  # by the beginning of what came

    async def stream_on(self, number: int, until: float) -> None:
        messages = [{"role": "system", "content": "You."}, {"role": "user", "content": f"{number}?"}]
        body = {"model": MODEL, "messages": messages, "stream": True, STEP_FIELD: STEP_MS, FRAMES_FIELD: FRAMES}
        question = request("POST", CHAT, {"content-type": "application/json"}, json.dumps(body).encode())
        while time.monotonic() < until:
            self.streams += 1
            received = bytearray()
            try:
                async with asyncio.timeout(FRAMES * STEP_MS / 1000 + 60):
                    await self._stream(question, received)
            except (OSError, TimeoutError, Cut):
                self.failures[received[:300].decode(errors="replace")] += 1

    async def _stream(self, question: bytes, received: bytearray) -> None:
        connection = await Connection.open(self._gateway)
        try:
            await connection.send(question)
            done = 0
            while received.find(b"data: [DONE]\n\n", max(0, done - 20)) < 0:
                received += await connection.some()
                now, whole = time.monotonic_ns(), received.rfind(b"\n\n")
                self.lateness.extend(now - int(sent) for sent in _SENT.findall(received, done, max(done, whole)))
                done = max(done, whole)
        finally:
            connection.close()


async def ask_health(gateway: Server, until: float, took: list[float]) -> int:
    """Ask again and again; how often there was no answer."""
    failed = 0
    connection = await Connection.open(gateway)
    while time.monotonic() < until:
        began = time.perf_counter()
        try:
            await connection.send(request("GET", "/health", {}))
            answer = await asyncio.wait_for(connection.response(), 30)
        except (Cut, OSError, TimeoutError):
            answer = None
        if answer is None or answer.status != 200:
            failed += 1
            connection.close()
            connection = await Connection.open(gateway)
        else:
            took.append(time.perf_counter() - began)
        await asyncio.sleep(HEALTH_INTERVAL)
    connection.close()
    return failed


async def run(servers: Servers, attackers: int, seconds: float) -> Run:
    """One gateway before one worker, for so long."""
    worker = mock_worker(servers)
    gateway = servers.gateway(worker, flags=FLAGS)
    for server, path in ((worker, "/health"), (gateway, "/ready")):
        await asyncio.to_thread(server.wait_until_ready, path)
    await asyncio.sleep(1)
    before = open_files(gateway.process.pid)
    until = time.monotonic() + seconds
    honest, took = Honest(gateway), []
    memory: list[int] = []

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append(resident_bytes(gateway.process.pid))
            await asyncio.sleep(0.5)

    parts = [watch(), *(honest.stream_on(number, until) for number in range(STREAMS))]
    sent: Mapping[str, int] = {}
    process = None
    if attackers:
        command = [sys.executable, "-m", "tests.bench.attackers", gateway.url, str(attackers), str(seconds)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        health_failed, *_ = await asyncio.gather(ask_health(gateway, until, took), *parts)
        if process is not None:
            sent = json.loads((await process.communicate())[0])
    finally:
        if process is not None and process.returncode is None:
            process.kill()
    settled = time.monotonic() + SETTLE_SECONDS  # kept connections to the worker are closed after some seconds
    while (after := open_files(gateway.process.pid)) > before and time.monotonic() < settled:
        await asyncio.sleep(1)
    late, took = sorted(honest.lateness), sorted(took)
    return Run(
        attackers,
        seconds,
        honest.streams,
        honest.failures.total(),
        len(late),
        share(late, 0.99) / 1e9,
        share(late, 1.0) / 1e9,
        statistics.median(took) if took else math.inf,
        share(took, 0.99),
        share(took, 1.0),
        health_failed,
        max(memory),
        before,
        after,
        sent,
        honest.failures,
        bad_lines(gateway, 0)[:20],
    )


def share(ordered: Sequence[float], part: float) -> float:
    """The value below which this part of all lies; infinite if there is none."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.inf


def memory_bound() -> int:
    """Bytes that the gateway may take with `FLAGS`."""
    memory, texts, bodies = (int(value) for value in FLAGS[1::2])
    being_read = Settings.model_fields["max_body_bytes"].default
    return CODE_BYTES + memory + texts + round(BODY_BYTES_HELD * bodies) + being_read


def complaints(quiet: Run, beside: Run, per_second: float = PER_SECOND) -> list[str]:
    """What did not hold."""
    found = []
    if beside.failed > quiet.failed or beside.health_failed > quiet.health_failed:
        found.append(f"{beside.failed} honest streams and {beside.health_failed} questions for the health failed")
    if beside.health_p99 > HEALTH_P99:
        found.append(f"p99 of /health {1000 * beside.health_p99:.0f} ms, at most {1000 * HEALTH_P99:.0f} wanted")
    if beside.late_most - quiet.late_p99 > STREAM_GAP:
        found.append(f"a frame was {1000 * beside.late_most:.0f} ms late, at most {1000 * STREAM_GAP:.0f} wanted")
    if beside.memory_most > memory_bound():
        found.append(f"{beside.memory_most / 2**20:.0f} MiB resident, the bound is {memory_bound() / 2**20:.0f}")
    if beside.files_after > beside.files_before:
        found.append(f"{beside.files_after} descriptors open, {beside.files_before} before")
    rare = [kind for kind in KINDS if beside.attacks.get(kind, 0) < per_second * beside.seconds / len(KINDS)]
    if rare:
        found.append(f"less than {per_second:g} a second were sent of: {', '.join(rare)}")
    told = [f"{count} failed: {said!r}" for said, count in beside.failures.items()]
    return found + told + [f"log: {line}" for line in beside.log]


def render(quiet: Run, beside: Run, wrongs: Sequence[str]) -> str:
    """Both runs side by side, and the verdict."""
    lines = []
    for each in (quiet, beside):
        late, most = 1000 * each.late_p99, 1000 * each.late_most
        health = [1000 * seconds for seconds in (each.health_p50, each.health_p99, each.health_most)]
        lines += [
            f"{each.attackers} attackers: {each.failed} of {each.streams} streams failed; frames late p99 {late:.1f},",
            f"  most {most:.0f} ms; health p50 {health[0]:.1f}, p99 {health[1]:.1f}, most {health[2]:.0f}; memory "
            f"{each.memory_most / 2**20:.0f} MiB; files {each.files_before} -> {each.files_after}",
        ]
    rates = {kind: count * len(KINDS) / beside.seconds for kind, count in beside.attacks.items()}
    lines.append(f"attacks a second: {', '.join(f'{kind} {rate:.1f}' for kind, rate in rates.items())}")
    return "\n".join([*lines, *(wrongs or ["held"])])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.attacks", description="honest clients beside attackers"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="beside attackers")
    parser.add_argument("--attackers", type=int, default=ATTACKERS)
    args = parser.parse_args(argv)
    say = narrator()
    runs = []
    for attackers, seconds in ((0, min(QUIET_SECONDS, args.seconds)), (args.attackers, args.seconds)):
        say(f"{STREAMS} honest streams beside {attackers} attackers, {seconds:g} s")
        folder = Path(tempfile.mkdtemp(prefix="seamark-attacks-"))
        with Servers(folder) as servers:
            runs.append(asyncio.run(run(servers, attackers, seconds)))
    wrongs = complaints(*runs)
    print(render(*runs, wrongs), WORDS, sep="\n")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
