"""Text that changes from request to request by itself (a date, an id, a git status), known by what stands around it.

No pattern runs over more than a window around the first difference of two texts: texts made to be slow are not.
"""

from __future__ import annotations

import re
import time
from calendar import timegm
from functools import lru_cache
from typing import Any, Literal

from proxy.idle_work import Steps

TextKind = Literal[
    "dates", "times", "uuid", "number", "path", "working_directory", "token_counters", "git_status"
]  # as in the label `text` of `seamark_would_save_tokens_total`

# Characters before and behind a difference in which what differs is sought; a longer word is not recognised.
BEFORE, BEHIND = 200, 300

# How far back the beginning of a date's line or sentence is looked for; the words before a date go with it.
LINE_CHARACTERS = 240

GIT_BEFORE = 2000  # characters in which a git status has to say that it is one
CLOCK_BEFORE = 60  # characters in which a text says that it speaks of today

# Two texts are compared by so many pieces (characters), each sought within so far of where it should be.
PIECES, PIECE, REACH = 16, 32, 1024

_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?"  # a time of day
_HALF = r"[AaPp]\.?[Mm]\b\.?"  # of a day, as clocks of twelve hours have it
_NUMBER = r"(?<!\w)[+-]?[A-Za-z]{0,2}\d{1,24}(?:[.,_]\d{1,24}){0,8}"
_PATH = r"(?:[A-Za-z]:|~|\.{1,2})?(?:[/\\][\w.@+%-]{1,64}){1,32}[/\\]?"
_FOLDER = r"\b(?i:working director(?:y|ies)|cwd|pwd|current director(?:y|ies)|workspace(?: folder)?)\b"

# In the order in which they are tried at one place. Dates are found before, by the numbers in a whole sentence.
_PATTERNS: dict[TextKind, str] = {
    "times": rf"(?<!\d)(?:(?:[\d-]{{8,10}}T)?{_CLOCK}(?:\s?{_HALF})?|\d{{1,2}}\s?{_HALF}|\d{{8}}T\d{{4,6}}Z?)"
    r"|(?<![\w.])1\d{9}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?!\w)",  # seconds to nanoseconds since the epoch
    "token_counters": rf"{_NUMBER}(?=\s{{0,2}}(?i:</total_tokens>|tokens? (?:left|remaining|used)\b))",
    "working_directory": rf"{_FOLDER}[^\n]{{0,40}}?{_PATH}",
    "uuid": r"(?<![\w-])(?=[\w-]{0,127}\d)(?=[\w-]{0,127}[A-Za-z])[\w-]{6,128}(?![\w-])",
    "path": rf"(?<![\w/\\]){_PATH}",
    "number": rf"{_NUMBER}(?:%|st|nd|rd|th)?(?!\w)",
}

_WORDS = re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in _PATTERNS.items()))
_GIT = re.compile(r"(?i)\bgit.?status|\bcurrent branch\b|\brecent commits\b|^on branch |\buntracked files\b")

_GIT_LINE = re.compile(
    r"(?i:\s{0,8}(?:[0-9a-f]{7,40}\s|\(clean\)|nothing to commit|(?:current|main) branch\b|(?:git )?status:"
    r"|recent commits|git user|on branch\b|your branch\b|changes (?:not|to)\b|untracked files"
    r"|(?:modified|new file|deleted|renamed):))"
    r"|\s{0,8}[MADRCUT?!]{1,2}\s{1,2}\S{1,300}(?: -> \S{1,300})?\s*\Z|\s{0,300}\Z"
)

_TODAY = re.compile(r"(?i)\b(?:today|now|date|time|datetime|timestamp|day|as of|current\w{0,8})\b")

# A full stop ends a sentence only behind a long word: abbreviated days and months have one, too.
_SENTENCE_END = re.compile(r"[\n。！？।]|[!?]\s|\.(?<=[^\W\d]{6}\.)\s")

_DAY, _TWO_DAY, _TWO_MONTH = "(?:3[01]|[12][0-9]|0?[1-9])", "(?:3[01]|[12][0-9]|0[1-9])", "(?:1[0-2]|0[1-9])"

# Between a day and its year: words or other signs than versions have, and perhaps a time of day.
_GAP = rf"(?![.:]\d)[^\d\n。！？]{{1,20}}(?:{_CLOCK}[^\d\n]{{1,20}})?"

# A word that begins with a letter that has case, up to the white space; or a path.
_NAME = r"[A-Za-zÀ-\u058f_/\\][\w./\\-]*"

_COPYRIGHT = re.compile(r"(?i)©|\(c\)|copyright")

# Of any script, to those of ASCII.
_DIGITS = {code: str(int(chr(code))) for code in range(0x0660, 0x20000) if chr(code).isdecimal()}

_DAY_SECONDS = 86_400


def kind_of(new: str, old: str, at: int, now: float) -> Steps[TextKind | None]:
    """The kind of the text that differs first, at `at`; None: not known to change. `now`: seconds since the epoch."""
    says_git = _GIT.search(new, max(0, at - GIT_BEFORE), at + BEHIND) is not None
    if says_git and all(_GIT_LINE.match(_line_at(text, at)) for text in (new, old)):
        return "git_status"
    yield
    days = [_day_at(text, at, now) for text in (new, old)]
    if None not in days and days[0] != days[1]:
        return "dates"
    yield
    one, other = (_word_at(text, at) for text in (new, old))
    if one is None or other is None or one[0] == other[0]:
        return None
    kinds: set[Any] = {one.lastgroup, other.lastgroup}
    if kinds == {"uuid", "number"}:
        return "uuid"  # one of digits alone
    return kinds.pop() if len(kinds) == 1 else None


def says_today(text: str, at: int) -> bool:
    """Whether the words before a date say that it is the time of the request, and not one that is asked about."""
    return _TODAY.search(text, max(0, at - CLOCK_BEFORE), at) is not None


def alike(new: str, old: str, at: int) -> int:
    """How many characters of `new` behind `at` stand in `old`, too, near the same place: by a sample of its pieces."""
    behind = len(new) - at
    step = max(PIECE, -(-behind // PIECES))

    def is_there(start: int) -> bool:
        near = start * len(old) // len(new)
        return old.find(new[start : start + PIECE], max(at, near - REACH), near + REACH) >= 0

    starts = range(len(new) - PIECE, at - 1, -step)
    if not any(map(is_there, starts[::4])):  # so it is with most
        return 0
    return min(behind, step * sum(map(is_there, starts)))


def _day_at(text: str, at: int, now: float) -> str | None:
    """The first date that ends at or behind `at` in the sentence around it: the same at any time of that day.

    A date is a year near today's beside a day of a month, a number that contains both, or a Unix time of such a year,
    in any script's digits; else a word and a year: most such words are no months, but one that has changed is. No word
    is known but that of a copyright line. A number inside a name (`v2026.1`, `/logs/2026/11/25`) is none.
    """
    start, end = _sentence_start(text, at), min(len(text), at + BEHIND)
    if (stop := _SENTENCE_END.search(text, at, end)) is not None:
        end = stop.start()
    sentence = text[start:end]
    if not sentence.isascii():
        sentence = sentence.translate(_DIGITS)
    for years, dates in _date_patterns(time.gmtime(now).tm_year):
        for found in dates.finditer(sentence) if years.search(sentence) else ():
            date = found["date"]
            if date is None or start + found.end() < at:
                continue
            if _COPYRIGHT.search(sentence[: found.start()].rpartition("\n")[2]):
                continue
            if not date.isdecimal():
                return re.sub(_CLOCK, "", date)
            return date[:8] if len(date) in (8, 12, 14) else str(int(date[:10]) // _DAY_SECONDS)
    return None


@lru_cache(maxsize=4)
def _date_patterns(this_year: int) -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
    """What is in each date of this year, the one before and the one after, and these dates, then with bare months.

    Their group `date` holds one; outside it stand names, whatever number they hold.
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
    months = rf"|[^\W\d]{{3,12}}\.?(?:\s[^\W\d]{{2,4}})?\s{year}(?!\d|[./]\d)"
    years = re.compile(f"{year}|{seconds}")
    return [(years, re.compile(rf"(?P<date>{each})|{_NAME}")) for each in (dates, dates + months)]


def _sentence_start(text: str, at: int) -> int:
    """Where the line or sentence begins that holds the character at `at`; as far back as a date's words may be."""
    start = max(0, at - LINE_CHARACTERS)
    return max((found.end() for found in _SENTENCE_END.finditer(text, start, at)), default=start)


def _word_at(text: str, at: int) -> re.Match[str] | None:
    """The word of a known kind that holds the character at `at`, or ends there."""
    word = None
    for found in _WORDS.finditer(text, _sentence_start(text, at), at + BEHIND):
        if found.start() > at:
            break
        if found.end() >= at:
            word = found
    return word


def _line_at(text: str, at: int) -> str:
    start = max(text.rfind("\n", max(0, at - BEFORE), at) + 1, at - BEFORE, 0)
    end = text.find("\n", at, at + BEHIND)
    return text[start : end if end >= 0 else at + BEHIND]
