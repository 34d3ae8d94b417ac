"""`python -m tests.bench.many_heads`: long chats with ever new heads, through the gateway: what others' streams feel.

A few streams go straight to the worker all the time. Long chats, each with a head that nobody has sent before, come in
batches, in turn straight to the worker and through the gateway. The worker is vLLM's own API process before an engine
that answers at once and gives its streams a token at a pace: what is rendered there holds the streams up.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from proxy.bench.harness.client import open_client
from proxy.bench.harness.counters import CpuTime
from proxy.bench.harness.prompts import prose
from proxy.bench.harness.ratios import Comparison, Pair, in_words
from proxy.bench.harness.servers import MODEL_NAME, Server, Servers, generated_model, narrator
from tests.bench.agent_turns import asked
from tests.harness.instant_worker import FRAMES_FIELD, STEP_FIELD, instant_worker
from tests.harness.load import connect, request, send_all

REQUESTS, PAIRS = 200, 10  # in all, each way; cut into so many batches

SIZE = 400_000  # bytes of a chat

MESSAGES = 40

STREAMS, STEP_MS = 4, 20

LIMIT = 1.03  # through the gateway over directly

DRAIN_SECONDS = 1.0  # after a batch, for what the gateway asks beside the path

BYTES_PER_WORD = 6

GAP, CPU = "median gap of the streams", "CPU time of the API process"

WORDS = (
    "ratio: a batch through the gateway over the one straight to the worker right before or after it, median of the\n"
    "pairs and quartiles. Gaps: between two frames of a stream, while a batch is under way. CPU: all threads of the\n"
    "worker's API process, from the batch's first byte until a second after its last answer."
)


class Batch(NamedTuple):
    """What a batch did to the worker; seconds."""

    gap: float  # median
    gap_p99: float
    cpu: float
    took: float
    renders: int  # asked of the worker beside what the requests themselves need


@dataclass(frozen=True)
class Result:
    """All batches, pair by pair."""

    direct: tuple[Batch, ...]
    through: tuple[Batch, ...]

    def compared(self, name: str, figure: str) -> Comparison:
        """One figure of all pairs."""
        sides = zip(self.through, self.direct, strict=True)
        return Comparison(
            name, tuple(Pair(getattr(own, figure), getattr(other, figure)) for own, other in sides), LIMIT
        )

    @property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Those that are judged."""
        return self.compared(GAP, "gap"), self.compared(CPU, "cpu")

    @property
    def held(self) -> bool:
        """Whether neither is worse than it may be."""
        return all(comparison.held for comparison in self.comparisons)


class Stream(asyncio.Protocol):
    """An endless stream, straight from the worker; `times` of its frames, in seconds."""

    def __init__(self, question: bytes) -> None:
        self._question = question
        self.times: list[float] = []
        self.broken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self._question)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self.times += [now] * data.count(b"data: ")

    def connection_lost(self, error: Exception | None) -> None:
        self.broken = True

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between frames that came within that time."""
        times = [at for at in self.times if since <= at <= until]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def chats(size: int) -> Iterator[bytes]:
    """Bodies of about `size` bytes, each with a head of its own, for ever."""
    texts = [prose(size // MESSAGES // BYTES_PER_WORD, seed) for seed in range(MESSAGES)]
    for number in itertools.count():
        messages = [{"role": "system", "content": f"Edition {number} of the rules. {texts[0]}"}]
        messages += [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts[1:])]
        yield json.dumps({"model": MODEL_NAME, "messages": messages, "max_tokens": 1}).encode()


async def measure(
    worker: Server, gateway: Server, requests: int, pairs: int, size: int, say: Callable[[str], None]
) -> Result:
    """Batches in turn, the order turned round each time. Raises `RuntimeError` if a stream breaks off."""
    at, cpu, bodies = urlsplit(worker.url), CpuTime(worker.process.pid), chats(size)
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "Go on."}], "stream": True}
    question = request(worker.url, json.dumps({**body, STEP_FIELD: STEP_MS, FRAMES_FIELD: 10**9}).encode())
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(lambda: Stream(question), at.hostname, at.port) for _ in range(STREAMS)]
    streams = [stream for _, stream in made]
    found: dict[str, list[Batch]] = {worker.url: [], gateway.url: []}
    async with open_client() as http:

        async def batch(url: str, count: int) -> Batch:
            renders, used = await asked(http, worker), cpu.seconds()
            wanted = [request(url, raw) for raw in itertools.islice(bodies, count)]
            client = await connect(url)
            began = time.perf_counter()
            try:
                await send_all([client], wanted)
            finally:
                client.close()
            ended = time.perf_counter()
            await asyncio.sleep(DRAIN_SECONDS)
            used = cpu.seconds() - used
            if any(stream.broken for stream in streams):
                raise RuntimeError("a stream broke off")
            gaps = [gap for stream in streams for gap in stream.gaps(began, ended)]
            p99 = statistics.quantiles(gaps, n=100)[98]
            renders = await asked(http, worker) - renders
            return Batch(statistics.median(gaps), p99, used, ended - began, renders)

        try:
            for url in found:  # what a process does once
                await batch(url, 2)
            for number in range(pairs):
                say(f"pair {number + 1} of {pairs}")
                for url in list(found)[:: 1 if number % 2 else -1]:
                    found[url].append(await batch(url, max(1, requests // pairs)))
        finally:
            for transport, _ in made:
                transport.close()
    return Result(tuple(found[worker.url]), tuple(found[gateway.url]))


async def run(requests: int, pairs: int, size: int, say: Callable[[str], None]) -> Result:
    """Start everything, and measure."""
    model = generated_model(say)
    with tempfile.TemporaryDirectory(prefix="seamark-heads-") as folder, Servers(Path(folder)) as servers:
        worker = instant_worker(servers, model)
        worker.wait_until_ready()
        gateway = servers.gateway(worker)
        gateway.wait_until_ready("/ready", seconds=60)
        return await measure(worker, gateway, requests, pairs, size, say)


def render(result: Result) -> str:
    """A line for each figure, then the verdicts."""
    head = f"  {'':<16}{'gap ms':>9}{'p99':>8}{'CPU s':>9}{'took s':>9}{'renders':>9}"
    lines = ["a batch, medians; renders in all batches", head]
    for name, batches in (("directly", result.direct), ("through gateway", result.through)):
        gap, p99, cpu, took, _ = map(statistics.median, zip(*batches, strict=True))
        renders = sum(batch.renders for batch in batches)
        lines.append(f"  {name:<16}{1e3 * gap:>9.2f}{1e3 * p99:>8.1f}{cpu:>9.2f}{took:>9.2f}{renders:>9}")
    for comparison in result.comparisons:
        verdict = "held" if comparison.held else "NOT HELD"
        lines.append(f"{verdict}: {comparison.name}: {in_words(comparison.ratio)}, at most {LIMIT:g} wanted")
    return "\n".join(lines)


def report(result: Result) -> dict[str, Any]:
    """Everything measured, for machines; seconds."""
    return {
        "held": result.held,
        "limit": LIMIT,
        "ratios": {comparison.name: comparison.ratio._asdict() for comparison in result.comparisons},
        "direct": [batch._asdict() for batch in result.direct],
        "through": [batch._asdict() for batch in result.through],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.many_heads", description="long chats with new heads, and the streams beside them"
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help=f"each way ({REQUESTS})")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"batches they come in ({PAIRS})")
    parser.add_argument("--bytes", type=int, default=SIZE, metavar="N", help=f"of a chat ({SIZE})")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    if not 1 <= args.pairs <= args.requests:
        parser.error("--pairs: at least 1, at most --requests")
    result = asyncio.run(run(args.requests, args.pairs, args.bytes, narrator()))
    print(json.dumps(report(result), indent=1) if args.json else f"{render(result)}\n\n{WORDS}")
    return 0 if result.held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
