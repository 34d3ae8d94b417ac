"""Stored answers, within one bound of bytes together with those that are under way or being sent.

API keys share it: an answer goes for another key's only if its own key holds more than that one, or if nobody has asked
for it in a long time. What somebody still reads is counted until it has been read.
"""

from __future__ import annotations

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import Any, NamedTuple

from proxy.fleet.worker import Worker
from proxy.http import asgi
from proxy.http.asgi import TIMES_WHAT_IS_FREE

LARGEST_SHARE = 4  # an answer may take that part of the bound

# Bytes beside an answer and its headers: the entry, its key, and their places in the tables.
ENTRY_BYTES = 1400

POINTER_BYTES = 8
PIECE_BYTES = 2**16  # sent at once of an answer

STALE_SECONDS = 3600.0  # what nobody has asked for in so long goes for any key's answers

# Of a model's entry in /v1/models: what tells models of one name apart. vLLM makes up the rest each time.
_CARD = ("id", "root", "parent", "max_model_len")


class Source(NamedTuple):
    """What computed an answer, as far as the gateway knows."""

    worker: Worker
    boot: str
    card: tuple[Any, ...] | None
    renderer_id: bytes | None  # None: not known yet

    @classmethod
    def of(cls, worker: Worker, model: Any) -> Source:
        name = worker.listed(model)
        card = next((entry for entry in worker.probed.models if entry.get("id") == name), None)
        told = tuple(str(card.get(name)) for name in _CARD) if card is not None else None
        return cls(worker, worker.boot, told, worker.renderer_id(model))

    def is_still(self, model: Any) -> bool:
        """Whether the worker is up and would compute the same."""
        now = Source.of(self.worker, model)
        renders_alike = None in (now.renderer_id, self.renderer_id) or now.renderer_id == self.renderer_id
        return self.worker.up and (now.boot, now.card) == (self.boot, self.card) and renders_alike


def weight_of(piece: bytes) -> int:
    """Bytes of memory that a piece of an answer takes."""
    return getsizeof(piece) + POINTER_BYTES


def grouped(pieces: Sequence[bytes]) -> tuple[bytes, ...]:
    """The same answer in as few pieces as may be: of at most `PIECE_BYTES`, or as long as they were."""
    groups: list[list[bytes]] = []
    size = 0
    for piece in pieces:
        if not groups or size + len(piece) > PIECE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += len(piece)
    return tuple(map(b"".join, groups))


@dataclass(slots=True, eq=False)
class Entry:
    headers: asgi.HeaderList
    pieces: Sequence[bytes]
    source: Source
    owner: str | None = None  # that of the key that had it computed
    stored: float = field(default_factory=lambda: time.monotonic())
    readers: int = 0
    is_gone: bool = False  # nobody else finds it
    asked: float = field(init=False)
    weight: int = field(init=False)

    def __post_init__(self) -> None:
        self.asked = self.stored
        named = sum(getsizeof(header) + sum(map(getsizeof, header)) + POINTER_BYTES for header in self.headers)
        held = getsizeof(self.headers) + named + getsizeof(()) + sum(map(weight_of, self.pieces))
        self.weight = ENTRY_BYTES + held


@dataclass(slots=True, eq=False)
class _Share:
    """What an owner has of the bound."""

    held: int = 0  # bytes
    fixed: int = 0  # of them, those of what cannot go
    idle: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)  # what may go, the first of them first


@dataclass(eq=False)
class StoredAnswers:
    _most: int  # bytes
    _evicted: Callable[[], None]  # called for each answer that goes because others need its room
    _entries: dict[bytes, Entry] = field(default_factory=dict)
    _idle: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)  # of all owners
    _shares: defaultdict[str | None, _Share] = field(default_factory=lambda: defaultdict(_Share))  # by owner
    _fixed: int = 0
    size: int = 0  # bytes

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def largest(self) -> int:
        return self._most // LARGEST_SHARE

    def get(self, key: bytes) -> Entry | None:
        return self._entries.get(key)

    def add(self, key: bytes, entry: Entry) -> bool:
        """Keep it in place of what may be there; False if there is no room."""
        self.remove(key)
        if entry.weight > self.largest or not self._makes_room(entry.owner, entry.weight):
            return False
        self._entries[key] = entry
        self._count(entry.owner, held=entry.weight)
        self._may_go(key, entry)
        return True

    def remove(self, key: bytes) -> None:
        """Nobody finds it any more. Its bytes are free once nobody reads it."""
        if (entry := self._entries.pop(key, None)) is None:
            return
        entry.is_gone = True
        if not entry.readers:
            self._stays(key, entry)
            self._count(entry.owner, held=-entry.weight)

    def remove_all(self, boot: str | None) -> None:
        """Those that a worker's boot computed; None: all."""
        for key in [key for key, entry in self._entries.items() if boot in (None, entry.source.boot)]:
            self.remove(key)

    def lend(self, key: bytes, entry: Entry) -> bool:
        """Somebody is to read it: it stays until that is over. False if its owner has too much that cannot go."""
        if not entry.readers:
            if not self._may_fix(entry.owner, entry.weight):
                return False
            self._stays(key, entry)
            self._count(entry.owner, fixed=entry.weight)
        entry.readers += 1
        entry.asked = time.monotonic()
        return True

    def returned(self, key: bytes, entry: Entry) -> None:
        entry.readers -= 1
        if entry.readers:
            return
        self._count(entry.owner, held=-entry.weight if entry.is_gone else 0, fixed=-entry.weight)
        if not entry.is_gone:
            self._may_go(key, entry)

    def take(self, owner: str | None, size: int) -> bool:
        """Bytes for an answer under way; False if there is no room."""
        if not self._may_fix(owner, size) or not self._makes_room(owner, size):
            return False
        self.hold(owner, size)
        return True

    def hold(self, owner: str | None, size: int) -> None:
        """Count bytes of an answer under way, room or not; they are given back by a negative size."""
        self._count(owner, held=size, fixed=size)

    def _may_fix(self, owner: str | None, size: int) -> bool:
        """Whether so many bytes more may be what cannot go: a key leaves room for others, as it does for bodies."""
        free = self._most - self._fixed - size
        return free >= 0 and (owner is None or self._of(owner).fixed + size <= TIMES_WHAT_IS_FREE * free)

    def _makes_room(self, owner: str | None, size: int) -> bool:
        """Whether so many bytes of an owner fit, once others have gone that have to."""
        while self.size + size > self._most:
            if (key := self._next_to_go(owner, self._of(owner).held + size)) is None:
                return False
            self.remove(key)
            self._evicted()
        return True

    def _next_to_go(self, owner: str | None, wanted: int) -> bytes | None:
        """The answer that goes for one of an owner who is to hold `wanted` bytes; None if none has to."""
        if not self._idle:
            return None
        oldest, entry = next(iter(self._idle.items()))
        if time.monotonic() - entry.asked > STALE_SECONDS:
            return oldest
        most = max((share for share in self._shares.values() if share.idle), key=lambda share: share.held)
        return next(iter(most.idle if most.held >= wanted else self._of(owner).idle), None)

    def _of(self, owner: str | None) -> _Share:
        return self._shares.get(owner) or _Share()

    def _may_go(self, key: bytes, entry: Entry) -> None:
        self._idle[key] = self._shares[entry.owner].idle[key] = entry

    def _stays(self, key: bytes, entry: Entry) -> None:
        del self._idle[key], self._shares[entry.owner].idle[key]

    def _count(self, owner: str | None, held: int = 0, fixed: int = 0) -> None:
        """So many bytes more. An owner who holds nothing is not in the table: keys come and go."""
        share = self._shares[owner]
        share.held, share.fixed = share.held + held, share.fixed + fixed
        self.size, self._fixed = self.size + held, self._fixed + fixed
        if not share.held:
            del self._shares[owner]
