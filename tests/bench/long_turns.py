"""`python -m tests.bench.long_turns`: agents' turns of 50,000 to 100,000 tokens that one core passes on a second.

Ours and others' gateways stand before one worker without an engine and take turns. A batch is some agents at once, each
with a conversation of its own that no gateway has seen: its first request is cold, each later one repeats all messages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from proxy.bench.harness.counters import CpuTime
from proxy.bench.harness.ratios import Spread, spread
from proxy.bench.harness.servers import Server, Servers, narrator
from tests.bench.gateway_cost import DIRECT, SEAMARK, gateway_of
from tests.bench.long_chats import conversation
from tests.bench.peers import Peer, add_peer_flags, chosen_peers, start
from tests.harness.load import ANSWER_SECONDS, Sample, connect, request
from tests.harness.mock_worker import mock_worker

SIZES = range(50_000, 100_001, 2_000)  # tokens of an agent's turns

AGENTS, ROUNDS = 4, 5

PLAIN, STREAM = "plain", "stream"

WORDS = (
    "CPU: milliseconds of all the gateway's processes for a request, user and system; median of rounds, quartiles.\n"
    "a second: requests on one core, 1 / CPU. added: median milliseconds to the whole answer beside the worker's own\n"
    "(direct: in brackets). One worker that computes nothing; streams have 64 chunks, each written on its own."
)


class Batch(NamedTuple):
    """What one gateway was sent in one round; seconds."""

    cpu: float | None  # of all its processes, for each request; None: there is no gateway
    p50: float  # from sent to the answer's end


@dataclass
class Contestant:
    """A gateway under measurement, or none: `direct`."""

    name: str
    server: Server
    cpu: CpuTime | None
    batches: dict[str, list[Batch]] = field(default_factory=lambda: {PLAIN: [], STREAM: []})
    failure: str = ""  # why it was given up

    async def measure(self, kind: str, conversations: Sequence[int], sizes: range) -> Batch:
        """One batch, an agent for each number of `conversations`. Raises `RuntimeError` or `OSError` where it fails."""
        before = await self.cpu.settled() if self.cpu is not None else 0.0
        agents = (self._agent(number, kind, sizes) for number in conversations)
        samples = [sample for each in await asyncio.gather(*agents) for sample in each]
        used = await self.cpu.settled() - before if self.cpu is not None else None
        cpu = used / len(samples) if used is not None else None
        return Batch(cpu, statistics.median(sample.last for sample in samples))

    async def _agent(self, number: int, kind: str, sizes: range) -> list[Sample]:
        client = await connect(self.server.url)
        try:
            return [
                await asyncio.wait_for(client.ask(request(self.server.url, body)), ANSWER_SECONDS)
                for body in conversation(number, sizes, kind == STREAM)
            ]
        finally:
            client.close()


class Row(NamedTuple):
    """One gateway, one kind of answers."""

    gateway: str
    kind: str
    cpu: Spread | None  # seconds for a request
    p50: float  # seconds beside the worker's own, median of the rounds; its own where there is no gateway

    @property
    def rate(self) -> float | None:
        """Requests a second on one core."""
        return 1 / self.cpu.median if self.cpu is not None else None


async def compare(
    contestants: Sequence[Contestant], agents: int, rounds: int, sizes: range, say: Callable[[str], None]
) -> None:
    """`rounds` batches of each kind for every contestant, the order turned on from round to round."""
    for number in range(-1, rounds):  # the first warms up
        say("warming up" if number < 0 else f"round {number + 1} of {rounds}")
        wanted = sizes if number >= 0 else sizes[:2]
        for kind in (PLAIN, STREAM):
            turn = max(number, 0) % len(contestants)
            for contestant in [*contestants[turn:], *contestants[:turn]]:
                if contestant.failure:
                    continue
                # The same conversations for each gateway; another round has others.
                numbers = range((number + 1) * agents, (number + 2) * agents)
                try:
                    batch = await contestant.measure(kind, numbers, wanted)
                except (RuntimeError, OSError) as error:  # ended, too slow, or never at rest
                    if contestant.name in (DIRECT, SEAMARK):
                        raise
                    contestant.failure = f"{kind}: {error or type(error).__name__}"
                    say(f"{contestant.name} is given up: {contestant.failure}")
                    continue
                if number >= 0:
                    contestant.batches[kind].append(batch)


async def run(
    peers: Sequence[Peer],
    checkouts: Sequence[Path],
    agents: int,
    rounds: int,
    sizes: range,
    say: Callable[[str], None],
) -> tuple[list[Row], dict[str, str]]:
    """Start everything, and compare: the rows, and why a gateway has none. Gateways of `checkouts` stand beside."""
    with tempfile.TemporaryDirectory(prefix="seamark-turns-") as folder, Servers(Path(folder)) as servers:
        worker = mock_worker(servers)
        worker.wait_until_ready()
        ours = {SEAMARK: servers.gateway(worker)}
        ours |= {str(checkout): gateway_of(servers, checkout, worker) for checkout in map(Path.resolve, checkouts)}
        contestants = [Contestant(DIRECT, worker, None)]
        for name, server in ours.items():
            server.wait_until_ready("/ready", seconds=30)
            contestants.append(Contestant(name, server, CpuTime(server.process.pid)))
        missing = {}
        for peer in peers:
            _, peer_server, failure = start(servers, peer, [worker.url], Path(folder), say)
            if peer_server is None:
                missing[peer.name] = failure
            else:
                contestants.append(Contestant(peer.name, peer_server, CpuTime(peer_server.process.pid)))
        await compare(contestants, agents, rounds, sizes, say)
    missing |= {contestant.name: contestant.failure for contestant in contestants if contestant.failure}
    lasting = [contestant for contestant in contestants if not contestant.failure]
    return [row_of(each, lasting[0], kind) for kind in (PLAIN, STREAM) for each in lasting], missing


def row_of(contestant: Contestant, direct: Contestant, kind: str) -> Row:
    """The figures of a contestant; `direct` is the worker without a gateway, in the same rounds."""
    batches, own = contestant.batches[kind], direct.batches[kind]
    if contestant.cpu is None:
        return Row(contestant.name, kind, None, statistics.median(batch.p50 for batch in batches))
    cpu = spread([batch.cpu for batch in batches if batch.cpu is not None])
    pairs = zip(batches, own, strict=True)
    return Row(contestant.name, kind, cpu, statistics.median(batch.p50 - other.p50 for batch, other in pairs))


def render(rows: Sequence[Row], missing: dict[str, str]) -> str:
    """A block for each kind of answers."""
    lines = []
    for kind in dict.fromkeys(row.kind for row in rows):
        lines.append(f"{kind:<40}{'CPU ms':>8}  {'quartiles':<16}{'a second':>9}{'added ms':>10}")
        lines += [_line(row) for row in rows if row.kind == kind]
        lines += [f"  {name} is missing: {why}" for name, why in missing.items()]
        lines.append("")
    return "\n".join(lines)


def _line(row: Row) -> str:
    if row.cpu is None or row.rate is None:
        own = f"({1000 * row.p50:.1f})"
        return f"  {row.gateway:<38}{'':>8}  {'':<16}{'':>9}{own:>10}"
    lower, median, upper = (1000 * seconds for seconds in row.cpu)
    quartiles = f"{lower:.2f}..{upper:.2f}"
    return f"  {row.gateway:<38}{median:>8.2f}  {quartiles:<16}{row.rate:>9.1f}{1000 * row.p50:>+10.1f}"


def as_json(rows: Sequence[Row], missing: dict[str, str]) -> dict[str, Any]:
    """Everything measured, for machines; seconds."""
    found = [
        row._asdict() | {"cpu": row.cpu._asdict() if row.cpu is not None else None, "rate": row.rate} for row in rows
    ]
    return {"rows": found, "missing": missing}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.long_turns",
        description="requests a second a core of agents' long turns, beside other gateways",
    )
    parser.add_argument("--agents", type=int, default=AGENTS, metavar="N", help=f"at once ({AGENTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"batches of each kind ({ROUNDS})")
    add_peer_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if args.agents < 1 or args.rounds < 1:
        parser.error("--agents, --rounds: at least 1")
    peers = chosen_peers(args)
    rows, missing = uvloop.run(run(peers, args.checkout, args.agents, args.rounds, SIZES, narrator()))
    if args.json:
        print(json.dumps(as_json(rows, missing), indent=1))
    else:
        print("\n".join([f"{args.agents} agents, {len(SIZES)} turns each", render(rows, missing), WORDS]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
