"""Entries of a hint: how they are written, and what they become on the token ids of a prompt.

The engine resolves a hint by itself; this is the gateway's own reading of the same words, for shadow mode and for
`seamark boundary`. An entry is `n` (tokens from the prompt's start), `-n` (from its end), `"first:ids"` or `"last:ids"`
(behind the first or last occurrence of these ids), or `"last-k:ids"` (skipping k occurrences from the end).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from proxy.boundaries.template_facts import Opener

Entry = int | str

MAX_ENTRIES = 16  # of one hint

MAX_IDS = 128  # of one entry

_SPELLED = re.compile(r"(first|last(?:-([0-9]{1,6}))?):([0-9]{1,9}(?:,[0-9]{1,9})*)", re.ASCII)


def encode_opener(opener: Opener, where: Literal["first", "last"] = "last", skip: int = 0) -> str:
    """The entry for the place behind an opener; `skip` so many occurrences, counted from the end.

    The ids nearest to the place are kept if there are more than an entry may have.
    """
    if skip and where == "first":
        raise ValueError("occurrences are skipped from the end only")
    words = f"last-{skip}" if skip else where
    return f"{words}:{','.join(map(str, opener.ids[-MAX_IDS:]))}"


def encode_end(end: int) -> int:
    """The entry for the end of the last message, with `end` tokens behind it.

    A prompt's last token is always computed, so nothing can be found at the very end: one token before it then.
    """
    return -max(end, 1)


def resolve(entries: Sequence[Entry], ids: Sequence[int]) -> list[int]:
    """Tokens before each of the first `MAX_ENTRIES` entries, in their order; 0 for one that is not in the prompt."""
    return [_position(entry, ids) for entry in entries[:MAX_ENTRIES]]


def _position(entry: object, ids: Sequence[int]) -> int:
    if type(entry) is int:
        position = entry if entry > 0 else len(ids) + entry if entry < 0 else 0
        return position if 0 < position <= len(ids) else 0
    spelled = _SPELLED.fullmatch(entry) if isinstance(entry, str) else None
    if spelled is None or (pattern := [int(part) for part in spelled[3].split(",")])[MAX_IDS:]:
        return 0
    if spelled[1] == "first":
        return first_of(ids, pattern)
    return last_of(ids, pattern, int(spelled[2] or 0))


def first_of(ids: Sequence[int], pattern: Sequence[int]) -> int:
    """Tokens up to the end of the first occurrence of `pattern`; 0 if there is none."""
    size, wanted, start = len(pattern), list(pattern), 0
    while True:
        try:
            start = ids.index(wanted[0], start)
        except ValueError:
            return 0
        if list(ids[start : start + size]) == wanted:
            return start + size
        start += 1


def last_of(ids: Sequence[int], pattern: Sequence[int], skip: int = 0) -> int:
    """Tokens up to the end of the last occurrence of `pattern` but `skip`; 0 if there are not as many.

    Occurrences may overlap; each counts.
    """
    backwards, wanted, start = list(reversed(ids)), list(reversed(pattern)), 0
    while True:
        try:
            start = backwards.index(wanted[0], start)
        except ValueError:
            return 0
        if backwards[start : start + len(wanted)] == wanted:
            if not skip:
                return len(backwards) - start
            skip -= 1
        start += 1
