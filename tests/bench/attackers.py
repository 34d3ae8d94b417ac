"""Attackers at full speed, in a process and on a core of their own: `python -m tests.bench.attackers URL N SECONDS`.

All send one kind after the other, each for `SLOT_SECONDS`, but for every fourth, who mixes them. Prints how often each
kind was sent as JSON.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
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
            if number % MIXES:
                turn = int((now - self._began) / self._slot)
            name = KINDS[turn % len(KINDS)]
            made = _SAME[name] if name in _SAME else _FRESH[name](rng, next(self._serial))
            try:
                async with asyncio.timeout(PATIENCE):
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
            if len(self._open) > HELD_OPEN:
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


if __name__ == "__main__":
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(json.dumps(uvloop.run(attack(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))))
