"""`seamark bench passes`: forward passes of the same requests on Seamark's engine and on vLLM alone.

Passes are counted in vLLM's own log. Exit status 1 if Seamark takes more passes than vLLM alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from proxy.bench.harness.client import complete, fresh_tokens, open_client, three_boundaries
from proxy.bench.harness.counters import CpuTime, PassCounter
from proxy.bench.harness.servers import Server, Servers, generated_model, narrator
from proxy.commands.parser import Parser
from proxy.fleet import worker_metrics

# One pass holds any prompt here, so that a second one has to be somebody's choice.
FLAGS = ("--max-model-len", "12288", "--max-num-batched-tokens", "8192")

FAN_OUT = 4

FAN_OUT_SHARED = 163

FAN_OUT_TOKENS = 4  # of each answer of a wave

REQUESTS = ("cold", "warm", "warm again")

AT_ONCE = "fan-out of four"

QUEUED = "fan-out of four, queued"

BUSY_SECONDS = 0.15  # of CPU time after which an engine is inside the pass that a wave waits for

QUEUED_ATTEMPTS = 3

OURS, BASELINE, UNTOUCHED = "Seamark", "vLLM, cured", "untouched"

BASELINE_WORDS = (
    f'"{BASELINE}": SEAMARK_ENGINE=reference, prefix caching on, match unit as vLLM chooses it. It carries the cures\n'
    "of upstream defects: on a CPU the untouched vLLM dies on a NemotronH prompt longer than a cache block.\n"
    f'"{UNTOUCHED}": SEAMARK_ENGINE=0, for prompts shorter than a block.'
)


@dataclass(frozen=True)
class PassPlan:
    """Which requests are counted; lengths in tokens."""

    shared: tuple[int, ...]
    own: tuple[int, ...]
    waves: int  # of a fan-out, the median counts
    running: int  # prompt that a queued fan-out waits behind; 0: no queued ones

    def shorter_than(self, block_size: int) -> PassPlan:
        """The part of it in which every prompt is shorter than a cache block."""
        own = tuple(length for length in self.own if self.shared[0] + length < block_size)
        shared = tuple(length for length in self.shared if own and length + own[-1] < block_size)
        return replace(self, shared=shared, own=own, running=0)


FULL = PassPlan((130, 163, 384, 469, 1864, 6000), (120, 500), 5, 6000)


class Row(NamedTuple):
    """A kind of request. Lengths in tokens."""

    request: str  # one of `REQUESTS`, or a wave
    hinted: bool  # with three boundaries
    shared: int
    own: int


PassCounts = Mapping[Row, float]  # forward passes, of a wave the median


@dataclass(frozen=True)
class Table:
    """One family's counts by engine, Seamark's among them."""

    family: str
    block_size: int  # tokens of a cache block
    counts: Mapping[str, PassCounts]

    def others(self, row: Row) -> dict[str, float]:
        """The engines that Seamark is judged by in this row."""
        return {name: of[row] for name, of in self.counts.items() if name != OURS and row in of}

    def held(self, row: Row) -> bool:
        """Whether Seamark takes no more passes than any of them."""
        return self.counts[OURS][row] <= min(self.others(row).values())


async def count(client: httpx.AsyncClient, engine: Server, plan: PassPlan) -> dict[Row, float]:
    """Passes of every row on one engine. Every engine is sent the same, hints included: vLLM alone ignores them."""
    await complete(client, engine.url, fresh_tokens(64, "first"), max_tokens=2)  # a process's first pays for set-up
    passes = PassCounter(engine.log)
    found: dict[Row, float] = {}
    for hinted in (True, False):
        for shared in plan.shared:
            for own in plan.own:
                prefix = fresh_tokens(shared, "prefix", hinted, shared, own)
                for kind in REQUESTS:
                    row = Row(kind, hinted, shared, own)
                    passes.restart()
                    answer = await complete(client, engine.url, [*prefix, *fresh_tokens(own, row)], **_fields(row, 1))
                    found[row] = passes.after([answer]).all
        if FAN_OUT_SHARED in plan.shared:
            for own in plan.own[:1]:
                row = Row(AT_ONCE, hinted, FAN_OUT_SHARED, own)
                waves = [await _wave(client, engine, passes, row, number) for number in range(plan.waves)]
                found[row] = statistics.median(waves)
                if plan.running:
                    row = row._replace(request=QUEUED)
                    waves = [
                        await _queued_wave(client, engine, passes, row, number, plan.running)
                        for number in range(plan.waves)
                    ]
                    found[row] = statistics.median(waves)
    return found


def _fields(row: Row, tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"max_tokens": tokens}
    if row.hinted:
        fields["vllm_xargs"] = {"seamark_boundaries": three_boundaries(row.shared, row.shared + row.own)}
    return fields


def _wave_of(row: Row, number: int, attempt: int = 0) -> list[list[int]]:
    prefix = fresh_tokens(row.shared, "prefix", row, number, attempt)
    return [[*prefix, *fresh_tokens(row.own, "own", row, number, attempt, request)] for request in range(FAN_OUT)]


async def _wave(client: httpx.AsyncClient, engine: Server, passes: PassCounter, row: Row, number: int) -> int:
    """Passes of a cold wave sent to an idle engine; chance decides how many arrive in time for the first pass."""
    passes.restart()
    fields = _fields(row, FAN_OUT_TOKENS)
    answers = await asyncio.gather(
        *(complete(client, engine.url, prompt, **fields) for prompt in _wave_of(row, number))
    )
    return passes.after(answers).all


async def _queued_wave(
    client: httpx.AsyncClient, engine: Server, passes: PassCounter, row: Row, number: int, running: int
) -> int:
    """Passes of a cold wave that arrives while the engine is busy, so that the whole wave waits together.

    Raises `RuntimeError` if this machine is too busy itself to send one in time.
    """
    cpu = CpuTime(engine.process.pid)
    fields = _fields(row, FAN_OUT_TOKENS)
    for attempt in range(QUEUED_ATTEMPTS):
        busy = await cpu.settled() + BUSY_SECONDS
        passes.restart()
        prompt = fresh_tokens(running, row, number, attempt)
        before = asyncio.create_task(complete(client, engine.url, prompt, max_tokens=1))
        await cpu.reaches(busy)
        sent = [
            asyncio.create_task(complete(client, engine.url, prompt, **fields))
            for prompt in _wave_of(row, number, attempt)
        ]
        await cpu.reaches(cpu.seconds() + BUSY_SECONDS)
        in_time = not before.done()
        counted = passes.after([await before, *(await asyncio.gather(*sent))]).all - 1
        if in_time:
            return counted
    raise RuntimeError(f"no wave of {FAN_OUT} arrived within a pass of {running} tokens")


async def measure_family(name: str, plan: PassPlan, say: Callable[[str], None]) -> Table:
    """All engines on the generated model of family `name`, one after another."""
    model = generated_model(say, name)
    counts: dict[str, PassCounts] = {}
    block_size = 0
    with tempfile.TemporaryDirectory(prefix="seamark-passes-") as folder, Servers(Path(folder)) as servers:
        async with open_client(300) as client:
            for engine_name, mode in ((OURS, "1"), (BASELINE, "reference"), (UNTOUCHED, "0")):
                say(f"{name}: {engine_name}")
                engine = servers.engine(engine_name.split(",")[0], model, mode, FLAGS)
                engine.wait_until_ready()
                if mode == "1":
                    info = worker_metrics.read((await client.get(engine.url + "/metrics")).text).engine
                    if info is None:
                        raise RuntimeError(f"{engine.url}: the patches are not live")
                    block_size = info.block_size
                wanted = plan.shorter_than(block_size) if mode == "0" else plan
                counts[engine_name] = await count(client, engine, wanted)
                engine.stop()
    return Table(name, block_size, counts)


def render(table: Table) -> str:
    """One line per row."""
    names = list(table.counts)
    head = f"  {'request':<24}{'hints':<7}{'shared':>7}{'own':>6}" + "".join(f"{name:>13}" for name in names)
    lines = [f"{table.family}, cache block {table.block_size} tokens: forward passes of a request or wave", head]
    for row in table.counts[OURS]:
        cells = "".join(f"{table.counts[name][row]:>13g}" if row in table.counts[name] else " " * 13 for name in names)
        verdict = "" if table.held(row) else "   MORE than vLLM alone"
        hints = "three" if row.hinted else "none"
        lines.append(f"  {row.request:<24}{hints:<7}{row.shared:>7}{row.own:>6}{cells}{verdict}")
    rows = list(table.counts[OURS])
    held = sum(map(table.held, rows))
    lines.append(f"  Seamark <= vLLM alone in {held} of {len(rows)} rows")
    return "\n".join(lines)


def report(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """Everything counted, for machines; lengths in tokens."""
    return [
        {
            "family": table.family,
            "block_size": table.block_size,
            "rows": [
                {
                    **row._asdict(),
                    "passes": {name: of[row] for name, of in table.counts.items() if row in of},
                    "held": table.held(row),
                }
                for row in table.counts[OURS]
            ],
        }
        for table in tables
    ]


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark bench passes", description="forward passes, hinted and not, against vLLM alone")
    parser.add_argument("--family", action="append", metavar="NAME", help="of the generated model; repeat for several")
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    say = narrator()
    tables = []
    for name in dict.fromkeys(args.family or ["nemotron_h", "qwen3_next"]):
        tables.append(asyncio.run(measure_family(name, FULL, say)))
        if not args.json:
            print(render(tables[-1]) + "\n", flush=True)
    if args.json:
        print(json.dumps(report(tables), indent=1))
    else:
        print(BASELINE_WORDS)
    return 0 if all(table.held(row) for table in tables for row in table.counts[OURS]) else 1
