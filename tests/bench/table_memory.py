"""`python -m tests.bench.table_memory`: new prefixes must not make the gateway grow, and looking one up is cheap.

The routing table alone takes requests of many distinct prefixes past its bound; then a whole gateway process with small
bounds does, before a worker without an engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import uvloop
from xxhash import xxh3_128_digest

from proxy.bench.harness.counters import CpuTime, family
from proxy.bench.harness.servers import Server, Servers, narrator
from proxy.boundaries.boundary import Boundary
from proxy.routing.prefix_index import ENTRY_BYTES, PrefixIndex
from tests.harness.load import CHAT, connect, request, send_all
from tests.harness.mock_worker import MODEL, mock_worker

REQUESTS, ENTRIES = 200_000, 10_000

GATEWAY_REQUESTS = 20_000

GATEWAY_TEXT_BYTES = 2**20  # small, so that this bound is reached as well

GROWTH_LIMIT = 5 * 2**20  # bytes in the second half

LOOKUP_LIMIT = 20e-6  # seconds

BOOTS = tuple(f"http://127.0.0.1:{8000 + number}#1.7e+09" for number in range(4))

LOOKED_UP = 40  # prefixes of a request whose lookup is timed

LOOKUPS = 2_000

CLIENTS = 4

KINDS = ("system", "history", "turn")  # of the boundaries of a request to the table

WORDS = (
    "growth: resident memory at the end less that after half of the requests, no prefix of which ever came twice.\n"
    "The table has an entry for each boundary of a request. lookup: median time to find the deepest prefix that each\n"
    f"of {len(BOOTS)} workers was sent, of {LOOKED_UP} that a request has: the shortest of them is known, or none is."
)


class Grown(NamedTuple):
    """Memory of a process that took requests of distinct prefixes; bytes resident."""

    what: str
    requests: int
    entries: int  # in the routing table at the end
    evicted: int  # from it
    half: int
    end: int

    @property
    def growth(self) -> int:
        """In the second half."""
        return self.end - self.half

    @property
    def held(self) -> bool:
        """Whether the table was full and nothing grew any more."""
        return self.evicted > 0 and self.growth <= GROWTH_LIMIT


class Lookup(NamedTuple):
    """Seconds, medians, in a full table."""

    known: float  # one prefix is there
    unknown: float  # none is

    @property
    def held(self) -> bool:
        """Whether both are as short as they have to be."""
        return max(self) <= LOOKUP_LIMIT


def resident(pid: int) -> int:
    """Bytes of the process and its descendants that are in memory."""
    total = 0
    for process in family(pid):
        status = Path(f"/proc/{process}/status").read_text()
        total += int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024
    return total


def key(*parts: object) -> bytes:
    """As prefixes are named."""
    return xxh3_128_digest(repr(parts).encode())


def fill(prefix_index: PrefixIndex, requests: int) -> Grown:
    """Look up and record requests of three boundaries each, all different."""
    half = recorded = 0
    for number in range(requests):
        if number == requests // 2:
            half = resident(os.getpid())
        boundaries = [Boundary(kind, key(number, n), 100 * (n + 1), 100 * (n + 1)) for n, kind in enumerate(KINDS)]
        if prefix_index.longest([boundary.key for boundary in boundaries], BOOTS):
            raise RuntimeError("a prefix that nobody sent before was found")
        prefix_index.record(boundaries, BOOTS[number % len(BOOTS)])
        recorded += len(boundaries)
    return Grown(
        "routing table", requests, len(prefix_index), recorded - len(prefix_index), half, resident(os.getpid())
    )


def time_lookups(prefix_index: PrefixIndex, last: int) -> Lookup:
    """In a table that has the boundaries of request `last`."""

    def seconds(prefixes: list[bytes], found: bool) -> float:
        took = []
        for _ in range(LOOKUPS):
            began = time.perf_counter()
            held = prefix_index.longest(prefixes, BOOTS)
            took.append(time.perf_counter() - began)
            if bool(held) is not found:
                raise RuntimeError(f"{len(held)} workers were found to hold the prefix")
        return statistics.median(took)

    strange = [key("strange", number) for number in range(LOOKED_UP)]
    return Lookup(seconds([key(last, 0), *strange[1:]], True), seconds(strange, False))


def _body(number: int) -> bytes:
    """A chat whose first words nobody else sends."""
    messages = [
        {
            "role": "system",
            "content": f"{number} is the number of this agent. " + "It keeps the harbour's books. " * 10,
        },
        {"role": "user", "content": "What has changed?"},
        {"role": "assistant", "content": "Nothing."},
        {"role": "user", "content": f"And since {number}?"},
    ]
    return json.dumps({"model": MODEL, "messages": messages, "max_tokens": 64}).encode()


async def fill_gateway(gateway: Server, requests: int, say: Callable[[str], None]) -> Grown:
    """Send requests of distinct prefixes through a gateway."""
    clients = [await connect(gateway.url) for _ in range(CLIENTS)]
    cpu = CpuTime(gateway.process.pid)
    parts = min(10, requests // 2 * 2)
    half = 0
    for part in range(parts):
        if part == parts // 2:
            half = resident(gateway.process.pid)
        numbers = range(part * requests // parts, (part + 1) * requests // parts)
        before = cpu.seconds()
        await send_all(clients, [request(gateway.url, _body(number)) for number in numbers])
        each = 1e6 * (cpu.seconds() - before) / len(numbers)
        say(f"gateway: {numbers.stop} of {requests} requests, {each:.0f} us of CPU time for each of the last")
    end = resident(gateway.process.pid)
    for client in clients:
        client.close()
    with httpx.Client(base_url=gateway.url) as client:
        entries = client.get("/seamark/status").json()["directory_entries"]
        last = client.post(CHAT, content=_body(requests)).headers
    # All of them have as many boundaries as one more, which are recorded before it is sent.
    recorded = requests * len(last["x-seamark-boundary"].split(";"))
    return Grown("gateway process", requests, entries, recorded - entries, half, end)


def run_gateway(requests: int, entries: int, say: Callable[[str], None]) -> Grown:
    """A gateway whose routing table takes so many entries."""
    # Three eighths of the memory are the routing table's.
    flags = ["--memory-bytes", str(-(-8 * entries * ENTRY_BYTES // 3)), "--text-bytes", str(GATEWAY_TEXT_BYTES)]
    with tempfile.TemporaryDirectory(prefix="seamark-tables-") as folder, Servers(Path(folder)) as servers:
        worker = mock_worker(servers)
        worker.wait_until_ready()
        gateway = servers.gateway(worker, flags=flags)
        gateway.wait_until_ready("/ready", seconds=30)
        return uvloop.run(fill_gateway(gateway, requests, say))


def render(grown: list[Grown], lookup: Lookup) -> str:
    """A line for each, and the verdicts."""
    lines = [f"  {'':<16}{'requests':>9}{'entries':>9}{'evicted':>9}{'half':>12}{'end':>12}{'growth':>12}"]
    for row in grown:
        sizes = "".join(f"{size / 2**20:>8.1f} MiB" for size in (row.half, row.end, row.growth))
        lines.append(f"  {row.what:<16}{row.requests:>9}{row.entries:>9}{row.evicted:>9}{sizes}")
    for row in grown:
        verdict = "held" if row.held else "NOT HELD"
        lines.append(
            f"{verdict}: {row.what}: {row.growth / 2**20:.1f} MiB in the second half, at most "
            f"{GROWTH_LIMIT / 2**20:.0f} wanted, {row.evicted} evicted"
        )
    lines.append(
        f"{'held' if lookup.held else 'NOT HELD'}: lookup {1e6 * lookup.known:.1f} us (one prefix known), "
        f"{1e6 * lookup.unknown:.1f} us (none), at most {1e6 * LOOKUP_LIMIT:.0f} wanted"
    )
    return "\n".join(lines)


def report(grown: list[Grown], lookup: Lookup) -> dict[str, Any]:
    """Everything measured, for machines; bytes and seconds."""
    return {
        "memory": [{**row._asdict(), "growth": row.growth, "held": row.held} for row in grown],
        "growth_limit": GROWTH_LIMIT,
        "lookup": {**lookup._asdict(), "limit": LOOKUP_LIMIT, "held": lookup.held},
        "held": lookup.held and all(row.held for row in grown),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.table_memory",
        description="memory of the routing table and of the gateway, and a lookup's time",
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=f"to the table ({REQUESTS})")
    parser.add_argument("--entries", type=int, default=ENTRIES, metavar="N", help=f"of the table, at most ({ENTRIES})")
    parser.add_argument(
        "--gateway-requests", type=int, default=GATEWAY_REQUESTS, metavar="N", help=f"to a gateway ({GATEWAY_REQUESTS})"
    )
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if min(args.requests, args.gateway_requests, args.entries) < 2:
        parser.error("--requests, --gateway-requests, --entries: at least 2")
    say = narrator()
    say(f"routing table: {args.requests} requests")
    prefix_index = PrefixIndex(args.entries * ENTRY_BYTES)
    grown = [fill(prefix_index, args.requests)]
    lookup = time_lookups(prefix_index, args.requests - 1)
    grown.append(run_gateway(args.gateway_requests, args.entries, say))
    found = report(grown, lookup)
    print(json.dumps(found, indent=1) if args.json else f"{render(grown, lookup)}\n\n{WORDS}")
    return 0 if found["held"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
