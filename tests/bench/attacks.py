"""`python -m tests.bench.attacks`: honest streams through one gateway, without attackers and beside attackers.

The attackers have a process and a core of their own, so that what they take of the gateway's is what the gateway gives
them: all send one kind after the other, each for `SLOT_SECONDS`, but for every fourth, who mixes them. Exit
status 1 when an honest request fails that would not fail without them, a page or a stream waits too long, memory grows
past what the settings allow, or connections stay open.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import uvloop

from proxy.bench.harness.servers import Server, Servers, narrator
from proxy.settings import Settings
from tests.bench import fuzz_framing
from tests.bench.soak import bad_lines, resident_bytes
from tests.harness.load import open_files
from tests.harness.mock_worker import FRAMES_FIELD, MODEL, STEP_FIELD, mock_worker
from tests.harness.raw_http import Connection, Cut, request

ATTACKERS, STREAMS, SECONDS, QUIET_SECONDS = 16, 64, 1800.0, 60.0

STEP_MS, FRAMES = 50, 100  # of an honest stream

HEALTH_P99, STREAM_GAP = 0.1, 0.25  # seconds, at most

PER_SECOND = 5.0  # attacks of each kind, at least, while it is its turn

SETTLE_SECONDS = 60.0

_SENT = re.compile(rb'"sent":(\d+)')  # in a frame: time.monotonic_ns() of the worker's step

# Small tables, and so a small bound.
FLAGS = ("--memory-bytes", "16000000", "--text-bytes", "16000000", "--max-bodies-bytes", "268435456")

# What the gateway takes beside its settings (proxy/README.md, "Limits"): the interpreter with all that it has imported.
CODE_BYTES = 160 * 2**20

# The limit of bodies holds for all bytes together, but the allocator has one store for small objects, such as parsed
# values, and another for large ones, such as bodies as they came; each keeps what it needed at its own worst moment.
BODY_BYTES_HELD = 2.0

WORDS = """
late: from the worker's step to the client; most: the worst of all. health: from asking GET /health to its answer, on
one connection. memory: resident; its bound: the three settings of memory plus the program's own. files: descriptors
open before, and once all clients have left. Three of four attackers send one kind after the other; a rate is that of a
kind in its own time."""


CHAT = "/v1/chat/completions"

SLOT_SECONDS = 5.0  # or less, so that each kind has its turn

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"


class Attack(NamedTuple):
    """What is written, and what is done then."""

    data: bytes
    reads: bool = True  # waits for the answer's first bytes; if not, the connection is left open, unread
    leaves: bool = False  # closes at once


def _post(body: bytes, path: str = CHAT) -> bytes:
    return request("POST", path, {"content-type": "application/json"}, body)


def _chat(text: object, times: int = 1, **fields: object) -> bytes:
    return _post(
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}] * times, **fields}).encode()
    )


def _padded(start: bytes, item: bytes, end: bytes, size: int) -> Attack:
    return Attack(_post(start + b",".join([item] * (size // (len(item) + 1))) + end))


_MESSAGES = b'{"model":"%b","messages":[' % MODEL.encode()

_LONG_TEXT = _padded(_MESSAGES + b'{"role":"user","content":"', b"x" * 999, b'"}]}', 2**20)

# What is the same each time.
_SAME = {
    "empty messages, 1 MiB": _padded(_MESSAGES, b"{}", b"]}", 2**20),
    "parts, 8 MiB": _padded(
        _MESSAGES + b'{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}", 8 * 2**20
    ),
    "brackets, 40 MiB": _padded(_MESSAGES, b"[]", b"]}", 40 * 2**20),
    "fields, 4 MiB": _padded(_MESSAGES + b"],", b'"a":1', b"}", 4 * 2**20),
    "deep": Attack(_post(b'{"model":' + b"[" * 500_000)),
    "long text, 1 MiB": _LONG_TEXT,
    "100,000 token ids": Attack(
        _post(json.dumps({"model": MODEL, "prompt": [1] * 100_000}).encode(), "/v1/completions")
    ),
    "unread stream": Attack(_chat("Tide?", stream=True, **{STEP_FIELD: 1, FRAMES_FIELD: 100_000}), reads=False),
    "slow head": Attack(HEAD, reads=False),
    "slow body": Attack(HEAD + b"content-length: 100\r\n\r\n{", reads=False),
    "answered before its body": Attack(b"GET /v1/x HTTP/1.1\r\ncontent-length: 9\r\n\r\n1", reads=False),
    "malformed chunk": Attack(HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"),
    "too long": Attack(HEAD + b"content-length: 99999999999\r\nexpect: 100-continue\r\n\r\n"),
    "connection fields, 58 kB": Attack(HEAD + b"connection: a,b,c\r\n" * 3000 + b"\r\n"),
    "long query": Attack(request("GET", "/v1/x?" + "q" * 9000, {})),
    "upgrade": Attack(request("POST", CHAT, {"connection": "upgrade", "upgrade": "h2c"}, fuzz_framing.inner("hidden"))),
    "pipelined": Attack(request("GET", "/v1/x", {}) * 200),
}


def _marked(number: int) -> bytes:
    return _chat([{"type": "text", "text": f"{number} " * 600, "cache_control": {"type": "ephemeral"}}] * 8)


# What is new each time, by a number that nobody else has.
_FRESH: dict[str, Callable[[random.Random, int], Attack]] = {
    "5,000 messages": lambda rng, number: Attack(_chat(f"{number}", 5000)),
    "8 marks in a fresh head": lambda rng, number: Attack(_marked(number)),
    "fresh settings": lambda rng, number: Attack(_chat("Tide?", chat_template_kwargs={f"mode{number}": True})),
    "fresh template": lambda rng, number: Attack(
        _chat("Tide?", chat_template=f"{{{{ messages[0].content }}}}{number}")
    ),
    "framing": lambda rng, number: Attack(rng.choice(list(fuzz_framing.ambiguous(f"a{number}").values()))),
    "odd": lambda rng, number: Attack(fuzz_framing.odd(rng, f"a{number}")),
    "left in the middle": lambda rng, number: Attack(_LONG_TEXT.data[: rng.randrange(100, 2**20)], leaves=True),
}

KINDS = (*_SAME, *_FRESH)


class Attackers:
    def __init__(self, url: str, seconds: float) -> None:
        at = urlsplit(url)
        self._address = at.hostname, at.port
        self._began = time.monotonic()
        self._until = self._began + seconds
        self._slot = min(SLOT_SECONDS, seconds / len(KINDS))
        self._serial: Iterator[int] = itertools.count()
        self._open: deque[asyncio.StreamWriter] = deque()
        self.sent: Counter[str] = Counter()

    async def run(self, number: int) -> None:
        rng = random.Random(number)
        for turn in itertools.count(number):
            if (now := time.monotonic()) >= self._until:
                return
            if number % 4:
                turn = int((now - self._began) / self._slot)
            name = KINDS[turn % len(KINDS)]
            made = _SAME[name] if name in _SAME else _FRESH[name](rng, next(self._serial))
            try:
                async with asyncio.timeout(5.0):  # then the attacker goes on
                    await self._attack(made)
            except (OSError, TimeoutError):
                pass
            self.sent[name] += 1

    async def _attack(self, attack: Attack) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        kept = False
        try:
            writer.write(attack.data)
            await writer.drain()
            if attack.leaves:
                return
            if attack.reads:
                await reader.read(2**16)
                return
            kept = True
            self._open.append(writer)
            if len(self._open) > 100:  # the oldest is closed for a new one
                self._open.popleft().transport.abort()
        finally:
            if not kept:
                writer.transport.abort()

    def close(self) -> None:
        for writer in self._open:
            writer.transport.abort()


async def attack(url: str, attackers: int, seconds: float) -> Mapping[str, int]:
    """How often each kind was sent."""
    all_of_them = Attackers(url, seconds)
    await asyncio.gather(*(all_of_them.run(number) for number in range(attackers)))
    all_of_them.close()
    return {name: all_of_them.sent[name] for name in KINDS}


@dataclass(frozen=True)
class Run:
    """Honest clients, beside so many attackers; times in seconds, memory in bytes."""

    attackers: int
    seconds: float
    streams: int  # honest ones that began
    failed: int  # of them: broken off, or refused
    frames: int
    late_p99: float
    late_most: float
    health_p99: float
    health_failed: int
    memory_most: int
    files_before: int
    files_after: int
    attacks: Mapping[str, int]  # sent, by kind
    failures: Mapping[str, int]  # what failed streams were told
    log: Sequence[str]  # lines that name an error


class Honest:
    """Clients that stream all the time. HTTP is not taken apart: a frame's time stands in it."""

    def __init__(self, gateway: Server) -> None:
        self._gateway = gateway
        self.lateness = array("q")  # nanoseconds
        self.streams = 0
        self.failures: Counter[str] = Counter()  # by the beginning of what came

    async def stream_on(self, number: int, until: float) -> None:
        messages = [{"role": "system", "content": "You."}, {"role": "user", "content": f"{number}?"}]
        body = {"model": MODEL, "messages": messages, "stream": True, STEP_FIELD: STEP_MS, FRAMES_FIELD: FRAMES}
        question = request("POST", CHAT, {"content-type": "application/json"}, json.dumps(body).encode())
        while time.monotonic() < until:
            self.streams += 1
            received = bytearray()
            try:
                async with asyncio.timeout(FRAMES * STEP_MS / 1000 + 60):
                    await self._stream(question, received)
            except (OSError, TimeoutError, Cut):
                self.failures[received[:300].decode(errors="replace")] += 1

    async def _stream(self, question: bytes, received: bytearray) -> None:
        connection = await Connection.open(self._gateway)
        try:
            await connection.send(question)
            done = 0
            while received.find(b"data: [DONE]\n\n", max(0, done - 20)) < 0:
                received += await connection.some()
                now, whole = time.monotonic_ns(), received.rfind(b"\n\n")
                self.lateness.extend(now - int(sent) for sent in _SENT.findall(received, done, max(done, whole)))
                done = max(done, whole)
        finally:
            connection.close()


async def ask_health(gateway: Server, until: float, took: list[float]) -> int:
    """Ask again and again; how often there was no answer."""
    failed = 0
    connection = await Connection.open(gateway)
    while time.monotonic() < until:
        began = time.perf_counter()
        try:
            await connection.send(request("GET", "/health", {}))
            answer = await asyncio.wait_for(connection.response(), 30)
        except (Cut, OSError, TimeoutError):
            answer = None
        if answer is None or answer.status != 200:
            failed += 1
            connection.close()
            connection = await Connection.open(gateway)
        else:
            took.append(time.perf_counter() - began)
        await asyncio.sleep(0.05)
    connection.close()
    return failed


async def run(servers: Servers, attackers: int, seconds: float) -> Run:
    """One gateway before one worker, for so long."""
    worker = mock_worker(servers)
    gateway = servers.gateway(worker, flags=FLAGS)
    for server, path in ((worker, "/health"), (gateway, "/ready")):
        await asyncio.to_thread(server.wait_until_ready, path)
    honest, took = Honest(gateway), []
    await honest.stream_on(STREAMS, time.monotonic() + 0.1)  # the first request starts the reading of the worker's feed
    honest.lateness, honest.streams = array("q"), 0
    before = open_files(gateway.process.pid)
    until = time.monotonic() + seconds
    memory: list[int] = []

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append(resident_bytes(gateway.process.pid))
            await asyncio.sleep(0.5)

    parts = [watch(), *(honest.stream_on(number, until) for number in range(STREAMS))]
    sent: Mapping[str, int] = {}
    process = None
    if attackers:
        command = [sys.executable, "-m", "tests.bench.attacks", "--at", gateway.url, str(attackers), str(seconds)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        health_failed, *_ = await asyncio.gather(ask_health(gateway, until, took), *parts)
        if process is not None:
            sent = json.loads((await process.communicate())[0])
    finally:
        if process is not None and process.returncode is None:
            process.kill()
    settled = time.monotonic() + SETTLE_SECONDS  # kept connections to the worker are closed after some seconds
    while (after := open_files(gateway.process.pid)) > before and time.monotonic() < settled:
        await asyncio.sleep(1)
    late, took = sorted(honest.lateness), sorted(took)
    return Run(
        attackers,
        seconds,
        honest.streams,
        honest.failures.total(),
        len(late),
        share(late, 0.99) / 1e9,
        share(late, 1.0) / 1e9,
        share(took, 0.99),
        health_failed,
        max(memory),
        before,
        after,
        sent,
        honest.failures,
        bad_lines(gateway, 0)[:20],
    )


def share(ordered: Sequence[float], part: float) -> float:
    """The value below which this part of all lies; infinite if there is none."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.inf


def memory_bound() -> int:
    """Bytes that the gateway may take with `FLAGS`."""
    memory, texts, bodies = (int(value) for value in FLAGS[1::2])
    being_read = Settings.model_fields["max_body_bytes"].default
    return CODE_BYTES + memory + texts + round(BODY_BYTES_HELD * bodies) + being_read


def complaints(quiet: Run, beside: Run, per_second: float = PER_SECOND) -> list[str]:
    """What did not hold."""
    found = []
    if beside.failed > quiet.failed or beside.health_failed > quiet.health_failed:
        found.append(f"{beside.failed} honest streams and {beside.health_failed} questions for the health failed")
    if beside.health_p99 > HEALTH_P99:
        found.append(f"p99 of /health {1000 * beside.health_p99:.0f} ms, at most {1000 * HEALTH_P99:.0f} wanted")
    if beside.late_most - quiet.late_p99 > STREAM_GAP:
        found.append(f"a frame was {1000 * beside.late_most:.0f} ms late, at most {1000 * STREAM_GAP:.0f} wanted")
    if beside.memory_most > memory_bound():
        found.append(f"{beside.memory_most / 2**20:.0f} MiB resident, the bound is {memory_bound() / 2**20:.0f}")
    if beside.files_after > beside.files_before:
        found.append(f"{beside.files_after} descriptors open, {beside.files_before} before")
    rare = [kind for kind in KINDS if beside.attacks.get(kind, 0) < per_second * beside.seconds / len(KINDS)]
    if rare:
        found.append(f"less than {per_second:g} a second were sent of: {', '.join(rare)}")
    told = [f"{count} failed: {said!r}" for said, count in beside.failures.items()]
    return found + told + [f"log: {line}" for line in beside.log]


def render(quiet: Run, beside: Run, wrongs: Sequence[str]) -> str:
    """Both runs side by side, and the verdict."""
    lines = []
    for each in (quiet, beside):
        late, most, health = (1000 * seconds for seconds in (each.late_p99, each.late_most, each.health_p99))
        lines += [
            f"{each.attackers} attackers: {each.failed} of {each.streams} streams failed; frames late p99 {late:.1f},",
            f"  most {most:.0f} ms; health p99 {health:.1f}; memory "
            f"{each.memory_most / 2**20:.0f} MiB; files {each.files_before} -> {each.files_after}",
        ]
    rates = {kind: count * len(KINDS) / beside.seconds for kind, count in beside.attacks.items()}
    lines.append(f"attacks a second: {', '.join(f'{kind} {rate:.1f}' for kind, rate in rates.items())}")
    return "\n".join([*lines, *(wrongs or ["held"])])


def main(argv: list[str]) -> int:
    if argv[:1] == ["--at"]:  # the attackers' own process
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(json.dumps(uvloop.run(attack(argv[1], int(argv[2]), float(argv[3])))))
        return 0
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.attacks", description="honest clients beside attackers"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="beside attackers")
    parser.add_argument("--attackers", type=int, default=ATTACKERS)
    args = parser.parse_args(argv)
    say = narrator()
    runs = []
    for attackers, seconds in ((0, min(QUIET_SECONDS, args.seconds)), (args.attackers, args.seconds)):
        say(f"{STREAMS} honest streams beside {attackers} attackers, {seconds:g} s")
        folder = Path(tempfile.mkdtemp(prefix="seamark-attacks-"))
        with Servers(folder) as servers:
            runs.append(asyncio.run(run(servers, attackers, seconds)))
    wrongs = complaints(*runs)
    print(render(*runs, wrongs), WORDS, sep="\n")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
