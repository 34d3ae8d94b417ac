"""Dates in a text, in any language: what stands before a system prompt's first one is shared with tomorrow's requests.

A date is a year near today's beside a day of a month, a number that contains both, or a Unix time of such a year, in
any script's digits. No word is known but that of a copyright line. An engine learns the place by itself, but only from
the first request with another date, and the one after that would be the first to gain. To be told at first sight, the
engine gets the token ids that stand before the date: those of a piece of the text alone, without the tokens at its
ends, which what stands around it may change.
"""

from __future__ import annotations

import re
import time
from calendar import timegm
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from cachetools import LRUCache

from proxy.boundaries.resolve import encode_ids

# Characters of a text that are searched: dates stand near a prompt's beginning, or a later request has to learn it.
SEARCHED = 32_768

# A shorter beginning is not worth a state of its own: some hundred tokens.
MIN_CHARACTERS = 512

# How far back the beginning of a date's line or sentence is looked for; the words before a date go with it.
LINE_CHARACTERS = 240

MAX_TEXTS = 4096  # remembered

# What is tokenised of the text before a date, and how many token ids of it name the place.
PIECE_CHARACTERS = 240
MAX_IDS, MIN_IDS = 64, 4

# Tokens at either end of the piece that may be others in the prompt.
UNSURE_IDS = 3

DAY_SECONDS = 86_400

CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?"  # a time of day

# A full stop ends a sentence only behind a long word: abbreviated days and months have one, too.
SENTENCE_END = re.compile(r"[\n。！？।]|[!?]\s|\.(?<=[^\W\d]{6}\.)\s")

_DAY, _TWO_DAY, _TWO_MONTH = "(?:3[01]|[12][0-9]|0?[1-9])", "(?:3[01]|[12][0-9]|0[1-9])", "(?:1[0-2]|0[1-9])"

# Between a day and its year: words or other signs than versions have, and perhaps a time of day.
_GAP = rf"(?![.:]\d)[^\d\n。！？]{{1,20}}(?:{CLOCK}[^\d\n]{{1,20}})?"

# A word that begins with a letter that has case, up to the white space; or a path.
_NAME = r"[A-Za-zÀ-\u058f_/\\][\w./\\-]*"

_NAME_AT = re.compile(_NAME)

# A date reaches at most so far before its year, and behind it (characters).
_REACH = 128

_COPYRIGHT = re.compile(r"(?i)©|\(c\)|copyright")

# Of any script, to those of ASCII.
_DIGITS = {code: str(int(chr(code))) for code in range(0x0660, 0x20000) if chr(code).isdecimal()}


class Date(NamedTuple):
    """One date in a text."""

    start: int
    end: int
    day: str  # the same at any time of this day


def dates_in(text: str, now: float, *, months: bool = False) -> Iterator[Date]:
    """The dates of a text that are near `now` (seconds since the epoch), in order.

    A number inside a name (`v2026.1`, `gpt-4o-2026-08-06`, `/logs/2026/11/25`) is none. `months`: a word and a year are
    one, too; most such words are no months, but one that has changed since the last request is.
    """
    if not text.isascii():
        text = text.translate(_DIGITS)
    years, dates = _patterns(time.gmtime(now).tm_year, months)
    done = 0
    # Most texts hold no such year, and trying all forms of a date at each character takes long.
    while (year := years.search(text, done)) is not None:
        word = max(text.rfind(space, 0, max(0, year.start() - _REACH)) for space in " \n") + 1
        for found in dates.finditer(text, max(word, done), year.end() + _REACH):
            date, start = found["date"], found.start()
            if start > year.start():
                break
            done = found.end() if date is not None else _NAME_AT.match(text, start).end()  # type: ignore[union-attr]
            if date is None or _COPYRIGHT.search(text[max(0, start - LINE_CHARACTERS) : start].rpartition("\n")[2]):
                continue
            day = re.sub(CLOCK, "", date)
            if date.isdecimal():
                day = date[:8] if len(date) in (8, 12, 14) else str(int(date[:10]) // DAY_SECONDS)
            yield Date(start, found.end(), day)
        done = max(done, year.start() + 1)


@lru_cache(maxsize=4)
def _patterns(this_year: int, months: bool) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What is in each date of this year, the one before and the one after; and these dates: group `date`.

    Outside that group: names, whatever number they hold.
    """
    year = f"(?:{this_year - 1}|{this_year}|{this_year + 1})"
    first, last = (timegm((each, 1, 1, 0, 0, 0)) // 10**7 for each in (this_year - 1, this_year + 2))
    seconds = rf"(?:{'|'.join(map(str, range(first, last + 1)))})\d{{7}}"
    forms = [
        rf"{year}{_TWO_MONTH}{_TWO_DAY}(?:\d{{4}}|\d{{6}})?(?!\d)|{_TWO_DAY}\d\d{year}(?!\d)",
        rf"{seconds}(?:\d{{3}}|\d{{6}}|\d{{9}})?(?!\d)",
        rf"{_DAY}\.{_DAY}\.{year}(?!\d|[./]\d)|{year}\.{_TWO_MONTH}\.{_TWO_DAY}(?!\d|[./]\d)",
        rf"(?:{_DAY}(?![\d:]){_GAP}){{1,2}}{year}(?!\d|[./]\d)",
        rf"{year}(?:{_GAP}{_DAY}(?!\d|[.,:]\d)){{1,2}}",
    ]
    dates = rf"(?=\d)(?<!\d)(?<!\d[-–.,:/])(?:{'|'.join(forms)})"
    dates += rf"|(?<![\w./-])[^\W\d]{{3,12}}[-.]{_DAY}[-.,]{year}(?![\w-]|\.\d)"  # Nov-25-2026
    if months:
        dates += rf"|[^\W\d]{{3,12}}\.?(?:\s[^\W\d]{{2,4}})?\s{year}(?!\d|[./]\d)"
    return re.compile(f"{year}|{seconds}"), re.compile(rf"(?P<date>{dates})|{_NAME}")


class Dates:
    """Remembers by key what it found, since one system prompt comes many times."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """`now`: seconds since the epoch."""
        self._now = now
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
        """Characters of `text` before the line or sentence of its first date; 0 if that is too short, or there is none.

        `key` names the text.
        """
        cut = self._cuts.get(key)
        if cut is None:
            date = next(dates_in(text[:SEARCHED], self._now()), None)
            at = sentence_start(text, date.start) if date is not None else 0
            cut = self._cuts[key] = at if at >= MIN_CHARACTERS else 0
        return cut


def piece_of(text: str) -> str:
    """The end of a text before a date."""
    return text[-PIECE_CHARACTERS:]


def sentence_start(text: str, at: int) -> int:
    """Where the line or sentence begins that holds the character at `at`; as far back as a date's words may be."""
    start = max(0, at - LINE_CHARACTERS)
    return max((found.end() for found in SENTENCE_END.finditer(text, start, at)), default=start)
