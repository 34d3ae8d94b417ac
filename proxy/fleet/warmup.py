"""Which prefixes a restarted worker should hold before it takes requests, and giving them to it.

Prompts are kept for this, bounded in bytes, in memory only: a request that shared its prefix stands for that prefix,
and is sent again for one token.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from proxy.boundaries.boundary import Boundary
from proxy.chat.chat import RESPONSES
from proxy.http.json_body import HINT, TRANSFERS, XARGS, with_fields

# A prefix nobody has used for so long (seconds) counts half.
HALF_LIFE = 300.0

ENTRY_BYTES = 2000  # of an entry beside its body

MAX_REPLAYS = 64

# Requests at once: enough to fill passes, few enough that the hottest are there first.
CONCURRENCY = 4

_ONE_TOKEN = {"max_tokens": 1, "stream": False}

_ONE_TOKEN_OF_A_RESPONSE = {"max_output_tokens": 1, "stream": False, "store": False}

_OF_THE_ANSWER = (
    "stream_options",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "best_of",
    "use_beam_search",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "response_format",
    "structured_outputs",
    "background",
)


class WarmupRequest(NamedTuple):
    """A request that a prefix can be computed from again."""

    endpoint: str
    raw: bytes  # as the client sent it, without a hint
    names: tuple[str, ...]  # outermost fields of it
    put: Mapping[str, Any]  # fields the gateway sets: the salt
    boundaries: Sequence[Boundary]
    model: Any

    def body_with(self, positions: Sequence[int]) -> bytes:
        """The request for one token, and hardly anything else, with `positions` as its hint."""
        put = {**self.put, **(_ONE_TOKEN_OF_A_RESPONSE if self.endpoint == RESPONSES else _ONE_TOKEN)}
        put[XARGS] = {HINT: list(positions)}
        return with_fields(self.raw, self.names, put, (*_OF_THE_ANSWER, *TRANSFERS))


class _Hot:
    __slots__ = ("at", "replay", "tokens", "uses")

    def __init__(self, replay: WarmupRequest, tokens: int, uses: float, at: float) -> None:
        self.replay = replay
        self.tokens = tokens
        self.uses = uses  # those long ago count less
        self.at = at


class WarmupSet:
    """Prefixes that were shared, by key; the least recently used is forgotten first."""

    def __init__(self, size: int) -> None:
        """`size` in bytes; 0 keeps nothing."""
        self._size = size
        self.held = 0
        self._entries: OrderedDict[bytes, _Hot] = OrderedDict()

    def used_again(self, key: bytes, now: float | None = None) -> bool:
        """A request shared the prefix `key`; whether that is known."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        now = time.monotonic() if now is None else now
        entry.uses = entry.uses * _faded(now - entry.at) + 1
        entry.at = now
        self._entries.move_to_end(key)
        return True

    def add(
        self, key: bytes, tokens: int, shorter: Collection[bytes], replay: WarmupRequest, now: float | None = None
    ) -> None:
        """A request shared `tokens` under the new `key`; `shorter` are keys of what that prefix itself begins with."""
        now = time.monotonic() if now is None else now
        if len(replay.raw) + ENTRY_BYTES > self._size:
            return
        for each in shorter:  # an earlier turn of the same conversation, which nobody else has used
            if (found := self._entries.get(each)) is not None and found.uses < 1.5:
                self._forget(each)
        self._entries[key] = _Hot(replay, tokens, 1.0, now)
        self.held += len(replay.raw) + ENTRY_BYTES
        while self.held > self._size:
            self._forget(next(iter(self._entries)))

    def hottest(self, models: Collection[Any], now: float | None = None) -> list[WarmupRequest]:
        """What to compute first: the prefixes that save the most tokens in a given time."""
        now = time.monotonic() if now is None else now
        wanted = [entry for entry in self._entries.values() if entry.replay.model in models]
        wanted.sort(key=lambda entry: -entry.tokens * entry.uses * _faded(now - entry.at))
        return [entry.replay for entry in wanted[:MAX_REPLAYS]]

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: bytes) -> None:
        self.held -= len(self._entries.pop(key).replay.raw) + ENTRY_BYTES


def _faded(seconds: float) -> float:
    return math.exp2(-seconds / HALF_LIFE)


async def send_all(replays: Sequence[WarmupRequest], one: Callable[[WarmupRequest], Awaitable[None]]) -> None:
    """Run `one(replay)` for each, a few at once, the first ones first."""
    waiting = iter(replays)

    async def work() -> None:
        for replay in waiting:
            await one(replay)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(CONCURRENCY, len(replays))):
            group.create_task(work())
