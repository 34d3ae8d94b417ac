"""`seamark bench aborts`: clients that leave at every moment of a request, and how soon the worker is free again.

Exit status 1 when the 99th percentile from a client's close to the worker's notice is above 100 ms in any case, when a
request whose client left in the queue still reaches a worker, when the gateway keeps sockets or counts requests that
are gone, or when a real engine goes on longer behind the gateway than without it, by more than those 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from proxy.bench.engines import MODEL_NAME, Fleet, Server
from proxy.bench.leaving import (
    CHAT,
    FD_SLACK,
    LIMIT_SECONDS,
    PATIENCE_SECONDS,
    QUEUED,
    Left,
    Remains,
    leave_all,
    leave_queue,
    remains,
    repeated,
)
from proxy.bench.models import generated_model
from proxy.bench.passes import PassCounter
from proxy.bench.progress import narrator
from proxy.bench.raw_http import Connection, request
from proxy.bench.samples import samples_of
from proxy.bench.strict_worker import StrictWorker

TIMES = 50
ENGINE_TIMES = 50
QUEUE_FLAGS = ("--max-inflight", "1")
RUNNING = "vllm:num_requests_running"


@dataclass(frozen=True)
class EngineLeft:
    """A real engine left alone: directly, and behind the gateway."""

    stream: bool
    direct: Left  # seconds until the engine says that nothing runs
    behind: Left
    steps: float  # median of the engine's steps meanwhile, behind the gateway
    step_seconds: float  # median length of a step

    @property
    def held(self) -> bool:
        """Whether the gateway adds no more than the limit and one step."""
        if self.direct.failures or self.behind.failures:
            return False
        return self.behind.p99 <= self.direct.p99 + LIMIT_SECONDS + self.step_seconds


@dataclass(frozen=True)
class Aborts:
    """Everything measured."""

    cases: Sequence[Left]
    before: Remains
    after: Remains
    engine: Sequence[EngineLeft] = ()

    @property
    def complaints(self) -> list[str]:
        """What is wrong, in words."""
        found = [f"{case.name}: {case.failures[0]}" for case in self.cases if case.failures]
        found += [
            f"{case.name}: p99 {case.p99 * 1e3:.0f} ms, at most {LIMIT_SECONDS * 1e3:.0f} ms"
            for case in self.cases
            if not case.failures and not case.held
        ]
        if self.after.inflight != 0:
            found.append(f"seamark_inflight is {self.after.inflight} when all have left")
        if self.after.queued != 0:
            found.append(f"seamark_queued is {self.after.queued} when all have left")
        if self.after.open_files > self.before.open_files + FD_SLACK:
            found.append(f"the gateway holds {self.after.open_files} open files, {self.before.open_files} before")
        found += [
            f"real engine, {'stream' if each.stream else 'no stream'}: behind the gateway {_told(each.behind)}, "
            f"directly {_told(each.direct)}"
            for each in self.engine
            if not each.held
        ]
        return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="seamark bench aborts", description="clients that leave at every moment")
    parser.add_argument("--times", type=int, default=TIMES, help="clients per case")
    parser.add_argument("--no-engine", action="store_true", help="with the strict worker only")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    say = narrator()
    folder = Path(tempfile.mkdtemp(prefix="seamark-aborts-"))
    with Fleet(folder) as fleet:
        result = asyncio.run(measure(fleet, args.times, say, with_engine=not args.no_engine))
    print(json.dumps(report(result), indent=1) if args.json else render(result))
    if not result.complaints:
        shutil.rmtree(folder)
        return 0
    say(f"the servers' logs are in {folder}")
    return 1


async def measure(fleet: Fleet, times: int, say=print, with_engine: bool = True) -> Aborts:
    """All cases before a strict worker, then the same before a real engine."""
    async with StrictWorker() as worker:
        gateway = await started(fleet.gateway(worker))
        await leave_all(gateway, worker, 2)  # what is made once and kept is made now
        before = await remains(gateway)
        say(f"{times} clients leave in each case")
        cases = await leave_all(gateway, worker, times)
        after = await remains(gateway, before)
        say("and while they wait in the gateway's queue")
        cases.append(await queue_case(fleet, worker, times))
    engine: list[EngineLeft] = []
    if with_engine:
        say("starting a real engine")
        vllm = await started(fleet.engine("engine", generated_model(say)), "/health")
        behind = await started(fleet.gateway(vllm))
        engine = [await leave_engine(vllm, behind, stream, ENGINE_TIMES) for stream in (True, False)]
    return Aborts(cases, before, after, engine)


async def queue_case(fleet: Fleet, worker: StrictWorker, times: int) -> Left:
    """The queue of a gateway that sends one request at a time to a worker."""
    try:
        gateway = await started(fleet.gateway(worker, flags=QUEUE_FLAGS))
        return await leave_queue(gateway, worker, times)
    except (RuntimeError, TimeoutError) as error:
        return Left(QUEUED, (), [f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"])


async def started(server: Server, path: str = "/ready") -> Server:
    """The server once it is ready; the strict worker answers meanwhile."""
    await asyncio.to_thread(server.wait_until_ready, path)
    return server


async def leave_engine(engine: Server, gateway: Server, stream: bool, times: int) -> EngineLeft:
    """Clients leave in the middle of long answers of a real engine, directly and through the gateway."""
    counter = PassCounter(engine.log)
    steps: list[int] = []
    step_seconds: list[float] = []
    async with httpx.AsyncClient() as client:

        async def running(wanted: float) -> None:
            while (await samples_of(client, engine)).get(RUNNING) != wanted:
                await asyncio.sleep(0.001)

        async def once(server: Server) -> float:
            body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Tide?"}], "stream": stream}
            body |= {"max_tokens": 4000, "ignore_eos": True}
            data = request("POST", CHAT, {"content-type": "application/json"}, json.dumps(body).encode())
            async with asyncio.timeout(PATIENCE_SECONDS):
                connection = await Connection.open(server)
                counter.restart()
                asked = time.perf_counter()
                await connection.send(data)
                while stream and (await connection.some()).count(b"data:") == 0:
                    pass
                await running(1)
                step_seconds.append((time.perf_counter() - asked) / max(1, counter.so_far()))
                counter.restart()
                began = time.perf_counter()
                connection.close()
                await running(0)
                seconds = time.perf_counter() - began
            if server is gateway:
                steps.append(counter.so_far())
            return seconds

        direct = await repeated("directly", times, lambda: once(engine))
        behind = await repeated("behind the gateway", times, lambda: once(gateway))
    return EngineLeft(stream, direct, behind, statistics.median(steps or [0]), statistics.median(step_seconds or [0.0]))


def _told(left: Left) -> str:
    if left.failures:
        return left.failures[0]
    return f"p50 {statistics.median(left.seconds) * 1e3:.1f} ms, p99 {left.p99 * 1e3:.1f} ms"


def render(result: Aborts) -> str:
    """A table for people."""
    lines = [f"{'from the client leaving until the worker is free':<50}{'clients':>8}  "]
    lines += [f"  {case.name:<48}{len(case.seconds) + len(case.failures):>8}  {_told(case)}" for case in result.cases]
    for each in result.engine:
        name = f"real engine, {'stream' if each.stream else 'no stream'}"
        lines.append(f"  {name + ', directly':<48}{len(each.direct.seconds):>8}  {_told(each.direct)}")
        more = f"{each.steps:g} steps of {each.step_seconds * 1e3:.1f} ms meanwhile"
        lines.append(f"  {name + ', gateway':<48}{len(each.behind.seconds):>8}  {_told(each.behind)}, {more}")
    lines.append(
        f"  left over: {result.after.inflight} in flight, {result.after.queued:g} queued, "
        f"{result.after.open_files} open files ({result.before.open_files} before)"
    )
    return "\n".join([*lines, *result.complaints])


def report(result: Aborts) -> dict[str, object]:
    """The same for machines; seconds."""

    def told(left: Left) -> dict[str, object]:
        p99 = left.p99 if left.seconds else None
        return {"name": left.name, "seconds": list(left.seconds), "p99": p99, "failures": list(left.failures)}

    return {
        "held": not result.complaints,
        "complaints": result.complaints,
        "cases": [told(case) for case in result.cases],
        "before": result.before._asdict(),
        "after": result.after._asdict(),
        "engine": [
            {
                "stream": each.stream,
                "direct": told(each.direct),
                "behind": told(each.behind),
                "steps": each.steps,
                "step_seconds": each.step_seconds,
            }
            for each in result.engine
        ],
    }
