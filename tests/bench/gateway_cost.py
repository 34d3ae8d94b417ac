"""`python -m tests.bench.gateway_cost`: what a request costs in the gateway, beside other gateways and beside none.

All stand before one worker without an engine and take turns. Chats share their system prompt and history and end in a
question of their own, so Seamark finds the boundaries in its memory, sends them on and accounts for every answer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import uvloop

from proxy.bench.harness.client import open_client, prose
from proxy.bench.harness.servers import Server, Servers, narrator
from tests.bench.peers import PEERS, VLLM_ROUTER, Peer, start, start_bare
from tests.harness.counters import samples_of
from tests.harness.load import CpuTime, connect, request, send_all
from tests.harness.mock_worker import MISS_FIELD, MODEL, STEP_FIELD, mock_worker

REQUESTS, ROUNDS = 400, 5

DIRECT, SEAMARK = "direct", "seamark"

BARE = "bare aiohttp"  # passes on, and does nothing else: what any gateway in Python takes

SMALL, LARGE = 2_000, 200_000  # bytes of a chat

ONE, MANY = 1, 16  # clients

PLAIN_LIMIT, STREAM_LIMIT, PACED_LIMIT = 1.5, 0.9, 1.4  # times vllm-router's CPU time, 2 kB, many clients

MISS_LIMIT = 1.3  # times a hit's CPU time

FIGURES = ("p50", "p99", "first")  # of a batch

ADDED_LIMIT = 0.4e-3  # seconds, p50, 2 kB plain, one client

WORDS = """
CPU: microseconds of all the gateway's processes for a request, user and system; median of rounds, quartiles.
Latencies: what the gateway adds to a round's p50, p99 and median first byte, medians of the rounds (direct: the
worker's own, in brackets). over vllm-router: CPU time, median of the rounds' ratios. One worker that computes nothing;
streams have 64 chunks, each written on its own. Both routers run their default, cache-aware policy."""


class Case(NamedTuple):
    """A kind of traffic."""

    size: int  # bytes of a chat
    streamed: bool
    clients: int  # at once
    step_ms: int = 0  # between two chunks of a stream
    misses: bool = False  # the system prompt begins anew in each, and nothing is cached

    def __str__(self) -> str:
        kind = "stream" if self.streamed else "plain"
        kind += f" with a chunk each {self.step_ms} ms" if self.step_ms else ""
        kind += ", misses" if self.misses else ""
        return f"{self.size // 1000} kB, {kind}, {self.clients} client{'s' if self.clients > 1 else ''}"


CASES = (
    *(Case(size, streamed, n) for size in (SMALL, LARGE) for streamed in (False, True) for n in (ONE, MANY)),
    Case(SMALL, True, MANY, step_ms=1),
    Case(SMALL, False, MANY, misses=True),
)


class Batch(NamedTuple):
    """Requests that one gateway was sent in one round; seconds."""

    cpu: float | None  # of all its processes, for each request; None: there is no gateway
    p50: float  # from sent to the answer's end
    p99: float
    first: float  # to the first byte of the answer's body, median


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


@dataclass(frozen=True)
class Report:
    """A whole run; of all batches of a case, those of one round stand at one place."""

    batches: Mapping[str, Mapping[Case, Sequence[Batch]]]  # by gateway
    missing: Mapping[str, str]  # why a gateway has none, by its name
    renders: float  # asked of the worker by Seamark during its batches
    requests: float  # of these batches

    def cpu(self, name: str, case: Case) -> list[float]:
        """CPU seconds of a gateway for a request: the quartiles."""
        seconds = [batch.cpu for batch in self.batches[name][case]]
        return statistics.quantiles(seconds * (2 if len(seconds) == 1 else 1), n=4, method="inclusive")

    def added(self, name: str, case: Case, figure: str) -> float:
        """Seconds that it adds to that figure of a batch, median of the rounds."""
        pairs = zip(self.batches[name][case], self.batches[DIRECT][case], strict=True)
        return statistics.median(getattr(own, figure) - getattr(other, figure) for own, other in pairs)

    def ratio(self, name: str, case: Case) -> float | None:
        """Its CPU time over vllm-router's, median of the rounds; None where that one does not run."""
        if VLLM_ROUTER not in self.batches:
            return None
        pairs = zip(self.batches[name][case], self.batches[VLLM_ROUTER][case], strict=True)
        return statistics.median(own.cpu / other.cpu for own, other in pairs)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of all do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def chats(case: Case) -> Iterator[bytes]:
    """Bodies of about the case's size, for ever, alike but for their last question, and misses for a number ahead."""
    parts = 1 if case.size == SMALL else 21  # its system prompt and a history
    words = (case.size - 150) // parts // 6  # bytes a word
    texts = [prose(words, seed=case.size + part) for part in range(parts)]
    messages = [{"role": "system", "content": texts[0]}]
    messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts[1:])]
    for number in itertools.count():
        question = {"role": "user", "content": f"{number}: what has changed since the last report?"}
        body = {"model": MODEL, "messages": [*messages, question], "max_tokens": 64}
        if case.misses:
            body["messages"][0] = {"role": "system", "content": f"Report {number}. {texts[0]}"}
            body[MISS_FIELD] = True
        if case.streamed:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if case.step_ms:
            body[STEP_FIELD] = case.step_ms
        yield json.dumps(body).encode()


async def compare(
    contestants: Sequence[Contestant], cases: Sequence[Case], requests: int, rounds: int, say: Callable[[str], None]
) -> None:
    """`rounds` batches of every case for every contestant, the order turned on from round to round."""
    bodies = {case: chats(case) for case in cases}
    for number in range(-1, rounds):  # the first warms up
        say("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        for case in cases:
            wanted = requests // (1 if case.size == SMALL else 4)
            turn = max(number, 0) % len(contestants)
            for contestant in [*contestants[turn:], *contestants[:turn]]:
                if contestant.failure:
                    continue
                count = 20 if number < 0 else max(1, wanted // contestant.share)  # to warm up
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
    peers: Sequence[Peer], cases: Sequence[Case], requests: int, rounds: int, say: Callable[[str], None]
) -> Report:
    """Start everything, and compare."""
    with tempfile.TemporaryDirectory(prefix="seamark-gateway-") as folder, Servers(Path(folder)) as servers:
        worker = mock_worker(servers)
        worker.wait_until_ready()
        gateway = servers.gateway(worker)
        gateway.wait_until_ready("/ready", seconds=30)
        bare = start_bare(servers, worker.url)
        bare.wait_until_ready("/health", seconds=30)
        found = {SEAMARK: gateway, BARE: bare}
        missing = {}
        for peer in peers:
            started = start(servers, peer, worker.url, Path(folder), say)
            if isinstance(started, str):
                missing[peer.name] = started
            else:
                found[peer.name] = started
        contestants = [Contestant(DIRECT, worker, None)]
        for name, server in found.items():
            share = 10 if name == "litellm" else 1  # by far the slowest
            contestants.append(Contestant(name, server, CpuTime(server.process.pid), share))
        async with open_client(30) as client:
            before = await samples_of(client, gateway)
            await compare(contestants, cases, requests, rounds, say)
            after = await samples_of(client, gateway)
    missing |= {each.name: each.failure for each in contestants if each.failure}
    renders, asked = (after[name] - before[name] for name in ("seamark_renders_total", "seamark_requests_total"))
    lasting = {each.name: each.batches for each in contestants if not each.failure}
    return Report(lasting, missing, renders, asked)


def verdicts(report: Report, beside_router: bool) -> list[str]:
    """What our gateway had to reach, a line each; those that begin with NOT HELD were missed or could not be taken."""
    many, few = Case(SMALL, False, MANY), Case(SMALL, False, ONE)
    hit, miss = (report.cpu(SEAMARK, each)[1] for each in (many, many._replace(misses=True)))
    taken = [
        (f"added p50 in ms, {few}", 1000 * report.added(SEAMARK, few, "p50"), 1000 * ADDED_LIMIT),
        ("CPU of a miss over that of a hit", miss / hit, MISS_LIMIT),
    ]
    if beside_router:
        stream = many._replace(streamed=True)
        for case, limit in ((many, PLAIN_LIMIT), (stream, STREAM_LIMIT), (stream._replace(step_ms=1), PACED_LIMIT)):
            taken.append((f"CPU over {VLLM_ROUTER}, {case}", report.ratio(SEAMARK, case), limit))
    return [
        f"{'held' if value is not None and value <= limit else 'NOT HELD'}: {name}: "
        f"{'not taken' if value is None else f'{value:.2f}'}, at most {limit:g} wanted"
        for name, value, limit in taken
    ]


def render(report: Report) -> str:
    """A block for each kind of traffic."""
    lines = []
    for case in report.batches[DIRECT]:
        lines += [
            f"{case} (latencies in ms, added to the worker's own)",
            f"  {'gateway':<15}{'CPU us':>8}  {'quartiles':<16}{'added p50':>10}{'p99':>9}{'first byte':>12}  over",
        ]
        for name, batches in report.batches.items():
            if name == DIRECT:
                middle = [statistics.median(getattr(batch, figure) for batch in batches[case]) for figure in FIGURES]
                latencies, cpu, quartiles, ratio = [f"({1000 * each:.2f})" for each in middle], "", "", None
            else:
                latencies = [f"{1000 * report.added(name, case, figure):+.2f}" for figure in FIGURES]
                lower, cpu, upper = (f"{1e6 * seconds:.0f}" for seconds in report.cpu(name, case))
                quartiles, ratio = f"{lower}..{upper}", report.ratio(name, case)
            p50, p99, first = latencies
            over = f"  {ratio:.2f}" if ratio is not None else ""
            lines.append(f"  {name:<15}{cpu:>8}  {quartiles:<16}{p50:>10}{p99:>9}{first:>12}{over}")
        lines += [*(f"  {name:<15} is missing: {why}" for name, why in report.missing.items()), ""]
    return "\n".join([*lines, f"seamark asked for {report.renders:.0f} renders in {report.requests:.0f} requests"])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.gateway_cost",
        description="CPU time and latency of the gateway, beside those of others",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=f"in a batch ({REQUESTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"batches of each kind ({ROUNDS})")
    parser.add_argument("--no-peers", action="store_true", help="no target beside others is judged")
    args = parser.parse_args(argv)
    peers = () if args.no_peers else PEERS
    report = uvloop.run(run(peers, CASES, args.requests, args.rounds, narrator()))
    judged = verdicts(report, beside_router=bool(peers))
    print(render(report), *judged, WORDS, sep="\n")
    return 1 if any(each.startswith("NOT HELD") for each in judged) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
