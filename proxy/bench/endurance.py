"""An engine under random traffic: what became of every request, what its processes held, what was left afterwards."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from proxy.bench.client import Answer, open_client
from proxy.bench.engines import Server
from proxy.bench.samples import samples_of
from proxy.bench.sending import Left, send
from proxy.bench.traffic import Request, Traffic

# More than an engine runs at once, so that requests wait, and are left while they wait.
PARALLEL = 12
REQUEST_SECONDS = 120.0
SETTLE_SECONDS = 30.0
SAMPLE_SECONDS = 1.0
# What must be zero on an engine's /metrics, and on its gateway's, when nothing is going on.
ENGINE_ZEROS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
GATEWAY_ZEROS = ("seamark_inflight",)
COUNTED = {
    "preemptions": "vllm:num_preemptions_total",
    "resumed from a state": "seamark_checkpoint_hits_total",
    "states written": "seamark_checkpoints_written_total",
}
_BAD_LINE = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback \(most recent call last\)")


class Subject(NamedTuple):
    """An engine under test and the gateway in front of it."""

    name: str
    engine: Server
    gateway: Server


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    request: Request
    result: Answer | Left | None = None
    failure: str = ""

    @property
    def shared_wrongly(self) -> bool:
        """Whether something came from the cache that nobody with this salt had put there."""
        return self.request.must_miss and isinstance(self.result, Answer) and bool(self.result.cached_tokens)


class Memory(NamedTuple):
    """Resident bytes of an engine's processes, means."""

    first_third: float
    last_third: float


@dataclass(frozen=True)
class Driven:
    """Everything seen of one engine while and after the traffic ran."""

    name: str
    seconds: float
    outcomes: Sequence[Outcome]
    memory: Memory
    counted: Mapping[str, int]
    leftovers: Mapping[str, float | None]  # what should have been zero in the end; None: not to be had
    log_lines: Sequence[str]  # that speak of an error


async def drive_all(subjects: Sequence[Subject], traffic: Traffic, seconds: float) -> list[Driven]:
    """The same stream of requests on every engine, side by side."""
    return list(await asyncio.gather(*(drive(subject, traffic, seconds) for subject in subjects)))


async def drive(subject: Subject, traffic: Traffic, seconds: float) -> Driven:
    """Send `traffic` for `seconds`, then wait until the engine holds nothing."""
    servers = (subject.engine, subject.gateway)
    log_sizes = [server.log.stat().st_size for server in servers]
    began = time.monotonic()
    numbers = itertools.count()
    outcomes: list[Outcome] = []
    async with open_client(REQUEST_SECONDS) as client:
        before = await counters(client, subject)

        async def sender() -> None:
            while time.monotonic() < began + seconds and subject.engine.process.poll() is None:
                event = traffic.event(next(numbers))
                if event.at_once:
                    outcomes.extend(await asyncio.gather(*(one(client, subject, it) for it in event.requests)))
                else:
                    for request in event.requests:
                        outcomes.append(await one(client, subject, request))

        samples: list[int] = []
        watching = asyncio.create_task(watch(subject.engine, samples))
        await asyncio.gather(*(sender() for _ in range(PARALLEL)))
        watching.cancel()
        leftovers = await settled(client, subject)
        after = await counters(client, subject)
    third = max(1, len(samples) // 3)
    return Driven(
        name=subject.name,
        seconds=time.monotonic() - began,
        outcomes=outcomes,
        memory=Memory(*(sum(part) / third for part in (samples[:third], samples[-third:]))),
        counted={name: int(after[name] - before[name]) for name in COUNTED},
        leftovers=leftovers,
        log_lines=[line for server, size in zip(servers, log_sizes, strict=True) for line in bad_lines(server, size)],
    )


async def one(client: httpx.AsyncClient, subject: Subject, request: Request) -> Outcome:
    """Send one request where it belongs."""
    url = (subject.gateway if request.through_gateway else subject.engine).url
    try:
        answer = await send(client, url, request.path, request.body, request.leave)
    except (RuntimeError, httpx.HTTPError, ValueError, LookupError) as error:
        return Outcome(request, failure=f"{type(error).__name__}: {error}")
    if isinstance(answer, Answer) and not request.judged:
        answer = answer._replace(steps=())  # hours of them would fill the memory
    return Outcome(request, answer)


async def watch(server: Server, samples: list[int]) -> None:
    """Append the resident bytes of a server's processes to `samples` until cancelled."""
    while True:
        samples.append(resident_bytes(server.process.pid))
        await asyncio.sleep(SAMPLE_SECONDS)


def resident_bytes(group: int) -> int:
    """Of all processes of a process group, shared pages counted for each. 0 where /proc does not tell."""
    pages = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) == group:
                pages += int((process / "statm").read_text().split()[1])
        except OSError:
            continue  # it has ended meanwhile
    return pages * os.sysconf("SC_PAGE_SIZE")


async def settled(client: httpx.AsyncClient, subject: Subject) -> Mapping[str, float | None]:
    """What should be zero and is not for `SETTLE_SECONDS`, None where nothing answers; empty when all is well."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        engine, gateway = await samples_of(client, subject.engine), await samples_of(client, subject.gateway)
        values = {name: engine.get(name) for name in ENGINE_ZEROS} | {name: gateway.get(name) for name in GATEWAY_ZEROS}
        leftovers = {name: value for name, value in values.items() if value != 0}
        if not leftovers or time.monotonic() > deadline:
            return leftovers
        await asyncio.sleep(0.2)


async def counters(client: httpx.AsyncClient, subject: Subject) -> Mapping[str, float]:
    """The engine's counters that tell whether the traffic has reached the corners."""
    found = await samples_of(client, subject.engine)
    return {name: found[metric] for name, metric in COUNTED.items()}


def bad_lines(server: Server, offset: int) -> list[str]:
    """Lines of the log after byte `offset` that speak of an error."""
    with server.log.open("rb") as log:
        log.seek(offset)
        lines = log.read().decode(errors="replace").splitlines()
    return [f"{server.name}: {line}" for line in lines if _BAD_LINE.search(line)]
