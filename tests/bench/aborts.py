"""`python -m tests.bench.aborts`: what clients leave behind that go at any moment, and how soon the worker is free.

Exit status 1 when the 99th percentile from a client's close to the worker's notice is above 100 ms in any case, when a
request whose client left in the queue still reaches a worker, when the gateway keeps sockets or counts requests that
are gone, or when a real engine goes on longer behind the gateway than without it, by more than those 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from proxy.bench.harness.counters import PassCounter, family, samples_of
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from tests.harness.raw_http import Connection, Cut, request
from tests.harness.raw_worker import DRIPPING, SILENT, SLOW_BODY, STALLED, RawWorker

CHAT = "/v1/chat/completions"

TIMES = 50

ENGINE_TIMES = 50

LIMIT_SECONDS = 0.1  # from the client's close to the worker's notice, 99th percentile

PATIENCE_SECONDS = 5.0  # then it counts as never

SETTLE_SECONDS = 15.0  # idle connections to workers are kept for a few seconds

FD_SLACK = 2  # health checks of the workers come and go

QUEUE_FLAGS = ("--max-inflight", "1")

RUNNING = "vllm:num_requests_running"

QUEUED = "waiting in the gateway's queue"

_numbers = itertools.count(1)


class Case(NamedTuple):
    """How the worker answers, and what the client has seen when it leaves."""

    name: str
    path: str
    stream: bool
    answer: str  # of the raw worker
    sees: bool = False  # the client has some of the answer; otherwise only the worker has the request


CASES = (
    Case("waiting for the first byte, stream", CHAT, True, SILENT),
    Case("waiting for the answer, no stream", CHAT, False, SILENT),
    Case("streaming, the worker silent", CHAT, True, STALLED, sees=True),
    Case("streaming, the worker busy", CHAT, True, DRIPPING, sees=True),
    Case("the answer arrives slowly, no stream", CHAT, False, SLOW_BODY),
    Case("a body is passed on slowly", "/v1/audio/speech", False, SLOW_BODY, sees=True),
    Case("waiting, /v1/messages, stream", "/v1/messages", True, SILENT),
    Case("streaming, /v1/responses", "/v1/responses", True, DRIPPING, sees=True),
)


@dataclass(frozen=True)
class Left:
    """What became of one case's repetitions."""

    name: str
    seconds: Sequence[float]  # from the client's close until the worker is free
    failures: Sequence[str] = ()

    @property
    def p99(self) -> float:
        """99th percentile, seconds (of fewer than 100: the slowest)."""
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1] if self.seconds else math.inf

    @property
    def held(self) -> bool:
        """Whether the target is met."""
        return not self.failures and self.p99 <= LIMIT_SECONDS


class Remains(NamedTuple):
    """What a gateway holds when nobody asks anything of it."""

    inflight: float | None  # the gauge; None: not to be had
    queued: float  # 0 if there is no queue
    open_files: int  # of its processes


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
            f"real engine, {'stream' if each.stream else 'no stream'}: behind the gateway {_in_words(each.behind)}, "
            f"directly {_in_words(each.direct)}"
            for each in self.engine
            if not each.held
        ]
        return found


def chat(question: str, **fields: object) -> bytes:
    """A chat with a shared part and a question."""
    messages = [{"role": "system", "content": "You pilot ships. " * 20}, {"role": "user", "content": question}]
    body = {"model": "m", "messages": messages, "input": messages, "max_tokens": 16, **fields}
    return json.dumps(body).encode()


def asking(path: str, answer: str, stream: bool) -> tuple[str, bytes]:
    """A new request's name at the raw worker, and its bytes."""
    name = f"left-{next(_numbers)}"
    headers = {"content-type": "application/json", "x-mock": answer, "x-mock-id": name}
    return name, request("POST", path, headers, chat(name, stream=stream))


async def leave(gateway: Server, worker: RawWorker, case: Case) -> float:
    """One client comes and leaves; seconds until the worker noticed. Raises `TimeoutError`."""
    name, data = asking(case.path, case.answer, case.stream)
    connection = await Connection.open(gateway)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await connection.send(data)
        await worker.arrived(name)
        if case.answer in (DRIPPING, SLOW_BODY):
            await worker.flowing(name)
        if case.sees:
            seen = b""
            while not seen.partition(b"\r\n\r\n")[2]:
                seen += await connection.some()
        began = time.perf_counter()
        connection.close()
        return await worker.left(name) - began


async def repeated(name: str, times: int, once: Callable[[], Awaitable[float]]) -> Left:
    """`once`, one after the other."""
    seconds, failures = [], []
    for number in range(times):
        try:
            seconds.append(await once())
        except TimeoutError:
            failures.append(f"{number + 1}: not within {PATIENCE_SECONDS:g} s")
        except (OSError, Cut) as error:
            failures.append(f"{number + 1}: {type(error).__name__}: {error}")
    return Left(name, seconds, failures)


async def leave_all(gateway: Server, worker: RawWorker, times: int) -> list[Left]:
    """Every case that needs no queue."""
    return [await repeated(case.name, times, lambda case=case: leave(gateway, worker, case)) for case in CASES]


async def queue_case(servers: Servers, worker: RawWorker, times: int) -> Left:
    """The queue of a gateway that sends one request at a time to a worker."""
    try:
        gateway = await started(servers.gateway(worker, flags=QUEUE_FLAGS))
        return await leave_queue(gateway, worker, times)
    except (RuntimeError, TimeoutError) as error:
        return Left(QUEUED, (), [f"{type(error).__name__}: {str(error).strip().rpartition(chr(10))[2]}"])


async def leave_queue(gateway: Server, worker: RawWorker, times: int) -> Left:
    """Clients leave a gateway started with `--max-inflight 1` while another's request has its worker.

    Their requests must never reach the worker; the seconds are those until `seamark_queued` is back.
    """
    holder, data = asking(CHAT, SILENT, False)
    holding = await Connection.open(gateway)
    await holding.send(data)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await worker.arrived(holder)
    names: list[str] = []
    async with httpx.AsyncClient() as client:

        async def once() -> float:
            name, data = asking(CHAT, SILENT, len(names) % 2 == 0)
            names.append(name)
            connection = await Connection.open(gateway)
            await connection.send(data)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await _queued(client, gateway, 1)
                began = time.perf_counter()
                connection.close()
                await _queued(client, gateway, 0)
                return time.perf_counter() - began

        left = await repeated(QUEUED, times, once)
        holding.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.left(holder)
        # The worker is free: whatever was still queued would come before this one.
        last, data = asking(CHAT, SILENT, False)
        behind = await Connection.open(gateway)
        await behind.send(data)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.arrived(last)
        behind.close()
    reached = [f"{name} reached the worker" for name in names if name in worker.seen]
    return Left(left.name, left.seconds, [*left.failures, *reached])


async def _queued(client: httpx.AsyncClient, gateway: Server, wanted: float) -> None:
    while (await samples_of(client, gateway)).get("seamark_queued") != wanted:
        await asyncio.sleep(0.001)


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
                step_seconds.append((time.perf_counter() - asked) / max(1, counter.so_far().all))
                counter.restart()
                began = time.perf_counter()
                connection.close()
                await running(0)
                seconds = time.perf_counter() - began
            if server is gateway:
                steps.append(counter.so_far().all)
            return seconds

        direct = await repeated("directly", times, lambda: once(engine))
        behind = await repeated("behind the gateway", times, lambda: once(gateway))
    return EngineLeft(stream, direct, behind, statistics.median(steps or [0]), statistics.median(step_seconds or [0.0]))


async def remains(gateway: Server, wanted: Remains | None = None) -> Remains:
    """What the gateway holds, once that is no more than `wanted` or time is up."""
    deadline = time.monotonic() + SETTLE_SECONDS
    async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        while True:
            found = await samples_of(client, gateway)
            now = Remains(
                found.get("seamark_inflight"), found.get("seamark_queued", 0.0), open_files(gateway.process.pid)
            )
            settled = now.inflight in (0, None if wanted is None else 0) and now.queued == 0
            enough = wanted is None or now.open_files <= wanted.open_files + FD_SLACK
            if (settled and enough) or time.monotonic() > deadline:
                return now
            await asyncio.sleep(0.1)


def open_files(pid: int) -> int:
    """File descriptors, sockets included, of a process and its descendants."""
    return sum(1 for process in family(pid) for _ in _descriptors(process))


def _descriptors(pid: int) -> Iterator[Path]:
    try:
        yield from Path(f"/proc/{pid}/fd").iterdir()
    except OSError:
        return  # it has just ended


async def started(server: Server, path: str = "/ready") -> Server:
    """The server once it is ready; the raw worker answers meanwhile."""
    await asyncio.to_thread(server.wait_until_ready, path)
    return server


async def measure(servers: Servers, times: int, say=print, with_engine: bool = True) -> Aborts:
    """All cases before a raw worker, then the same before a real engine."""
    async with RawWorker() as worker:
        gateway = await started(servers.gateway(worker))
        await leave_all(gateway, worker, 2)  # what is made once and kept is made now
        before = await remains(gateway)
        say(f"{times} clients leave in each case")
        cases = await leave_all(gateway, worker, times)
        after = await remains(gateway, before)
        say("and while they wait in the gateway's queue")
        cases.append(await queue_case(servers, worker, times))
    engine: list[EngineLeft] = []
    if with_engine:
        say("starting a real engine")
        vllm = await started(servers.engine("engine", generated_model(say)), "/health")
        behind = await started(servers.gateway(vllm))
        engine = [await leave_engine(vllm, behind, stream, ENGINE_TIMES) for stream in (True, False)]
    return Aborts(cases, before, after, engine)


def _in_words(left: Left) -> str:
    if left.failures:
        return left.failures[0]
    return f"p50 {statistics.median(left.seconds) * 1e3:.1f} ms, p99 {left.p99 * 1e3:.1f} ms"


def render(result: Aborts) -> str:
    """A table for people."""
    lines = [f"{'from the client leaving until the worker is free':<50}{'clients':>8}  "]
    lines += [
        f"  {case.name:<48}{len(case.seconds) + len(case.failures):>8}  {_in_words(case)}" for case in result.cases
    ]
    for each in result.engine:
        name = f"real engine, {'stream' if each.stream else 'no stream'}"
        lines.append(f"  {name + ', directly':<48}{len(each.direct.seconds):>8}  {_in_words(each.direct)}")
        more = f"{each.steps:g} steps of {each.step_seconds * 1e3:.1f} ms meanwhile"
        lines.append(f"  {name + ', gateway':<48}{len(each.behind.seconds):>8}  {_in_words(each.behind)}, {more}")
    lines.append(
        f"  left over: {result.after.inflight} in flight, {result.after.queued:g} queued, "
        f"{result.after.open_files} open files ({result.before.open_files} before)"
    )
    return "\n".join([*lines, *result.complaints])


def report(result: Aborts) -> dict[str, object]:
    """The same for machines; seconds."""

    def figures(left: Left) -> dict[str, object]:
        p99 = left.p99 if left.seconds else None
        return {"name": left.name, "seconds": list(left.seconds), "p99": p99, "failures": list(left.failures)}

    return {
        "held": not result.complaints,
        "complaints": result.complaints,
        "cases": [figures(case) for case in result.cases],
        "before": result.before._asdict(),
        "after": result.after._asdict(),
        "engine": [
            {
                "stream": each.stream,
                "direct": figures(each.direct),
                "behind": figures(each.behind),
                "steps": each.steps,
                "step_seconds": each.step_seconds,
            }
            for each in result.engine
        ],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.aborts", description="clients that leave at every moment"
    )
    parser.add_argument("--times", type=int, default=TIMES, help="clients per case")
    parser.add_argument("--no-engine", action="store_true", help="with the raw worker only")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    say = narrator()
    folder = Path(tempfile.mkdtemp(prefix="seamark-aborts-"))
    with Servers(folder) as servers:
        result = asyncio.run(measure(servers, args.times, say, with_engine=not args.no_engine))
    print(json.dumps(report(result), indent=1) if args.json else render(result))
    if not result.complaints:
        shutil.rmtree(folder)
        return 0
    say(f"the servers' logs are in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
