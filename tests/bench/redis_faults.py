"""`python -m tests.bench.redis_faults`: what Redis costs, and what one costs that is slow, frozen, full or dead.

A gateway with Redis and one without stand before the same worker without an engine and get the same requests in turn.
Redis is slowed, frozen, filled and killed in the middle of a run. Exit status 1 if a request failed, if the 99th
percentile grew by more than `MOST_ADDED`, or if the gateway did not notice what was done to its Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import status_of
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.servers import Server, Servers, narrator
from proxy.chat.chat import CHAT
from tests.harness.mock_worker import MODEL, mock_worker
from tests.harness.redis_server import LateWay, RedisServer, late_way, redis_server

MOST_ADDED = 2e-3  # seconds, to the 99th percentile

LATE_SECONDS = 0.2  # every answer of a slow Redis

PAIRS = 2000

CLIENTS = 4

PROMPT_WORDS = 300

# One request in so many has a new prefix: it is rendered, and there is news.
NEW_PREFIX_EVERY = 4

NOTICED_SECONDS = 20.0

WARM_UP_PAIRS = 40


class Quantiles(NamedTuple):
    """Seconds from a request to the end of its answer."""

    p50: float
    p99: float


@dataclass(frozen=True)
class Phase:
    """Requests while something was done to Redis."""

    name: str
    requests: int  # to each gateway
    failed: int  # of those through the gateway with Redis
    failed_without: int
    with_redis: Quantiles
    without: Quantiles
    noticed: bool  # the gateway said of its Redis what was true

    @property
    def added(self) -> Quantiles:
        """Seconds more with Redis than without."""
        return Quantiles(self.with_redis.p50 - self.without.p50, self.with_redis.p99 - self.without.p99)

    @property
    def held(self) -> bool:
        """Whether Redis cost no request, and none much time."""
        return not self.failed and self.noticed and self.added.p99 <= MOST_ADDED


@dataclass
class Taken:
    """What requests through one gateway took, seconds, and how many failed."""

    seconds: list[float]
    failed: int = 0

    def quantiles(self) -> Quantiles:
        """Quantiles of the answered requests."""
        cuts = statistics.quantiles(self.seconds, n=100) if len(self.seconds) > 1 else [float("inf")] * 99
        return Quantiles(cuts[49], cuts[98])


async def send(client: httpx.AsyncClient, gateway: Server, raw: bytes, taken: Taken) -> None:
    """One request; it fails if its answer is not a 200 with a hint sent."""
    began = time.perf_counter()
    try:
        answer = await client.post(gateway.url + CHAT, content=raw)
    except httpx.HTTPError:
        taken.failed += 1
        return
    if answer.status_code == 200 and "x-seamark-boundary" in answer.headers:
        taken.seconds.append(time.perf_counter() - began)
    else:
        taken.failed += 1


def body(name: str, number: int) -> bytes:
    """Request `number` of the phase `name`."""
    system = f"{name} {number // NEW_PREFIX_EVERY}. {prose(PROMPT_WORDS, seed=1)}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Question {number}?"}]
    return json.dumps({"model": MODEL, "messages": messages}).encode()


async def run_phase(
    client: httpx.AsyncClient,
    name: str,
    gateways: tuple[Server, Server],  # with Redis, and without
    pairs: int,
    harm: Callable[[], None] | None = None,
) -> Phase:
    """`pairs` requests to each gateway, in turn; after a quarter of them `harm` is done to Redis.

    If by the end the gateway has not noticed the harm, requests go on until it has.
    """
    taken = (Taken([]), Taken([]))
    expected = "up" if harm is None else "down"
    count, stop, noticed = 0, False, asyncio.Event()

    async def drive() -> None:
        nonlocal count
        while not stop and (count < pairs or not noticed.is_set()):
            raw, order = body(name, count), (0, 1) if count % 2 else (1, 0)
            count += 1
            for side in order:
                await send(client, gateways[side], raw, taken[side])

    async def harm_and_watch() -> None:
        nonlocal stop
        while count < pairs // 4:
            await asyncio.sleep(0.001)
        if harm is not None:
            harm()
        deadline = time.monotonic() + NOTICED_SECONDS
        while not noticed.is_set() and time.monotonic() < deadline:
            if await state_of_redis(client, gateways[0]) == expected:
                noticed.set()
            await asyncio.sleep(0.05)
        stop = not noticed.is_set()

    await asyncio.gather(harm_and_watch(), *(drive() for _ in range(CLIENTS)))
    ours, plain = taken
    return Phase(name, count, ours.failed, plain.failed, ours.quantiles(), plain.quantiles(), noticed.is_set())


async def state_of_redis(client: httpx.AsyncClient, gateway: Server) -> str:
    """The state that the gateway reports."""
    return (await status_of(client, gateway.url))["redis"]["state"]


async def measure(
    servers: Servers, redis: RedisServer, way: LateWay, pairs: int, say: Callable[[str], None]
) -> list[Phase]:
    """All phases, one after the other."""
    say("starting a worker without an engine and three gateways")
    worker = mock_worker(servers)
    worker.wait_until_ready(seconds=30)
    plain = servers.gateway(worker)
    direct, by_way = (servers.gateway(worker, flags=("--redis", url)) for url in (redis.url, way.url))
    for gateway in (plain, direct, by_way):
        gateway.wait_until_ready("/ready", seconds=60)
    phases: list[Phase] = []

    async def phase(name: str, gateway: Server, harm: Callable[[], None] | None = None) -> None:
        say(name)
        await run_phase(client, f"{name} (warm-up)", (gateway, plain), WARM_UP_PAIRS)
        phases.append(await run_phase(client, name, (gateway, plain), pairs, harm))

    # Connections are kept, for a shorter time than a gateway keeps them.
    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(keepalive_expiry=2)) as client:
        await phase("healthy", direct)
        await phase("slow", by_way, lambda: setattr(way, "seconds", LATE_SECONDS))
        await phase("frozen", direct, redis.freeze)
        redis.thaw()  # what warms the next phase up waits until it is noticed
        await phase("full", direct, redis.fill)
        redis.make_room()
        await phase("killed", direct, redis.kill)
    return phases


def render(phases: Sequence[Phase]) -> str:
    """One line per phase."""
    lines = ["Redis      requests   failed   p50 ms (added)       p99 ms (added)"]
    for phase in phases:
        figures = zip(phase.with_redis, phase.added, strict=True)
        p50, p99 = (f"{1e3 * seconds:.2f} ({1e3 * added:+.2f})" for seconds, added in figures)
        mark = "" if phase.held else "   NOT HELD" + ("" if phase.noticed else ", not noticed")
        lines.append(f"{phase.name:<11}{phase.requests:>8}{phase.failed:>9}   {p50:<21}{p99}{mark}")
    lines.append(f"added: over a gateway without Redis, side by side; at most {MOST_ADDED * 1e3:.0f} ms to p99 wanted")
    return "\n".join(lines)


def report(phases: Sequence[Phase]) -> dict[str, Any]:
    """For machines; seconds."""
    rows = [
        {
            **asdict(phase),
            "with_redis": phase.with_redis._asdict(),
            "without": phase.without._asdict(),
            "added": phase.added._asdict(),
            "held": phase.held,
        }
        for phase in phases
    ]
    return {"held": all(phase.held for phase in phases), "limit": MOST_ADDED, "phases": rows}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.redis_faults", description="what sharing through Redis costs requests"
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"of requests in each phase ({PAIRS})")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.pairs < 8:
        parser.error("--pairs: at least 8")
    say = narrator()
    with (
        tempfile.TemporaryDirectory(prefix="seamark-redis-") as folder,
        redis_server() as redis,
        late_way(redis.port) as way,
        Servers(Path(folder)) as servers,
    ):
        phases = asyncio.run(measure(servers, redis, way, args.pairs, say))
    print(json.dumps(report(phases), indent=1) if args.json else render(phases))
    return 0 if all(phase.held for phase in phases) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
