"""`seamark bench gateway`: what a request costs in the gateway, beside the gateways of others and none at all.

All stand before one worker without an engine and take turns. Chats share their system prompt and history and end in a
question of their own, so Seamark finds the boundaries in its memory, sends them on and accounts for every answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from proxy.bench.client import open_client
from proxy.bench.cpu_time import CpuTime
from proxy.bench.engines import Fleet, Server
from proxy.bench.gateway_rows import (
    CASES,
    DIRECT,
    SEAMARK,
    SMALL,
    Batch,
    Case,
    Report,
    Row,
    as_json,
    render,
    targets,
)
from proxy.bench.load import connect, request, send_all
from proxy.bench.mock_worker import MODEL
from proxy.bench.peers import PEERS, VLLM_ROUTER, Peer, start
from proxy.bench.progress import narrator
from proxy.bench.prompts import prose
from proxy.bench.samples import samples_of

REQUESTS, ROUNDS = 400, 5
LARGE_SHARE = 4  # of large chats only that part of the requests is sent
SLOW_SHARE = 10  # and to the slowest peer
SLOW = "litellm"
WARM_UP = 20  # requests of each kind
HISTORY = 20  # messages of a large chat behind its system prompt
BYTES_PER_WORD = 6
WORDS = (
    "CPU: microseconds of all the gateway's processes for a request, user and system; median of rounds, quartiles.\n"
    "Latencies: what the gateway adds to a round's p50, p99 and median first byte, medians of the rounds (direct: the\n"
    "worker's own, in brackets). over vllm-router: CPU time, median of the rounds' ratios. One worker that computes\n"
    "nothing; streams have 64 chunks, each written on its own, at once unless --step-ms says otherwise: a slow reader\n"
    "finds many together. Both routers run their default, cache-aware policy.\n"
    "sglang-router holds back a stream's beginning at one client, by Nagle's algorithm."
)


@dataclass
class Contestant:
    """A gateway under measurement, or none: `direct`."""

    name: str
    server: Server
    cpu: CpuTime | None
    share: int = 1  # it gets one of so many requests
    batches: dict[Case, list[Batch]] = field(default_factory=dict)
    failure: str = ""  # why it was given up

    async def measure(self, case: Case, bodies: Sequence[bytes]) -> Batch:
        """One batch. Every connection has answered a request before it starts."""
        url = self.server.url
        requests = [request(url, body) for body in bodies]
        clients = [await connect(url) for _ in range(case.clients)]
        try:
            for client, first in zip(clients, requests, strict=False):
                await client.ask(first)
            before = await self.cpu.settled() if self.cpu is not None else 0.0
            samples = await send_all(clients, requests[case.clients :])
            used = await self.cpu.settled() - before if self.cpu is not None else None
        finally:
            for client in clients:
                client.close()
        return Batch(
            used / len(samples) if used is not None else None,
            statistics.median(sample.last for sample in samples),
            percentile([sample.last for sample in samples], 0.99),
            statistics.median(sample.first for sample in samples),
        )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def chats(case: Case) -> Iterator[bytes]:
    """Bodies of about the case's size, alike but for their last question, for ever."""
    parts = 1 if case.size == SMALL else HISTORY + 1
    words = (case.size - 150) // parts // BYTES_PER_WORD
    texts = [prose(words, seed=case.size + part) for part in range(parts)]
    messages = [{"role": "system", "content": texts[0]}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts[1:])]
    for number in itertools.count():
        question = {"role": "user", "content": f"{number}: what has changed since the last report?"}
        body = {"model": MODEL, "messages": [*messages, question], "max_tokens": 64}
        if case.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        yield json.dumps(body).encode()


async def compare(
    contestants: Sequence[Contestant], cases: Sequence[Case], requests: int, rounds: int, say: Callable[[str], None]
) -> None:
    """`rounds` batches of every case for every contestant, the order turned on from round to round."""
    bodies = {case: chats(case) for case in cases}
    for number in range(-1, rounds):  # the first warms up
        say("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        for case in cases:
            wanted = requests // (1 if case.size == SMALL else LARGE_SHARE)
            turn = max(number, 0) % len(contestants)
            for contestant in [*contestants[turn:], *contestants[:turn]]:
                if contestant.failure:
                    continue
                count = WARM_UP if number < 0 else max(1, wanted // contestant.share)
                taken = list(itertools.islice(bodies[case], case.clients + max(count, case.clients)))
                try:
                    batch = await contestant.measure(case, taken)
                except (RuntimeError, OSError) as error:  # ended, too slow, or never at rest
                    if contestant.name in (DIRECT, SEAMARK):
                        raise
                    contestant.failure = f"{case}: {error or type(error).__name__}"
                    say(f"{contestant.name} is given up: {contestant.failure}")
                    continue
                if number >= 0:
                    contestant.batches.setdefault(case, []).append(batch)


async def run(
    peers: Sequence[Peer], cases: Sequence[Case], requests: int, rounds: int, step_ms: int, say: Callable[[str], None]
) -> Report:
    """Start everything, and compare; `step_ms` as the worker takes it."""
    with tempfile.TemporaryDirectory(prefix="seamark-gateway-") as folder, Fleet(Path(folder)) as fleet:
        worker = fleet.mock_worker(step_ms)
        worker.wait_until_ready()
        gateway = fleet.gateway(worker)
        gateway.wait_until_ready("/ready", seconds=30)
        contestants = [Contestant(DIRECT, worker, None), Contestant(SEAMARK, gateway, CpuTime(gateway.process.pid))]
        missing = {}
        for peer in peers:
            server, failure = start(fleet, peer, worker, Path(folder), say)[1:]
            if server is None:
                missing[peer.name] = failure
                continue
            share = SLOW_SHARE if peer.name == SLOW else 1
            contestants.append(Contestant(peer.name, server, CpuTime(server.process.pid), share))
        async with open_client(30) as client:
            before = await samples_of(client, gateway)
            await compare(contestants, cases, requests, rounds, say)
            after = await samples_of(client, gateway)
        missing |= {contestant.name: contestant.failure for contestant in contestants if contestant.failure}
        lasting = {contestant.name: contestant for contestant in contestants if not contestant.failure}
        grown = {name: after[name] - before[name] for name in ("seamark_renders_total", "seamark_requests_total")}
    rows = [_row(contestant, case, lasting) for case in cases for contestant in lasting.values()]
    return Report(tuple(rows), missing, grown["seamark_renders_total"], int(grown["seamark_requests_total"]))


def _row(contestant: Contestant, case: Case, lasting: dict[str, Contestant]) -> Row:
    router = lasting.get(VLLM_ROUTER)
    return Row(
        contestant.name,
        case,
        tuple(contestant.batches[case]),
        tuple(lasting[DIRECT].batches[case]),
        tuple(router.batches[case]) if router is not None else (),
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="seamark bench gateway", description="CPU time and latency of the gateway, beside those of others"
    )
    names = {peer.name: peer for peer in PEERS}
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=f"in a batch ({REQUESTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"batches of each kind ({ROUNDS})")
    parser.add_argument("--peer", action="append", choices=names, help="only this one (repeat); default: all")
    parser.add_argument("--no-peers", action="store_true", help="Seamark alone; no target beside others is judged")
    parser.add_argument("--size", type=int, choices=sorted({case.size for case in CASES}), help="of chats, only this")
    parser.add_argument(
        "--step-ms", type=int, default=0, metavar="N", help="from chunk to chunk of a stream (0: as fast as written)"
    )
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.requests < 1 or args.rounds < 1:
        parser.error("--requests, --rounds: at least 1")
    peers = [] if args.no_peers else [names[name] for name in dict.fromkeys(args.peer or names)]
    cases = [case for case in CASES if args.size in (None, case.size)]
    report = uvloop.run(run(peers, cases, args.requests, args.rounds, args.step_ms, narrator()))
    judged = targets(report, with_router=VLLM_ROUTER in (peer.name for peer in peers))
    if args.json:
        print(json.dumps(as_json(report, judged), indent=1))
    else:
        print("\n".join([render(report), *(target.told() for target in judged), "", WORDS]))
    return 0 if all(target.held for target in judged) else 1
