"""Where a system prompt first tells a date or a time: what stands before it is shared with tomorrow's requests.

An engine learns that by itself, but only from the first request with another date, and the one after that would be the
first to gain. To be told at first sight, the engine gets the token ids that stand before the date: those of a piece of
the text alone, without the tokens at its ends, which what stands around it may change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from cachetools import LRUCache

from proxy.boundaries.resolve import encode_ids

# Characters of a text that are searched: dates stand near a prompt's beginning, or a later request has to learn it.
SEARCHED = 32_768

# A shorter beginning is not worth a state of its own: some hundred tokens.
MIN_CHARACTERS = 512

# How far back the line's beginning is looked for; the words before a date go with it.
LINE_CHARACTERS = 240

MAX_TEXTS = 4096  # remembered

# What is tokenised of the text before a date, and how many token ids of it name the place.
PIECE_CHARACTERS = 240
MAX_IDS, MIN_IDS = 64, 4

# Tokens at either end of the piece that may be others in the prompt.
UNSURE_IDS = 3

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"

_DATE = re.compile(
    rf"\b(?:\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}[/.]\d{{1,2}}[/.](?:\d{{4}}|\d{{2}})\b|{_MONTH}\.? \d{{1,2}}\b"
    rf"|\d{{1,2}}(?:st|nd|rd|th|\.)? {_MONTH}\b|(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day\b|\d{{1,2}}:\d{{2}}\b)"
)


class Dates:
    """Remembers by key what it found, since one system prompt comes many times."""

    def __init__(self) -> None:
        self._cuts: LRUCache[bytes, int] = LRUCache(MAX_TEXTS)
        self._entries: LRUCache[tuple[bytes, bytes], str] = LRUCache(MAX_TEXTS)

    def entry(self, renderer_id: bytes, key: bytes) -> str | None:
        """What names the end of the beginning `key`; empty if nothing does, None if the tokenizer was not asked."""
        return self._entries.get((renderer_id, key))

    def learn(self, renderer_id: bytes, key: bytes, ids: Sequence[int]) -> str:
        """`ids` are the tokens of `piece_of` the beginning `key`. Returns its entry."""
        sure = ids[UNSURE_IDS : len(ids) - UNSURE_IDS][-MAX_IDS:]
        entry = encode_ids(sure, "first") if len(sure) >= MIN_IDS else ""
        self._entries[renderer_id, key] = entry
        return entry

    def cut(self, key: bytes, text: str) -> int:
        """Characters of `text` before the line that tells its first date or time; 0 if that is too short, or none does.

        `key` names the text.
        """
        cut = self._cuts.get(key)
        if cut is None:
            cut = self._cuts[key] = _cut(text)
        return cut


def piece_of(text: str) -> str:
    """The end of a text before a date."""
    return text[-PIECE_CHARACTERS:]


def _cut(text: str) -> int:
    found = _DATE.search(text, 0, SEARCHED)
    if found is None:
        return 0
    at = text.rfind("\n", max(0, found.start() - LINE_CHARACTERS), found.start()) + 1 or found.start()
    return at if at >= MIN_CHARACTERS else 0
