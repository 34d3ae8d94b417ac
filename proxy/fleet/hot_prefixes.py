"""Warming up a restarted worker: which prefixes it should hold before it takes requests, and replaying them on it.

Prompts are kept for this, bounded in bytes, in memory only. A request that shared its prefix stands for that prefix,
and is replayed for one token.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from proxy.boundaries.boundary import Entry, Found
from proxy.chat.reader import HINTED
from proxy.http.json_body import HINT, PIN, TRANSFERS, XARGS, with_fields

T = TypeVar("T")

HALF_LIFE = 300.0  # seconds; a prefix that nobody has used for so long counts half
ENTRY_BYTES = 2000  # of an entry beside its body
MAX_REPLAYS = 64
CONCURRENCY = 4  # replays at once: enough to fill passes, few enough that the hottest prefixes are there first

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
    """A request from which a prefix can be computed again."""

    endpoint: str
    raw: bytes  # as the client sent it, without a hint
    names: tuple[str, ...]  # outermost fields of it
    put: Mapping[str, Any]  # fields the gateway sets: the salt
    found: Found
    model: Any

    def body_with(self, hint: Sequence[Entry], *, pin: bool | None = None) -> bytes:
        """The request for one token, with this hint. `pin`: the engine is to keep the prompt, or to let it go again."""
        put = {**self.put, **HINTED[self.endpoint].one_token, "stream": False}
        put[XARGS] = {HINT: list(hint)} if pin is None else {HINT: list(hint), PIN: int(pin)}
        return with_fields(self.raw, self.names, put, (*_OF_THE_ANSWER, *TRANSFERS))


@dataclass(slots=True)
class _HotPrefix:
    request: WarmupRequest
    tokens: int
    uses: float  # those long ago count less
    used_at: float  # time.monotonic()

    @property
    def size(self) -> int:
        return len(self.request.raw) + ENTRY_BYTES

    def uses_at(self, now: float) -> float:
        return self.uses * math.exp2((self.used_at - now) / HALF_LIFE)


@dataclass(eq=False, repr=False)
class WarmupSet:
    """Prefixes that were shared, by key; the least recently used is forgotten first."""

    _size: int  # bytes; 0 keeps nothing
    held: int = 0
    _entries: OrderedDict[bytes, _HotPrefix] = field(default_factory=OrderedDict)

    def used_again(self, key: bytes) -> bool:
        """Count another request that shared the prefix `key`; False if that prefix is not known."""
        if (entry := self._entries.get(key)) is None:
            return False
        now = time.monotonic()
        entry.uses, entry.used_at = entry.uses_at(now) + 1, now
        self._entries.move_to_end(key)
        return True

    def add(self, key: bytes, tokens: int, shorter: Collection[bytes], request: WarmupRequest) -> None:
        """Keep a `request` that shared `tokens` under the new `key`; `shorter` are keys of its earlier beginnings."""
        entry = _HotPrefix(request, tokens, 1.0, time.monotonic())
        if entry.size > self._size:
            return
        for each in shorter:  # an earlier turn of the same conversation, which nobody else has used
            if (found := self._entries.get(each)) is not None and found.uses < 1.5:
                self._forget(each)
        self._entries[key] = entry
        self.held += entry.size
        while self.held > self._size:
            self._forget(next(iter(self._entries)))

    def hottest(self, models: Collection[Any]) -> list[WarmupRequest]:
        """What to compute first: the prefixes that save the most tokens in a given time."""
        now = time.monotonic()
        wanted = [entry for entry in self._entries.values() if entry.request.model in models]
        wanted.sort(key=lambda entry: -entry.tokens * entry.uses_at(now))
        return [entry.request for entry in wanted[:MAX_REPLAYS]]

    def __len__(self) -> int:
        return len(self._entries)

    def _forget(self, key: bytes) -> None:
        self.held -= self._entries.pop(key).size


async def replay_all(requests: Sequence[T], replay: Callable[[T], Awaitable[None]]) -> None:
    """Run `replay` for each of `requests`, a few at once, the first ones first."""
    waiting = iter(requests)

    async def work() -> None:
        for request in waiting:
            await replay(request)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(CONCURRENCY, len(requests))):
            group.create_task(work())
