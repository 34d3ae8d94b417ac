"""`python -m tests.bench.response_cache_chaos`: many clients of several keys on the response cache, and broken answers.

Honest streams read what they asked for; others ask for the same and leave, read slowly or not at all, ask for very
much, or for answers that break off. Exit status 1 when somebody gets what is not the answer to its own request, or a
part of it out of order, when an honest request fails or stands still, or when a bound of slots, bytes or time is
exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools
import httpx

from proxy.bench.harness.servers import Server, Servers, narrator
from tests.bench.aborts import open_files
from tests.bench.attacks import CODE_BYTES, ask_health, settled_files, share
from tests.bench.soak import bad_lines, resident_bytes
from tests.harness.api_keys import bearer, entry
from tests.harness.load import request
from tests.harness.paced_worker import BROKEN, FIELD, MODEL, STOP, name_of, paced_worker

MINUTES = 30.0

CACHE_BYTES = 8 * 2**20

QUEUE_TIMEOUT, SEND_TIMEOUT = 2.0, 5.0  # seconds

STREAM_GAP = 0.25  # seconds, at most, beyond what streams without the cache, or this process, were late at that moment

# What has been held up for so long is caught up with in as long again, by whoever has the most to do last.
CATCHING_UP = 2

REFUSAL_LATE = 1.0  # seconds at most beyond the deadline and the two event loops' own lag

NEAR = 1.0  # seconds around a moment, in which others' lateness tells that of the event loop

BLUR = 0.2  # seconds, by which a client may see an answer begin or end late

# Of a client that reads nothing: what its connection and that to the worker buffer, pieces on their way, the objects of
# its request, and what the allocator keeps of such.
CLIENT_BYTES = 640 * 1024

# Of the settings of memory each.
TABLE_BYTES = 16_000_000

FLAGS = (
    *("--response-cache", str(CACHE_BYTES), "--queue-timeout", str(QUEUE_TIMEOUT), "--send-timeout", str(SEND_TIMEOUT)),
    *("--memory-bytes", str(TABLE_BYTES), "--text-bytes", str(TABLE_BYTES), "--max-inflight", "200"),
)

# By name: the group with which it shares answers, and how many requests it may have under way and waiting.
KEYS: Mapping[str, tuple[str | None, int, int]] = {
    "ann": ("team", 0, 64),
    "bob": ("team", 0, 64),
    "mal": ("team", 60, 64),
    "cleo": (None, 0, 64),
    "eve": (None, 60, 64),
    "few": (None, 2, 4),
    "plain": (None, 0, 64),
}

TEAM = ("ann", "bob")

HONEST, PLAIN, HOSTILE = 12, 6, 24  # clients

LARGE_BYTES = 40_000  # of a frame of answers that outgrow their share, and all that lies between two sockets

EPOCH_SECONDS, QUESTIONS = 3.0, 6  # so long the same few questions are asked

_EVENT = re.compile(rb'data: \{"id": "(\w+)", "salt": "([^"]*)", "number": (\d+), "due": (\d+)')

_EVENT_BYTES = 400  # behind which its beginning is certainly there

WORDS = (
    "late: behind the worker's step, at the client. cached: honest streams that share answers; plain: streams without\n"
    "the cache, which show how late the event loop itself is; beyond: the worst of the cached ones beyond twice the\n"
    "plain ones of that moment. cache: its own count at most, and its bound. memory: resident, and how far it may grow."
)


@dataclass
class Run:
    """What was seen; times in seconds, memory in bytes."""

    seconds: float = 0.0
    asked: Counter[str] = field(default_factory=Counter)  # requests, by the kind of client
    told: Counter[str] = field(default_factory=Counter)  # what the cache made of them
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # answers that are not those to their requests
    failed: Counter[str] = field(default_factory=Counter)  # honest requests, by what became of them
    cut: int = 0  # answers of others than honest clients that broke off
    refused_after: float = 0.0  # at most
    cached_frames: int = 0
    plain_frames: int = 0
    cached_p99: float = 0.0
    cached_most: float = 0.0
    plain_p99: float = 0.0
    plain_most: float = 0.0
    beyond_most: float = 0.0
    own_lag: float = 0.0  # of the process that measures
    health_p99: float = 0.0
    health_most: float = 0.0
    slots_most: Mapping[str, int] = field(default_factory=dict)  # at the worker, of keys that have a limit
    few_at_once: int = 0  # answers to the key that may have two, beyond doubt
    cache_most: int = 0
    memory_before: int = 0
    memory: list[int] = field(default_factory=list)  # twice a second
    connections_most: int = 0
    inflight_after: float = 0.0
    still_works: bool = False
    files_before: int = 0
    files_after: int = 0
    log: list[str] = field(default_factory=list)


class Late(NamedTuple):
    """One frame."""

    moment: float  # when it came, by time.monotonic()
    seconds: float  # since it was due
    is_large: bool


class Lateness:
    """How late frames were."""

    def __init__(self) -> None:
        self.all: list[Late] = []

    def add(self, due_ns: int, is_large: bool) -> None:
        now = time.monotonic_ns()
        self.all.append(Late(now / 1e9, (now - due_ns) / 1e9, is_large))

    def part(self, part: float) -> float:
        """As `share`."""
        return share(sorted(late.seconds for late in self.all), part) if self.all else 0.0


def beyond(cached: Sequence[Late], others: Sequence[Late]) -> float:
    """The most by which one of `cached` was later than the latest of `others` of its size around that time."""
    worst: dict[tuple[int, bool], float] = {}
    for each in others:
        second = int(each.moment), each.is_large
        worst[second] = max(worst.get(second, 0.0), each.seconds)
    most = 0.0
    for each in cached:
        if each.seconds > most:
            seconds = range(int(each.moment - each.seconds - NEAR), int(each.moment + NEAR) + 1)
            near = max(worst.get((second, each.is_large), 0.0) for second in seconds)
            most = max(most, each.seconds - CATCHING_UP * near)
    return most


def at_once(spans: Sequence[tuple[float, float]]) -> int:
    """How many were under way together, beyond doubt: each without its first and last `BLUR` seconds."""
    changes = [(begin + BLUR, 1) for begin, end in spans if end - begin > 2 * BLUR]
    changes += [(end - BLUR, -1) for begin, end in spans if end - begin > 2 * BLUR]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


class Answer(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, question: bytes, name: str, lateness: Lateness | None, read_bytes: int) -> None:
        """`read_bytes`: so many are read, then none."""
        self._question, self.name, self._lateness, self._left = question, name, lateness, read_bytes
        self._parts: list[bytes] = []
        self._asked = time.monotonic_ns()
        self.head = time.monotonic()  # when the answer's head came
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.result, self.salt = 0, "", None
        self.frames = 0
        self.wrong = ""
        self.last = b""  # the end of what came last
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # "whole", or how not
        self.seconds = 0.0
        self._is_done = self._has_stop = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self._question)
        if not self._left:
            transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self._left < 2**60:
            self._left = max(0, self._left - len(data))
            if not self._left:
                self.transport.pause_reading()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.wrong = self.wrong or f"no HTTP: {error}"
            self._end("no HTTP")

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-seamark-cache":
            self.result = value.decode()

    def on_headers_complete(self) -> None:
        self.head = time.monotonic()
        self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        if self.status != 200:
            return
        self._parts.append(part)
        if not part.endswith(b"\n\n"):  # an event is not complete; all others end with their pieces, or within one
            return
        *events, _ = b"".join(self._parts).split(b"\n\n")
        self._parts.clear()
        for event in events:
            self._see(event)

    def on_message_complete(self) -> None:
        if self.status == 200 and self._parts:
            self._see_whole(b"".join(self._parts))
        is_whole = self.status != 200 or (self._is_done and self._has_stop)
        self._end("whole" if is_whole else "without its end")

    def connection_lost(self, error: Exception | None) -> None:
        self._end("cut off")

    def _see(self, event: bytes) -> None:
        self.last = event[-100:]
        if event == b"data: [DONE]":
            self._is_done = True
        elif (told := _EVENT.match(event, 0, _EVENT_BYTES)) is not None:
            name, salt, number, due = told.groups()
            self._check(name.decode(), salt.decode())
            if int(number) != self.frames:
                self.wrong = f"frame {int(number)} where {self.frames} was to come"
            self.frames += 1
            self._has_stop |= event.endswith(b'"finish_reason":"stop"}]}')
            if self._lateness is not None and int(due) / 1e9 >= self.head:  # earlier ones it has joined too late for
                self._lateness.add(int(due), len(event) > LARGE_BYTES)

    def _see_whole(self, raw: bytes) -> None:
        self.last = raw[-100:]
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            return
        if isinstance(answer, dict) and "salt" in answer:
            self._check(answer["id"], answer["salt"])
            self._is_done = self._has_stop = True

    def _check(self, name: str, salt: str) -> None:
        if name != self.name or salt != (self.salt or salt):
            self.wrong = "another request's"
        self.salt = salt

    def _end(self, how: str) -> None:
        if not self.ended.done():
            self.seconds = (time.monotonic_ns() - self._asked) / 1e9
            self.ended.set_result(how)
        self.transport.close()


class Chaos:
    """All clients of one gateway."""

    def __init__(self, url: str, run: Run, until: float) -> None:
        self._url, self.run, self._until = url, run, until
        self.cached, self.plain = Lateness(), Lateness()
        self.open = 0
        self._salts: dict[str, str] = {}  # by group, or key without one
        self.of_few: list[tuple[float, float]] = []  # when an answer to that key that was computed began and ended

    def clients(self) -> Iterator[Any]:
        """One coroutine each, for as long as the run."""
        for number in range(HONEST):
            yield self._again(self._honest, number)
        for number in range(PLAIN):
            yield self._again(self._plain, number)
        kinds = (self._unread, self._slow, self._leaves, self._floods, self._broken, self._unread_hit, self._few)
        for number in range(HOSTILE):
            yield self._again(kinds[number % len(kinds)], number)

    async def _again(self, client: Callable[[random.Random, int], Any], number: int) -> None:
        draw = random.Random(number)
        while time.monotonic() < self._until:
            await client(draw, number)

    async def _honest(self, draw: random.Random, number: int) -> None:
        key = draw.choice((*TEAM, "cleo"))
        answer = await self._ask(key, self._question(draw), "honest", self.cached)
        how = await answer.ended
        if answer.status != 200 or how != "whole":
            self.run.failed[
                f"{answer.status} {how}, {answer.result}, behind {answer.frames} frames: {answer.last!r}"
            ] += 1
        await asyncio.sleep(draw.random() * 0.3)

    async def _plain(self, draw: random.Random, number: int) -> None:
        size = LARGE_BYTES if number % 3 == 0 else 200
        body = _body(f"plain {draw.random()}", frames=100, bytes=size, step_ms=20)
        answer = await self._ask("plain", body, "plain", self.plain, cache_control="no-store")
        how = await answer.ended
        if answer.status != 200 or how != "whole":
            self.run.failed[f"plain {answer.status} {how}"] += 1

    async def _unread(self, draw: random.Random, number: int) -> None:
        """What the honest ones ask for, and nothing, or little of it, is read."""
        answer = await self._ask("mal", self._question(draw), "unread", read_bytes=draw.choice((0, 20_000)))
        await self._leave(answer, draw.random() * 8)

    async def _slow(self, draw: random.Random, number: int) -> None:
        answer = await self._ask("mal", self._question(draw), "slow", read_bytes=1)
        for _ in range(60):
            if answer.ended.done() or time.monotonic() > self._until:
                break
            answer._left += draw.choice((2_000, 20_000, 100_000))
            answer.transport.resume_reading()
            await asyncio.sleep(0.1)
        await self._leave(answer, 0.0)

    async def _leaves(self, draw: random.Random, number: int) -> None:
        asked = [await self._ask(draw.choice(("mal", "cleo")), self._question(draw), "leaves") for _ in range(3)]
        for answer in asked:
            await self._leave(answer, draw.random() * 0.3)

    async def _floods(self, draw: random.Random, number: int) -> None:
        """Other answers all the time, large ones among them, some of which nobody reads."""
        size = draw.choice((1_000, 50_000, 900_000))
        unread = draw.random() < 0.2
        body = _body(f"flood {draw.random()}", frames=1, bytes=size, step_ms=0, stream=draw.random() < 0.5)
        answer = await self._ask("eve", body, "floods", read_bytes=0 if unread else 2**60)
        await self._leave(answer, 2.0)

    async def _broken(self, draw: random.Random, number: int) -> None:
        """Answers that break off, for several at once."""
        ending, number = draw.choice((*BROKEN,)), draw.randrange(10**9)
        body = _body(f"broken {number}", frames=10, bytes=500, step_ms=10, ending=ending, stream=draw.random() < 0.7)
        asked = [await self._ask(key, body, "broken") for key in ("mal", "cleo", "mal")]
        for answer in asked:
            await self._leave(answer, 5.0)

    async def _unread_hit(self, draw: random.Random, number: int) -> None:
        """Large stored answers, asked for and not read."""
        body = _body(f"stored {draw.randrange(8)}", frames=20, bytes=30_000, step_ms=0)
        answer = await self._ask("eve", body, "unread hit")
        await self._leave(answer, 5.0)
        asked = [await self._ask("eve", body, "unread hit", read_bytes=0) for _ in range(6)]
        await asyncio.sleep(draw.random() * 3)
        for answer in asked:
            await self._leave(answer, 0.0)

    async def _few(self, draw: random.Random, number: int) -> None:
        """Many of a key that may have few, the same and others."""
        number = draw.randrange(10**9)
        bodies = [_body(f"few {number} {draw.randrange(3)}", frames=20, bytes=200, step_ms=50) for _ in range(20)]
        asked = [await self._ask("few", body, "few") for body in bodies]
        for answer in asked:
            await self._leave(answer, 10.0)

    def _question(self, draw: random.Random) -> dict[str, Any]:
        """One of the few that are asked at present: streams that are kept, and such as outgrow their share."""
        number = draw.randrange(QUESTIONS)
        if number == 0:
            shape: dict[str, Any] = {"frames": 200, "bytes": LARGE_BYTES, "step_ms": 20}
        elif number == 1:
            shape = {"frames": 20, "bytes": 2_000, "step_ms": 20, "stream": False}
        else:
            shape = {"frames": 100, "bytes": 200 * number, "step_ms": 20}
        return _body(f"{int(time.monotonic() / EPOCH_SECONDS)} {number}", **shape)

    async def _ask(
        self,
        key: str,
        body: dict[str, Any],
        kind: str,
        lateness: Lateness | None = None,
        read_bytes: int = 2**60,
        **headers: str,
    ) -> Answer:
        raw = json.dumps(body).encode()
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        question = request(self._url, raw, headers={"x-seamark-cache": "allow", **bearer(key), **headers})
        at = urlsplit(self._url)
        plug = socket.socket()
        plug.setblocking(False)
        if read_bytes < 2**60:
            plug.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(plug, (at.hostname, at.port))
        answer = Answer(question, name_of(body), lateness, read_bytes)
        self.run.asked[kind] += 1
        self.open += 1
        self.run.connections_most = max(self.run.connections_most, self.open)
        await loop.create_connection(lambda: answer, sock=plug)
        answer.ended.add_done_callback(lambda _: self._over(answer, key, kind))
        return answer

    def _over(self, answer: Answer, key: str, kind: str) -> None:
        run = self.run
        self.open -= 1
        run.statuses[str(answer.status)] += 1
        run.told[answer.result] += 1
        if answer.salt is not None:
            group = KEYS[key][0] or key
            if self._salts.setdefault(group, answer.salt) != answer.salt:
                answer.wrong = "of another group"
        if key == "few" and answer.result in ("miss", "joined"):
            self.of_few.append((answer.head, time.monotonic()))
        if answer.wrong:
            run.wrong.append(f"{kind}: {answer.wrong}")
        if answer.status in (429, 503):
            run.refused_after = max(run.refused_after, answer.seconds)
        if answer.ended.result() != "whole" and kind not in ("honest", "plain"):
            run.cut += 1

    @staticmethod
    async def _leave(answer: Answer, seconds: float) -> None:
        """After so long, or when it is over."""
        await asyncio.wait((answer.ended,), timeout=seconds)
        answer.transport.abort()
        await answer.ended

    @property
    def groups(self) -> int:
        """Groups of keys that have got answers, and how many different ones."""
        return len(set(self._salts.values())) - len(self._salts)

    def salt(self, key: str) -> str:
        """What the worker knows it by."""
        return self._salts.get(KEYS[key][0] or key, "")


def _body(question: str, stream: bool = True, ending: str = STOP, **shape: int) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0.7, "seed": 7}
    return {**body, "stream": stream, FIELD: {**shape, "ending": ending}}


def metric(text: str, name: str) -> float:
    """The sum of its samples."""
    lines = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def run_for(servers: Servers, folder: Path, seconds: float) -> Run:
    """One gateway before one worker, for so long."""
    keys = folder / "keys.toml"
    fields = {
        name: {"max_inflight": most, "max_queued": queued, **({"share": share_} if share_ else {})}
        for name, (share_, most, queued) in KEYS.items()
    }
    keys.write_text("".join(entry(name, **each) for name, each in fields.items()) + entry("admin", admin=True))
    worker = paced_worker(servers)
    await asyncio.to_thread(worker.wait_until_ready, "/health")
    gateway = servers.gateway(worker, flags=(*FLAGS, "--api-keys", str(keys)))
    await asyncio.to_thread(gateway.wait_until_ready, "/ready")
    run = Run(seconds, memory_before=resident_bytes(gateway.process.pid))
    await asyncio.sleep(1)
    run.files_before = open_files(gateway.process.pid)
    until = time.monotonic() + seconds
    chaos, took, lags = Chaos(gateway.url, run, until), [], []
    async with httpx.AsyncClient(timeout=60) as pages:

        async def page(server: Server, path: str) -> httpx.Response:
            return await pages.get(server.url + path, headers=bearer("admin"))

        async def watch() -> None:
            while time.monotonic() < until:
                text = (await page(gateway, "/metrics")).text
                run.cache_most = max(run.cache_most, int(metric(text, "seamark_response_cache_bytes")))
                run.memory.append(resident_bytes(gateway.process.pid))
                await asyncio.sleep(0.5)

        async def own_lag() -> None:
            while time.monotonic() < until:
                before = time.monotonic()
                await asyncio.sleep(0.01)
                now = time.monotonic()
                lags.extend(Late(now, now - before - 0.01, is_large) for is_large in (False, True))

        health_failed, *_ = await asyncio.gather(ask_health(gateway, until, took), watch(), own_lag(), *chaos.clients())
        if health_failed:
            run.failed["health"] = health_failed
        seen = (await page(worker, "/seen")).json()
        run.slots_most = {key: seen["most"].get(chaos.salt(key), 0) for key in ("few", "eve")}
        run.few_at_once = at_once(chaos.of_few)
        if chaos.groups:
            run.wrong.append("groups of keys have one salt")
        run.files_after = await settled_files(gateway, run.files_before)
        run.inflight_after = metric((await page(gateway, "/metrics")).text, "seamark_inflight")
        last = []
        for _ in range(2):
            answer = await chaos._ask("ann", _body("last", frames=4, bytes=100, step_ms=0), "last")
            last.append((await answer.ended, answer.result))
        run.still_works = last == [("whole", "miss"), ("whole", "hit")]
    run.cached_frames, run.plain_frames = len(chaos.cached.all), len(chaos.plain.all)
    run.cached_p99, run.cached_most = chaos.cached.part(0.99), chaos.cached.part(1.0)
    run.plain_p99, run.plain_most = chaos.plain.part(0.99), chaos.plain.part(1.0)
    run.beyond_most = beyond(chaos.cached.all, [*chaos.plain.all, *lags])
    run.own_lag = max(lag.seconds for lag in lags)
    run.health_p99, run.health_most = share(sorted(took), 0.99), share(sorted(took), 1.0)
    # A worker that breaks off within an answer makes the gateway do the same; that is said by this line.
    run.log = [line for line in bad_lines(gateway, 0) if "without completing response" not in line][:20]
    return run


def memory_most(run: Run) -> int:
    """Resident bytes at the worst moment."""
    return max(run.memory, default=0)


def memory_bound(run: Run) -> int:
    """Resident bytes that the gateway may take."""
    return CODE_BYTES + 2 * TABLE_BYTES + CACHE_BYTES + run.connections_most * CLIENT_BYTES


def complaints(run: Run, with_times: bool = True) -> list[str]:
    """What did not hold; without times what depends on the machine is left out."""
    found = [f"an answer was wrong: {wrong}" for wrong in run.wrong[:10]]
    found += [f"{count} honest requests: {how}" for how, count in run.failed.items()]
    if with_times and run.beyond_most > STREAM_GAP:
        found.append(f"a cached stream stood still for {1000 * run.beyond_most:.0f} ms beyond the others")
    if with_times and run.refused_after > QUEUE_TIMEOUT + REFUSAL_LATE + run.own_lag + run.health_most:
        found.append(f"a refusal came after {run.refused_after:.1f} s, {QUEUE_TIMEOUT:g} are to be waited for at most")
    for key, most in run.slots_most.items():
        if most > KEYS[key][1]:
            found.append(f"{most} requests of {key} were at the worker at once, {KEYS[key][1]} allowed")
    if with_times and run.few_at_once > KEYS["few"][1]:
        found.append(f"few got {run.few_at_once} answers under way at once, {KEYS['few'][1]} allowed")
    if run.cache_most > CACHE_BYTES:
        found.append(f"the cache held {run.cache_most} bytes, {CACHE_BYTES} allowed")
    if memory_most(run) > memory_bound(run):
        found.append(f"{memory_most(run) / 2**20:.0f} MiB resident, the bound is {memory_bound(run) / 2**20:.0f}")
    if run.files_after > run.files_before:
        found.append(f"{run.files_after} descriptors open, {run.files_before} before")
    if run.inflight_after:
        found.append(f"{run.inflight_after:g} requests still count at the worker")
    if not run.still_works:
        found.append("the cache answers no repeat any more")
    missing = [each for each in ("hit", "joined", "miss", "bypass") if not run.told[each]]
    if missing:
        found.append(f"no answer was: {', '.join(missing)}")
    return found + [f"log: {line}" for line in run.log]


def quarters(memory: Sequence[int]) -> str:
    """The most in each quarter of the run, in MiB: what grows without end grows in each."""
    part = max(1, len(memory) // 4)
    return " ".join(f"{max(memory[at : at + part]) / 2**20:.0f}" for at in range(0, len(memory), part)[:4])


def render(run: Run, wrongs: Sequence[str]) -> str:
    """The run and the verdict."""

    def ms(*values: float) -> str:
        return ", ".join(f"{1000 * value:.1f}" for value in values)

    def counts(of: Mapping[str, float]) -> str:
        return ", ".join(f"{name or 'none'} {count:g}" for name, count in sorted(of.items()))

    rows = {
        "asked": counts(run.asked),
        "answered": counts(run.told),
        "statuses": counts(run.statuses),
        "broken off": f"{run.cut} answers of others than honest clients",
        "late, ms": f"cached p99, most: {ms(run.cached_p99, run.cached_most)} ({run.cached_frames} frames); plain: "
        f"{ms(run.plain_p99, run.plain_most)} ({run.plain_frames}); beyond: {ms(run.beyond_most)}",
        "loops, ms": f"/health p99, most: {ms(run.health_p99, run.health_most)}; this process: {ms(run.own_lag)}",
        "slots": f"most at the worker: {counts(run.slots_most)}; few's answers at once: {run.few_at_once}",
        "refusals": f"after {run.refused_after:.1f} s at most, queue_timeout is {QUEUE_TIMEOUT:g} s",
        "cache": f"{run.cache_most} of {CACHE_BYTES} bytes",
        "memory, MiB": f"{run.memory_before / 2**20:.0f} before, at most in each quarter {quarters(run.memory)}, "
        f"{memory_bound(run) / 2**20:.0f} allowed beside {run.connections_most} connections",
        "files": f"{run.files_before} -> {run.files_after}",
    }
    lines = [f"{name:<12} {text}" for name, text in rows.items()]
    return "\n".join([f"{run.seconds:g} s", *lines, *(wrongs or ["held"])])


def main(argv: list[str], say: Callable[[str], None] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.response_cache_chaos", description="many clients on the response cache"
    )
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--json", action="store_true", help="print the report instead of the table")
    args = parser.parse_args(argv)
    say = say or narrator()
    say(f"{HONEST} honest streams beside {HOSTILE} other clients, {args.minutes:g} minutes")
    folder = Path(tempfile.mkdtemp(prefix="seamark-response-cache-"))
    with Servers(folder) as servers:
        run = asyncio.run(run_for(servers, folder, args.minutes * 60))
    wrongs = complaints(run)
    report = {**asdict(run), "wrongs": wrongs, "held": not wrongs}
    print(json.dumps(report, indent=1) if args.json else f"{render(run, wrongs)}\n\n{WORDS}")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
