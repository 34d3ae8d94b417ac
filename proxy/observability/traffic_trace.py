"""Traffic as a trace in Mooncake's format, without its text: a line of JSON for each request that a worker answered.

Blocks of a prompt are named by hashes with a key that is drawn at the start and written nowhere. The file tells when
requests came, how long prompts and answers were, and how far prompts begin alike; to whoever has it, no more than that.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2s
from pathlib import Path
from typing import Any

from proxy.chat.canonical import canonical
from proxy.chat.chat import Chat
from proxy.errors import SettingsError
from proxy.fleet.part import Part
from proxy.fleet.worker import Worker, prompt_of
from proxy.idle_work import IdleWork, Steps, beside
from proxy.metrics import Tally

logger = logging.getLogger("seamark.trace")

BLOCK = 16  # tokens
STEP_TOKENS = 32 * BLOCK  # hashed in one step
REST = 4.0  # seconds for each one of rendering, which so takes at most a fifth of one of the worker's cores
MAX_BYTES = 2**30  # of the file, which is opened for each line: a new one begins once it is moved away
TAIL_BYTES = 2**20  # in which a file's last line lies
STOP_SECONDS = 5.0  # for the last lines, when the gateway stops

_private = partial(os.open, mode=0o600)


class TrafficTrace(Part):
    """Has prompts rendered once more, one at a time and beside requests, to know their tokens."""

    name = "trace"

    def __init__(self, path: Path, room: int, results: Tally, idle: IdleWork) -> None:
        """`room`: bytes that waiting requests may take. Raises `SettingsError`."""
        self._path, self._room, self._results, self._idle = path, room, results, idle
        self._key, self._rest, self._turn = os.urandom(32), REST, asyncio.Lock()
        self._began = time.perf_counter() - _seconds_in(path)

    def add(self, chat: Chat, worker: Worker, memory: int, arrived: float, session: str | None, output: int) -> None:
        """A request of so many bytes that came at `arrived` (`time.perf_counter`) was answered with `output` tokens."""
        if self.held and self.held + memory > self._room:
            self._results[("no_room",)] += 1
            return
        self.held += memory
        row = {"timestamp": round((arrived - self._began) * 1e3), "output_length": max(1, output)}
        if session is not None:
            row["session"] = int.from_bytes(self._hash(canonical([chat.body.get("cache_salt"), session]))[:4])
        beside(self._write(chat, worker, memory, row))

    async def aclose(self) -> None:
        self._rest = 0.0
        await self._idle.caught_up()  # the last requests are settled
        await asyncio.sleep(0)  # and wait for their turn
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS), self._turn:
                pass  # all others have had their turn

    async def _write(self, chat: Chat, worker: Worker, memory: int, row: dict[str, Any]) -> None:
        async with self._turn:
            await self._idle.lull()
            began, result = time.perf_counter(), "written"
            try:
                ids = await prompt_of(chat, worker)
                row |= {"input_length": len(ids), "hash_ids": await self._idle.finish(self._names(chat, ids))}
                await asyncio.to_thread(self._append, json.dumps(row, separators=(",", ":")).encode() + b"\n")
            except Exception as error:  # the kind, or the system's words: another message might hold prompt text
                why = getattr(error, "strerror", None) or type(error).__name__
                logger.warning("a request is missing in %s: %s", self._path, why)
                result = "lost"
            self.held -= memory
            self._results[(result,)] += 1
            await asyncio.sleep((time.perf_counter() - began) * self._rest)

    def _names(self, chat: Chat, ids: Sequence[int]) -> Steps[list[int]]:
        """Names of all blocks, a shorter last one included: equal where all up to a block's end is equal."""
        # What parts caches parts blocks, too. All images have the same tokens: nothing is said to be shared.
        apart = [chat.head.get("model"), chat.body.get("cache_salt")]
        names, name = [], os.urandom(16) if chat.media else self._hash(canonical(apart))
        for start in range(0, len(ids), BLOCK):
            if start % STEP_TOKENS == 0:
                yield
            name = self._hash(name + array("Q", ids[start : start + BLOCK]).tobytes())
            names.append(int.from_bytes(name[:4]) >> 1)  # GuideLLM reads no larger ones
        return names

    def _hash(self, content: bytes) -> bytes:
        return blake2s(content, digest_size=16, key=self._key).digest()

    def _append(self, line: bytes) -> None:
        with open(self._path, "ab", buffering=0, opener=_private) as file:
            if (size := file.tell()) + len(line) > MAX_BYTES or file.write(line) < len(line):
                file.truncate(size)  # no half lines
                raise OSError(errno.EFBIG, f"no room behind its {size:,} bytes")


def _seconds_in(path: Path) -> float:
    """How long the trace in a file has gone on by now; 0 if there is none. Raises `SettingsError`."""
    try:
        with open(path, "ab+", opener=_private) as file:
            file.seek(max(0, file.tell() - TAIL_BYTES))
            lines = file.read().splitlines()
        since = max(0.0, time.time() - path.stat().st_mtime)
        return float(json.loads(lines[-1])["timestamp"]) / 1e3 + since if lines else 0.0
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it holds something else"
        raise SettingsError(f"trace: {path} cannot get a trace ({why}); name another file") from None
