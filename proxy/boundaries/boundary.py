"""Where a prefix ends that others may share, as it is said to an engine: without knowing how many tokens that is.

An entry of a hint is `n` (tokens from the prompt's start), `-n` (from its end), `"first:ids"` or `"last:ids"` (behind
the first or last occurrence of these ids), or `"last-k:ids"` (skipping k occurrences from the end). The engine resolves
a hint by itself; `resolve` is the gateway's own reading of the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from proxy.boundaries.layout import PromptLayout
from proxy.boundaries.template_facts import Opener

Entry = int | str
MAX_ENTRIES = 16  # of one hint
MAX_IDS = 128  # of one entry
_SPELLED = re.compile(r"(first|last(?:-([0-9]{1,6}))?):([0-9]{1,9}(?:,[0-9]{1,9})*)", re.ASCII)
Kind = Literal["system", "history", "turn", "explicit", "learned"]

# Ends of what other conversations are known to begin with, too.
SHARED: frozenset[Kind] = frozenset({"system", "learned"})

# How the entries of a hint came about: by facts of the template alone, with positions remembered of this very head, or
# there are none.
LookupResult = Literal["learnt", "head", "none"]


class Boundary(msgspec.Struct, frozen=True):
    """The end of a beginning of the prompt that others may share."""

    kind: Kind
    key: bytes  # content key of that beginning
    entry: Entry | None  # what the engine is told of it; None: nothing, it serves the choice of a worker only
    tokens: int = 0  # its position as an engine has told it for the same content before; 0: not yet
    estimate: int = 0  # its position, roughly: for load and for the choice of a worker, never sent


class Place(NamedTuple):
    """A place in a chat whose position neither the template's facts nor an engine has told."""

    key: bytes
    message: int  # index of the message it lies in
    kept: str = ""  # what stands before it in the message's text
    part: int | None = None  # instead of that: the content part that it follows


class Found(msgspec.Struct, frozen=True):
    """The boundaries of one request's prompt, and what else is known of it."""

    boundaries: tuple[Boundary, ...] = ()  # ascending, as far as their order is known
    prefixes: tuple[bytes, ...] = ()  # keys of all beginnings of this prompt, shortest first
    result: LookupResult = "none"
    failure: str | None = None  # why no hint can be sent: a reason of the closed set
    layout: PromptLayout | None = None
    renderer_id: bytes = b""  # of the tokenizer and template that the entries are for
    end: int | None = None  # tokens of the prompt behind the end of its last turn; None: not known
    unplaced: tuple[Place, ...] = ()
    turn_key: bytes | None = None  # of the whole chat; None if no turn ends with it

    @property
    def shared(self) -> int:
        """Tokens of the beginning that other conversations have, too, as well as that is known; 0: none."""
        shared = 0
        for boundary in self.boundaries:
            if boundary.kind in SHARED:
                shared = max(shared, boundary.tokens or boundary.estimate)
        return shared

    @property
    def continued(self) -> int:
        """Tokens before the last text of a conversation that goes on, as well as that is known; 0 where one begins."""
        if self.layout is None or self.layout.alone:
            return 0
        return max([each.tokens or each.estimate for each in self.boundaries if each.kind == "history"], default=0)

    def without_request(self) -> Found:
        """What can be kept for long: the rest would keep the parsed request alive, whose bytes nobody counts."""
        return replace(self, prefixes=(), layout=None, unplaced=(), turn_key=None)

    def entries(self) -> tuple[Entry, ...]:
        """The hint: entries that say something, each once, as many as an engine takes."""
        return tuple(dict.fromkeys([each.entry for each in self.boundaries if each.entry is not None]))[:MAX_ENTRIES]


@lru_cache(1024)
def encode_opener(opener: Opener, where: Literal["first", "last"] = "last", skip: int = 0) -> str:
    """The entry behind an opener's last occurrence but `skip`; of many ids those nearest to the place are kept."""
    return f"{f'last-{skip}' if skip else where}:{','.join(map(str, opener.ids[-MAX_IDS:]))}"


def resolve(entries: Sequence[Entry], ids: Sequence[int]) -> list[int]:
    """Tokens before each of the first `MAX_ENTRIES` entries, in their order; 0 for one that is not in the prompt."""
    return [_position(entry, ids) for entry in entries[:MAX_ENTRIES]]


def resolved_positions(entries: Sequence[Entry], positions: Sequence[int]) -> dict[Entry, int]:
    """By entry, the position an engine resolved it to; those that are not in the prompt left out."""
    return {entry: position for entry, position in zip(entries, positions, strict=False) if position > 0}


def _position(entry: object, ids: Sequence[int]) -> int:
    if type(entry) is int:
        position = entry if entry > 0 else len(ids) + entry if entry < 0 else 0
        return position if 0 < position <= len(ids) else 0
    spelled = _SPELLED.fullmatch(entry) if isinstance(entry, str) else None
    if spelled is None or (pattern := [int(part) for part in spelled[3].split(",")])[MAX_IDS:]:
        return 0
    ends = _ends(ids, pattern)
    if spelled[1] == "first":
        return next(ends, 0)
    found, behind = list(ends), int(spelled[2] or 0) + 1
    return found[-behind] if behind <= len(found) else 0


def _ends(ids: Sequence[int], pattern: list[int]) -> Iterator[int]:
    """Tokens up to the end of each occurrence of `pattern`; they may overlap."""
    start = -1
    while True:
        try:
            start = ids.index(pattern[0], start + 1)
        except ValueError:
            return
        if list(ids[start : start + len(pattern)]) == pattern:
            yield start + len(pattern)
