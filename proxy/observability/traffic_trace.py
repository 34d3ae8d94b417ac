"""Traffic as a trace in Mooncake's format, without its text: a line of JSON for each request that a worker answered.

Blocks of a prompt are named by hashes with a key that is drawn at the start and written nowhere. The file tells when
requests came, how long prompts and answers were, and how far prompts begin alike; to whoever has it, no more than that.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2s
from pathlib import Path
from typing import Any

import msgspec

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
        self._began = time.perf_counter() - _seconds_in(path)
        self._key, self._told, self._closing = os.urandom(32), "", asyncio.Event()
        self._waiting: deque[tuple[Chat, Worker, int, dict[str, Any]]] = deque()
        self._writing: asyncio.Task[None] | None = None

    def add(self, chat: Chat, worker: Worker, memory: int, arrived: float, session: str | None, output: int) -> None:
        """A request of so many bytes that came at `arrived` (`time.perf_counter`) was answered with `output` tokens."""
        if self.held and self.held + memory > self._room:
            self._results[("no_room",)] += 1
            return
        self.held += memory
        row = {"timestamp": round((arrived - self._began) * 1e3), "output_length": max(1, output)}
        if session is not None:
            row["session"] = int.from_bytes(self._hash(canonical([chat.body.get("cache_salt"), session]))[:4])
        self._waiting.append((chat, worker, memory, row))
        if self._writing is None or self._writing.done():
            self._writing = beside(self._write())

    async def aclose(self) -> None:
        self._closing.set()
        await self._idle.caught_up()  # the last requests are settled
        await asyncio.wait([self._writing or beside(self._write())], timeout=STOP_SECONDS)
        if self._waiting:
            logger.warning("%d requests are missing in %s: the gateway has stopped", len(self._waiting), self._path)

    async def _write(self) -> None:
        while self._waiting:
            await self._idle.lull()
            began, (chat, worker, memory, row) = time.perf_counter(), self._waiting[0]
            try:
                await asyncio.to_thread(self._append, b"")  # nothing is rendered for a file that takes no line
                ids = await prompt_of(chat, worker)
                row |= {"input_length": len(ids), "hash_ids": await self._idle.finish(self._names(chat, ids))}
                await asyncio.to_thread(self._append, msgspec.json.encode(row) + b"\n")
                why = ""
            except Exception as error:  # the kind, or the system's words: another message might hold prompt text
                why = getattr(error, "strerror", None) or type(error).__name__
                if why != self._told:
                    logger.warning("from now on, requests are missing in %s: %s", self._path, why)
            self._told = why
            self._waiting.popleft()
            self.held -= memory
            self._results[("lost" if why else "written",)] += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), (time.perf_counter() - began) * REST)

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
            if (size := file.tell()) >= MAX_BYTES or file.write(line) < len(line):
                file.truncate(size)  # no half lines
                raise OSError(errno.EFBIG, f"no room behind its {size:,} bytes")


def _seconds_in(path: Path) -> float:
    """How long the trace in a file has gone on by now; 0 if there is none. Raises `SettingsError`."""
    try:
        with open(path, "ab+", opener=_private) as file:
            since = max(0.0, time.time() - path.stat().st_mtime)
            file.seek(max(0, file.tell() - TAIL_BYTES))
            if not (tail := file.read()):
                return 0.0
            *lines, torn = tail.split(b"\n")
            last = float(msgspec.json.decode(lines[-1] if lines else torn)["timestamp"])
            if torn:  # the machine went down while it was written
                file.truncate(file.tell() - len(torn))
        return last / 1e3 + since
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it holds something else"
        raise SettingsError(f"trace: {path} cannot get a trace ({why}); name another file") from None
