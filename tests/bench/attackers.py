"""Attackers at full speed, in a process and on a core of their own: `python -m tests.bench.attackers URL --seconds N`.

All send one kind after the other, each for `SLOT_SECONDS`, but for every fourth, who mixes them. Prints how often each
kind was sent as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import uvloop

from tests.bench import fuzz_framing
from tests.harness.mock_worker import FRAMES_FIELD, MODEL, STEP_FIELD
from tests.harness.raw_http import request

CHAT = "/v1/chat/completions"

PATIENCE = 5.0  # seconds for an answer, then the attacker goes on

SLOT_SECONDS = 5.0  # or less, so that each kind has its turn

MIXES = 4

HELD_OPEN = 100  # connections that are left as they are; the oldest is closed for a new one

JSON = {"content-type": "application/json"}


class Attack(NamedTuple):
    """What is written, piece by piece, and what is done then."""

    pieces: list[bytes]
    reads: bool = True  # waits for the answer's first bytes; if not, the connection is left open, unread
    leaves: bool = False  # closes at once


def _chat(body: Mapping[str, object]) -> bytes:
    return request("POST", CHAT, JSON, json.dumps({"model": MODEL, **body}).encode())


def _padded(start: bytes, item: bytes, end: bytes, size: int) -> bytes:
    return request("POST", CHAT, JSON, start + b",".join([item] * (size // (len(item) + 1))) + end)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


MESSAGES = b'{"model":"%b","messages":[' % MODEL.encode()

EMPTY = _padded(MESSAGES, b"{}", b"]}", 2**20)

PARTS = _padded(MESSAGES + b'{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}", 8 * 2**20)

BRACKETS = _padded(MESSAGES, b"[]", b"]}", 40 * 2**20)

FIELDS = _padded(MESSAGES + b"],", b'"a":1', b"}", 4 * 2**20)

DEEP = request("POST", CHAT, JSON, b'{"model":' + b"[" * 500_000)

LONG_TEXT = _padded(MESSAGES + b'{"role":"user","content":"', b"x" * 999, b'"}]}', 2**20)

NUMBERS = request("POST", "/v1/completions", JSON, json.dumps({"model": MODEL, "prompt": [1] * 100_000}).encode())

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"

CONNECTIONS = b"GET /v1/x HTTP/1.1\r\nhost: g\r\n" + b"connection: a,b,c\r\n" * 3000 + b"\r\n"


def _kinds(rng: random.Random, serial: Iterator[int]) -> dict[str, Callable[[], Attack]]:
    def fresh_heads() -> Attack:
        marked = [{"type": "text", "text": f"{next(serial)} " * 600, "cache_control": {"type": "ephemeral"}}] * 8
        return Attack([_chat({"messages": [{"role": "system", "content": marked}, _user("Tide?")]})])

    def fresh_settings() -> Attack:
        kwargs = {f"mode{next(serial)}": True}
        return Attack([_chat({"messages": [_user("Tide?")], "chat_template_kwargs": kwargs})])

    def fresh_template() -> Attack:
        template = "{{ messages[0].content }}" + str(next(serial))
        return Attack([_chat({"messages": [_user("Tide?")], "chat_template": template})])

    def many_messages() -> Attack:
        return Attack([_chat({"messages": [_user(f"{next(serial)}")] * 5000})])

    def unread() -> Attack:
        stream = {"messages": [_user("Tide?")], "stream": True, STEP_FIELD: 1, FRAMES_FIELD: 100_000}
        return Attack([_chat(stream)], reads=False)

    def framing() -> Attack:
        return Attack([rng.choice(list(fuzz_framing.ambiguous(f"a{next(serial)}").values()))])

    def odd() -> Attack:
        return Attack([fuzz_framing.odd(rng, f"a{next(serial)}")])

    def upgrade() -> Attack:
        fields = {"connection": "upgrade", "upgrade": "h2c"}
        return Attack([request("POST", CHAT, fields, fuzz_framing.inner("hidden"))])

    def half() -> Attack:
        whole = LONG_TEXT[: rng.randrange(100, len(LONG_TEXT))]
        return Attack([whole], leaves=True)

    def pipelined() -> Attack:
        return Attack([request("GET", "/v1/x", {}) * 200])

    return {
        "empty messages, 1 MiB": lambda: Attack([EMPTY]),
        "parts, 8 MiB": lambda: Attack([PARTS]),
        "brackets, 40 MiB": lambda: Attack([BRACKETS]),
        "fields, 4 MiB": lambda: Attack([FIELDS]),
        "deep": lambda: Attack([DEEP]),
        "long text, 1 MiB": lambda: Attack([LONG_TEXT]),
        "100,000 token ids": lambda: Attack([NUMBERS]),
        "5,000 messages": many_messages,
        "8 marks in a fresh head": fresh_heads,
        "fresh settings": fresh_settings,
        "fresh template": fresh_template,
        "unread stream": unread,
        "slow head": lambda: Attack([HEAD], reads=False),
        "slow body": lambda: Attack([HEAD + b"content-length: 100\r\n\r\n{"], reads=False),
        "answered before its body": lambda: Attack([b"GET /v1/x HTTP/1.1\r\ncontent-length: 9\r\n\r\n", b"1"], False),
        "malformed chunk": lambda: Attack([HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n"]),
        "too long": lambda: Attack([HEAD + b"content-length: 99999999999\r\nexpect: 100-continue\r\n\r\n"]),
        "connection fields, 58 kB": lambda: Attack([CONNECTIONS]),
        "long query": lambda: Attack([request("GET", "/v1/x?" + "q" * 9000, {})]),
        "framing": framing,
        "odd": odd,
        "upgrade": upgrade,
        "left in the middle": half,
        "pipelined": pipelined,
    }


KINDS = tuple(_kinds(random.Random(0), itertools.count()))


def slot_seconds(seconds: float) -> float:
    """How long it is a kind's turn in attacks of so many seconds."""
    return min(SLOT_SECONDS, seconds / len(KINDS))


class Attackers:
    """All of them."""

    def __init__(self, url: str, seconds: float) -> None:
        at = urlsplit(url)
        self._address = at.hostname, at.port
        self._began = time.monotonic()
        self._until = self._began + seconds
        self._slot = slot_seconds(seconds)
        self._serial = itertools.count()
        self._open: deque[asyncio.StreamWriter] = deque()
        self.sent: Counter[str] = Counter()

    async def run(self, number: int) -> None:
        """One attacker, until time is up."""
        rng = random.Random(number)
        kinds = list(_kinds(rng, self._serial).items())
        for turn in itertools.count(number):
            if (now := time.monotonic()) >= self._until:
                return
            if number % MIXES:
                turn = int((now - self._began) / self._slot)
            name, make = kinds[turn % len(kinds)]
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._attack(make())
            except (OSError, TimeoutError):
                pass
            self.sent[name] += 1

    async def _attack(self, attack: Attack) -> None:
        reader, writer = await asyncio.open_connection(*self._address)
        kept = False
        try:
            for piece in attack.pieces:
                writer.write(piece)
                await writer.drain()
            if attack.leaves:
                return
            if not attack.reads:
                kept = True
                self._open.append(writer)
                if len(self._open) > HELD_OPEN:
                    self._open.popleft().transport.abort()
                return
            await reader.read(2**16)
        finally:
            if not kept:
                writer.transport.abort()

    def close(self) -> None:
        """Whatever is still open."""
        for writer in self._open:
            writer.transport.abort()


async def attack(url: str, attackers: int, seconds: float) -> Mapping[str, int]:
    """How often each kind was sent."""
    all_of_them = Attackers(url, seconds)
    await asyncio.gather(*(all_of_them.run(number) for number in range(attackers)))
    all_of_them.close()
    return {name: all_of_them.sent[name] for name in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attackers", description="attackers at full speed")
    parser.add_argument("url")
    parser.add_argument("--attackers", type=int, default=16)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--core", type=int, help="stay on this one")
    args = parser.parse_args()
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    print(json.dumps(uvloop.run(attack(args.url, args.attackers, args.seconds))))


if __name__ == "__main__":
    main()
