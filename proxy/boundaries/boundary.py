"""Where a prefix ends that others may share, as it is said to an engine: without knowing how many tokens that is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from proxy.boundaries.layout import PromptLayout
from proxy.boundaries.resolve import MAX_ENTRIES, Entry

Kind = Literal["system", "history", "turn", "explicit", "learned"]

# Ends of what other conversations are known to begin with, too.
SHARED: frozenset[Kind] = frozenset({"system", "learned"})

# How the entries of a hint came about: by facts of the template alone, with positions remembered of this very head, or
# there are none.
LookupResult = Literal["learnt", "head", "none"]


class Boundary(NamedTuple):
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


class Found(NamedTuple):
    """The boundaries of one request's prompt, and what else is known of it."""

    boundaries: tuple[Boundary, ...] = ()  # ascending, as far as their order is known
    prefixes: tuple[bytes, ...] = ()  # keys of all beginnings of this prompt, shortest first
    result: LookupResult = "none"
    failure: str | None = None  # why no hint can be sent: a reason of the closed set
    layout: PromptLayout | None = None
    renderer_id: bytes = b""  # of the tokenizer and template that the entries are for
    end: int | None = None  # tokens of the prompt behind the end of its last turn; None: not known
    unplaced: tuple[Place, ...] = ()

    @property
    def turn_key(self) -> bytes | None:
        """Key of the whole chat; None if no turn ends with it."""
        return self.layout.turn_key if self.layout is not None else None

    @property
    def shared(self) -> int:
        """Tokens of the beginning that other conversations have, too, as well as that is known; 0: none."""
        ends = (boundary.tokens or boundary.estimate for boundary in self.boundaries if boundary.kind in SHARED)
        return max(ends, default=0)

    def without_request(self) -> Found:
        """What can be kept for long: the rest would keep the parsed request alive, whose bytes nobody counts."""
        return self._replace(prefixes=(), layout=None, unplaced=())

    def entries(self) -> tuple[Entry, ...]:
        """The hint, each entry once."""
        return distinct_entries(boundary.entry for boundary in self.boundaries)


def distinct_entries(entries: Iterable[Entry | None]) -> tuple[Entry, ...]:
    """Those that say something, each once, as many as an engine takes."""
    return tuple(dict.fromkeys(entry for entry in entries if entry is not None))[:MAX_ENTRIES]


def resolved_positions(entries: Sequence[Entry], positions: Sequence[int]) -> dict[Entry, int]:
    """By entry, the position an engine resolved it to; those that are not in the prompt left out."""
    return {entry: position for entry, position in zip(entries, positions, strict=False) if position > 0}
