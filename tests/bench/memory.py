"""`python -m tests.bench.memory`: what open conversations of 100,000 tokens cost a gateway in memory, and what grows.

One gateway stands before workers that compute nothing. A lot of conversations takes its turns together: all of them
are open. Another lot of as many follows: what has a bound has reached it, and nothing else may have grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import uvloop

from proxy.bench.harness.servers import Server, Servers, narrator
from proxy.boundaries import divergence, positions
from proxy.commands.render_server import free_port
from proxy.observability import explanations
from proxy.routing import engine_events, held_states, prefix_index
from proxy.settings import Settings
from tests.bench.long_chats import conversation
from tests.bench.soak import resident_bytes
from tests.harness.load import ANSWER_SECONDS, connect, request
from tests.harness.mock_worker import mock_worker

CONVERSATIONS, LOTS, WORKERS, CLIENTS = 10_000, 2, 2, 4

SIZES = range(98_000, 100_001, 2_000)  # tokens of the turns of a conversation

SETTLE_SECONDS = 3.0  # after a lot, for what is done beside the requests

LOOK_SECONDS = 120.0

MIB = 2**20

GROWTH_LIMIT = 0.05  # of the resident size, in the last lot

WORDS = (
    "resident: MiB of the gateway's process. a conversation: what it grew by for each of the lot's. by part: MiB of\n"
    "Python objects, without what the allocator keeps between them. tables: entries of those with 500 and more."
)


class Look(NamedTuple):
    """The gateway at one moment; bytes, and entries."""

    resident: int
    parts: Mapping[str, int]
    tables: Mapping[str, int]


class Report(NamedTuple):
    """A whole run."""

    conversations: int  # in a lot
    turns: int
    workers: int
    looks: tuple[Look, ...]  # before the first lot, and behind each

    @property
    def growing(self) -> list[str]:
        """What has grown in the last lot as if it had no bound, in words."""
        before, after = self.looks[-2:]
        bounds = bounds_of(self.workers)
        found = []
        for name, entries in after.tables.items():
            earlier = before.tables.get(name, 0)
            if entries > bounds.get(name, earlier + self.conversations // 2):
                found.append(f"{name}: {earlier} entries, then {entries}")
        beyond = after.resident - before.resident - sum(after.parts[name] - before.parts[name] for name in after.parts)
        if beyond > GROWTH_LIMIT * before.resident:
            found.append(f"resident: {beyond / MIB:.0f} MiB more than its parts")
        return found


def bounds_of(workers: int) -> dict[str, int]:
    """Entries that tables may have, at the gateway's defaults."""
    memory, texts = (Settings.model_fields[name].default for name in ("memory_bytes", "text_bytes"))
    return {
        "PrefixIndex._prefixes": memory * 3 // 8 // prefix_index.ENTRY_BYTES,
        "PositionCache._positions": memory // 2 // positions.ENTRY_BYTES,
        "DivergenceLearner._nodes": texts * 3 // 8 // divergence.PLACE_BYTES,
        "Explanations._records": explanations.MAX_REQUESTS,
        "HeldStates._pending": held_states.MAX_PENDING * workers,
        "HeldStates._states": held_states.MAX_TIED * workers,
        "HeldStates._tied": held_states.MAX_TIED * workers,
        "_FeedReader.outcomes": engine_events.MAX_OUTCOMES * workers,
    }


def measured_gateway(servers: Servers, workers: Sequence[Server], file: Path) -> Server:
    """A gateway that writes to `file` what it holds when it is asked to."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.measured_gateway", str(file), "serve", "--port", str(port)]
    command += ["--self-check-interval", "0", "--stop-delay", "0"]
    for worker in workers:
        command += ["--worker", worker.url]
    return servers.start("gateway", port, command, {})


def look(gateway: Server, file: Path) -> Look:
    """What it holds now. Raises `TimeoutError`."""
    time.sleep(SETTLE_SECONDS)
    resident = resident_bytes(gateway.process.pid)
    os.kill(gateway.process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + LOOK_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("the gateway does not say what it holds")
        time.sleep(0.05)
    found = json.loads(file.read_text())
    file.unlink()
    return Look(resident, found["parts"], found["tables"])


async def take_turns(gateway: Server, numbers: range, sizes: range) -> None:
    """Every conversation takes its first turn, then every one its second, and so on."""
    left: Iterator[bytes] = (
        body
        for turns in range(1, len(sizes) + 1)
        for number in numbers
        for body in [*conversation(number, sizes[:turns])][-1:]
    )

    async def work() -> None:
        client = await connect(gateway.url)
        try:
            for body in left:
                await asyncio.wait_for(client.ask(request(gateway.url, body)), ANSWER_SECONDS)
        finally:
            client.close()

    await asyncio.gather(*(work() for _ in range(CLIENTS)))


def run(conversations: int, lots: int, workers: int, sizes: range, say: Callable[[str], None]) -> Report:
    """Start everything, and look at the gateway behind each lot."""
    with tempfile.TemporaryDirectory(prefix="seamark-memory-") as folder, Servers(Path(folder)) as servers:
        file = Path(folder) / "weighed.json"
        running = [mock_worker(servers, tells_states=True) for _ in range(workers)]
        for worker in running:
            worker.wait_until_ready()
        gateway = measured_gateway(servers, running, file)
        gateway.wait_until_ready("/ready", seconds=30)
        looks = [look(gateway, file)]
        for lot in range(lots):
            say(f"lot {lot + 1} of {lots}")
            uvloop.run(take_turns(gateway, range(lot * conversations, (lot + 1) * conversations), sizes))
            looks.append(look(gateway, file))
    return Report(conversations, len(sizes), workers, tuple(looks))


def render(report: Report) -> str:
    """A column for each moment."""
    looks = report.looks
    moments = ["before", *(f"lot {number}" for number in range(1, len(looks)))]
    lines = [
        f"{report.conversations} conversations in a lot, {report.turns} turns each",
        _line("", moments),
        _line("resident, MiB", [f"{each.resident / MIB:.0f}" for each in looks]),
        _line(
            "a conversation, bytes",
            [
                "",
                *(
                    f"{(looks[i].resident - looks[i - 1].resident) / report.conversations:.0f}"
                    for i in range(1, len(looks))
                ),
            ],
        ),
        "by part, MiB",
    ]
    lines += [_line(f"  {name}", [f"{each.parts[name] / MIB:.1f}" for each in looks]) for name in looks[-1].parts]
    lines.append(_line("tables, entries", ["" for _ in looks] + ["at most"]))
    bounds = bounds_of(report.workers)
    for name, entries in sorted(looks[-1].tables.items()):
        if entries != looks[0].tables.get(name):
            lines += [
                _line(f"  {name}", [str(each.tables.get(name, 0)) for each in looks] + [str(bounds.get(name, ""))])
            ]
    return "\n".join(lines)


def _line(name: str, values: Sequence[str]) -> str:
    return f"{name:<44}" + "".join(f"{value:>10}" for value in values)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.memory", description="memory of a gateway for long conversations, and what grows"
    )
    parser.add_argument(
        "--conversations", type=int, default=CONVERSATIONS, metavar="N", help=f"in a lot ({CONVERSATIONS})"
    )
    parser.add_argument("--lots", type=int, default=LOTS, metavar="N", help=f"one after the other ({LOTS})")
    parser.add_argument("--workers", type=int, default=WORKERS, metavar="N", help=f"before which it stands ({WORKERS})")
    args = parser.parse_args(argv)
    if args.conversations < 1 or args.lots < 1 or args.workers < 1:
        parser.error("--conversations, --lots, --workers: at least 1")
    report = run(args.conversations, args.lots, args.workers, SIZES, narrator())
    growing = report.growing
    print("\n".join([render(report), "", WORDS, *(f"GROWS in the last lot: {each}" for each in growing)]))
    return 1 if growing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
