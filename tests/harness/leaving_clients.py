"""Clients that leave at any moment, how soon the worker is free then, and what they leave behind in a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import httpx

from proxy.bench.harness.counters import samples_of
from proxy.bench.harness.servers import Server, Servers
from tests.harness.cpu_time import family
from tests.harness.raw_http import Connection, Cut, request
from tests.harness.raw_worker import DRIPPING, SILENT, SLOW_BODY, STALLED, RawWorker

CHAT = "/v1/chat/completions"

LIMIT_SECONDS = 0.1  # from the client's close to the worker's notice, 99th percentile

PATIENCE_SECONDS = 5.0  # then it counts as never

SETTLE_SECONDS = 15.0  # idle connections to workers are kept for a few seconds

FD_SLACK = 2  # health checks of the workers come and go

RUNNING = "vllm:num_requests_running"

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


class Remains(NamedTuple):
    """What a gateway holds when nobody asks anything of it."""

    inflight: float
    queued: float
    open_files: int  # of its processes


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
    """Clients leave the queue of a gateway while another's request has its worker.

    Their requests must never reach the worker; the seconds are those until `seamark_queued` is back.
    """
    gateway = await started(servers.gateway(worker, flags=("--max-inflight", "1")))
    names: list[str] = []
    async with httpx.AsyncClient() as client:

        async def queued(wanted: float) -> None:
            while (await samples_of(client, gateway))["seamark_queued"] != wanted:
                await asyncio.sleep(0.001)

        async def once() -> float:
            name, data = asking(CHAT, SILENT, len(names) % 2 == 0)
            names.append(name)
            connection = await Connection.open(gateway)
            await connection.send(data)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await queued(1)
                began = time.perf_counter()
                connection.close()
                await queued(0)
                return time.perf_counter() - began

        async def held() -> tuple[str, Connection]:
            name, data = asking(CHAT, SILENT, False)
            connection = await Connection.open(gateway)
            await connection.send(data)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await worker.arrived(name)
            return name, connection

        holder, holding = await held()
        left = await repeated("waiting in the gateway's queue", times, once)
        holding.close()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await worker.left(holder)
        # The worker is free: whatever was still queued would come before this one.
        (await held())[1].close()
    reached = [f"{name} reached the worker" for name in names if name in worker.seen]
    return Left(left.name, left.seconds, [*left.failures, *reached])


async def remains(gateway: Server, wanted: Remains | None = None) -> Remains:
    """What the gateway holds, once that is no more than `wanted` or time is up."""
    deadline = time.monotonic() + SETTLE_SECONDS
    async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        while True:
            found = await samples_of(client, gateway)
            files = open_files(gateway.process.pid)
            now = Remains(found["seamark_inflight"], found["seamark_queued"], files)
            enough = wanted is None or files <= wanted.open_files + FD_SLACK
            if (now[:2] == (0, 0) and enough) or time.monotonic() > deadline:
                return now
            await asyncio.sleep(0.1)


def open_files(pid: int) -> int:
    """File descriptors, sockets included, of a process and its descendants."""
    count = 0
    for process in family(pid):
        with contextlib.suppress(OSError):  # it has just ended
            count += len(os.listdir(f"/proc/{process}/fd"))
    return count


async def started(server: Server, path: str = "/ready") -> Server:
    """The server once it is ready; the raw worker answers meanwhile."""
    await asyncio.to_thread(server.wait_until_ready, path)
    return server
