"""`python -m tests.bench.redis_limit`: Redis at the documented limit, 64 workers' streams and 16 gateways.

First each stream is filled up: memory has to stay within the chart's bound, with nothing thrown out. Then 16
gateways' own tables exchange through it what 64 workers tell: CPU of Redis and of a gateway, and how late what one has
learnt is known to all. Exit status 1 if a stream was evicted, a record lost, or the last one came late.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import redis

from proxy.bench.harness.counters import CpuTime
from proxy.bench.harness.servers import narrator
from proxy.boundaries.boundary import Boundary
from proxy.boundaries.positions import PositionCache
from proxy.chat.responses import StoredResponses
from proxy.idle_work import IdleWork
from proxy.metrics import Metrics
from proxy.routing import redis_sync
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.redis_sync import RedisSync
from tests.harness.redis_server import redis_server

WORKERS, GATEWAYS = 64, 16

PROCESSES = 2  # that the gateways share

REQUESTS_PER_SECOND = 2.0  # of each worker

RECORDS = 5  # of a request

SECONDS = 30.0

TABLE_BYTES = 2**26

KNOWN_WITHIN = 2.0  # seconds, on a machine on which all gateways share two cores; alone, some 0.2 and an exchange

CHART_VALUES = Path("deploy/helm/seamark/values.yaml")

BOOTS = [f"boot-{number}" for number in range(WORKERS)]


def room() -> int:
    """Bytes that the chart gives Redis."""
    found = re.search(r"maxmemory: (\d+)mb", CHART_VALUES.read_text())
    assert found is not None
    return int(found[1]) * 2**20


def fill(client: redis.Redis) -> tuple[int, int]:
    """Every worker's stream, and that of positions, as large as it gets: bytes used, keys evicted."""
    for form, stream in [
        (redis_sync.POSITIONS, redis_sync.POSITIONS_STREAM),
        *((redis_sync.HOLDINGS, redis_sync.holdings_stream(boot)) for boot in BOOTS),
    ]:
        record = (bytes(16), 9) if form is redis_sync.POSITIONS else (redis_sync.HELD, bytes(16), 9)
        entry = redis_sync.pack(form, b"w" * 8, [record] * redis_sync.MAX_RECORDS)
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(redis_sync.STREAM_ENTRIES + 200):
                pipeline.xadd(stream, {"n": entry}, maxlen=redis_sync.STREAM_ENTRIES, approximate=True)
            pipeline.expire(stream, redis_sync.STREAM_SECONDS)
            pipeline.execute()
    return int(client.info("memory")["used_memory"]), int(client.info("stats")["evicted_keys"])


class Tables:
    """What one gateway knows, and its share in Redis."""

    def __init__(self, url: str) -> None:
        self.index, self.metrics = PrefixIndex(TABLE_BYTES), Metrics()
        self.sync = RedisSync(
            url, self.index, PositionCache(TABLE_BYTES), StoredResponses(0), self.metrics, IdleWork(), lambda: BOOTS
        )

    def learn(self, number: int) -> None:
        """A worker's engine has told that it holds a prefix."""
        key, boot = number.to_bytes(16, "little"), BOOTS[number % WORKERS]
        self.index.record([Boundary("system", key, 100, 100)], boot)
        self.index.set_held(key, boot, 100)

    def knows(self, number: int) -> bool:
        boot = BOOTS[number % WORKERS]
        return boot in self.index.longest([number.to_bytes(16, "little")], [boot])

    def count(self, fate: str) -> float:
        return self.metrics.registry.get_sample_value("seamark_redis_news_total", {"fate": fate}) or 0.0


async def _exchange(url: str, first: int, rate: float, seconds: float, pipe: Connection) -> None:
    """Some of the gateways, in a process: each learns `rate` records a second."""
    tables = [Tables(url) for _ in range(GATEWAYS // PROCESSES)]
    tasks = [asyncio.create_task(each.sync.run()) for each in tables]
    loop = asyncio.get_running_loop()
    pipe.send("ready")
    await loop.run_in_executor(None, pipe.recv)
    used, began, learnt = time.process_time(), time.monotonic(), 0
    while (now := time.monotonic() - began) < seconds:
        for number in range(learnt, int(now * rate)):
            for at, each in enumerate(tables):
                each.learn((number * GATEWAYS + first + at) * WORKERS + number % WORKERS)
        learnt = max(learnt, int(now * rate))
        await asyncio.sleep(0.01)
    used = time.process_time() - used
    pipe.send((used, learnt))
    everything = await loop.run_in_executor(None, pipe.recv)  # how many each of all has learnt
    deadline = time.monotonic() + 60
    wanted = [(at, number) for at, count in enumerate(everything) for number in range(count)]
    ended = time.monotonic()
    for at, number in wanted:
        for each in tables:
            while not each.knows((number * GATEWAYS + at) * WORKERS + number % WORKERS):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.005)
    late = time.monotonic() - ended
    missing = sum(
        not each.knows((number * GATEWAYS + at) * WORKERS + number % WORKERS)
        for at, number in wanted
        for each in tables
    )
    pipe.send((late, missing, sum(each.count("dropped") + each.count("refused") for each in tables)))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _gateways(url: str, first: int, rate: float, seconds: float, pipe: Connection) -> None:
    asyncio.run(_exchange(url, first, rate, seconds, pipe))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.redis_limit", description="Redis at its limit")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help=f"of exchange ({SECONDS:.0f})")
    parser.add_argument(
        "--rate", type=float, default=REQUESTS_PER_SECOND, metavar="X", help="requests a second and worker (2)"
    )
    args = parser.parse_args(argv)
    say, wrong = narrator(), []
    with redis_server() as server, redis.Redis.from_url(server.url) as client:
        client.config_set("maxmemory", room())
        client.config_set("maxmemory-policy", "volatile-ttl")
        say(f"filling {WORKERS + 1} streams")
        used, evicted = fill(client)
        print(f"{WORKERS + 1} full streams: {used / 2**20:.0f} of {room() / 2**20:.0f} MiB, {evicted} evicted")
        if evicted or used > room():
            wrong.append("the streams of 64 workers do not fit")
        client.flushall()
        say(f"{GATEWAYS} gateways for {args.seconds:.0f} s")
        records = args.rate * WORKERS * RECORDS
        context = get_context("spawn")
        pipes, processes = [], []
        for part in range(PROCESSES):
            here, there = context.Pipe()
            own = (server.url, part * GATEWAYS // PROCESSES, records / GATEWAYS, args.seconds, there)
            processes.append(context.Process(target=_gateways, args=own, daemon=True))
            processes[-1].start()
            pipes.append(here)
        for pipe in pipes:
            pipe.recv()
        cpu = CpuTime(server.pid)
        before = cpu.seconds()
        for pipe in pipes:
            pipe.send("go")
        ends = [pipe.recv() for pipe in pipes]
        of_redis = (cpu.seconds() - before) / args.seconds
        learnt = [count for _, count in ends for _ in range(GATEWAYS // PROCESSES)]
        for pipe in pipes:
            pipe.send(learnt)
        ends_of = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    of_gateway = sum(used for used, _ in ends) / GATEWAYS / args.seconds
    late, missing, lost = max(each[0] for each in ends_of), sum(e[1] for e in ends_of), sum(e[2] for e in ends_of)
    print(f"{GATEWAYS} gateways, {WORKERS} workers, {sum(learnt) / args.seconds:.0f} records a second:")
    print(f"Redis {of_redis:.1%} of a core, a gateway {of_gateway:.1%}")
    print(f"all known {late:.2f} s after the last was learnt, {missing:.0f} missing, {lost:.0f} dropped or refused")
    if missing or lost:
        wrong.append(f"{missing:.0f} records missing, {lost:.0f} dropped or refused")
    if late > KNOWN_WITHIN:
        wrong.append(f"the last record came {late:.2f} s late")
    for each in wrong:
        print(f"NOT SO: {each}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
