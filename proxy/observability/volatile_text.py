"""Text that changes from request to request (a date, an id, a git status): where two texts differ, and in what.

Both texts are walked side by side, in a bounded number of steps, and no pattern runs over more than a window around a
difference: texts made to be slow are not. The steps are those of `proxy.idle_work`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Container
from typing import Literal, NamedTuple

from proxy.boundaries.dates import CLOCK, SENTENCE_END, Date, dates_in, sentence_start
from proxy.idle_work import Steps

Kind = Literal[
    "dates", "times", "uuid", "number", "path", "working_directory", "token_counters", "git_status"
]  # as in the label `text` of `seamark_would_save_tokens_total`

MAX_PLACES = 32  # differences that are looked at in one pair of texts

MAX_UNKNOWN = 4  # of these of no known kind; texts with more have little to do with each other

# Characters before and behind a difference in which the word that differs is sought; a longer word is not recognised.
BEFORE, BEHIND = 200, 300

# Characters behind a date in which what changes with it stands: a weekday, a time of day.
BESIDE_DATE = 24

GIT_BEFORE = 2000  # characters in which a git status has to say that it is one

MAX_LINES = 400  # of a changed block, until a line that both texts have

STEP_CHARACTERS = 4096  # of the other text whose lines are noted in one step

MIN_LINE = 8  # characters by which a line is recognised in the other text

FIRST_STEP = 8  # characters in which two texts are first compared: most have less in common, and steps double

CLOCK_BEFORE = 60  # characters in which a text says that it speaks of today

_HALF = r"[AaPp]\.?[Mm]\b\.?"  # of a day, as clocks of twelve hours have it

# In the order in which they are tried at one place. Dates are found before, by the numbers in a whole sentence.
_WORDS = re.compile(
    r"(?P<uuid>(?<![\w-])(?:[A-Za-z]{1,12}[_:-])?[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?![\w-]))"
    rf"|(?P<times>(?<!\d)(?:(?:[\d-]{{8,10}}T)?{CLOCK}(?:\s?{_HALF})?|\d{{1,2}}\s?{_HALF}|\d{{8}}T\d{{4,6}}Z?)"
    r"|(?<![\w.])1\d{9}(?:\.\d{1,9}|\d{3}|\d{6}|\d{9})?(?![\w]))"  # seconds to nanoseconds since the epoch
    r"|(?P<path>(?<![\w/\\])(?:[A-Za-z]:|~|\.{1,2})?(?:[/\\][\w.@+%-]{1,64}){1,32}[/\\]?)"
    r"|(?P<number>(?<!\w)[+-]?[A-Za-z]{0,2}\d{1,24}(?:[.,_]\d{1,24}){0,8}(?:%|st|nd|rd|th)?(?!\w))"
    r"|(?P<id>(?<![\w-])[\w-]{6,128}(?![\w-]))"
)

_COUNTER = re.compile(r"(?i)\s{0,2}(?:</total_tokens>|tokens? (?:left|remaining|used)\b)")

_FOLDER = re.compile(r"(?i)\b(?:working director(?:y|ies)|cwd|pwd|current director(?:y|ies)|workspace(?: folder)?)\b")

_GIT = re.compile(r"(?i)\bgit.?status|\bcurrent branch\b|\brecent commits\b|^on branch |\buntracked files\b")

_GIT_LINE = re.compile(
    r"(?i:\s{0,8}(?:[0-9a-f]{7,40}\s|\(clean\)|nothing to commit|(?:current|main) branch\b|(?:git )?status:"
    r"|recent commits|git user|on branch\b|your branch\b|changes (?:not|to)\b|untracked files"
    r"|(?:modified|new file|deleted|renamed):))"
    r"|\s{0,8}[MADRCUT?!]{1,2}\s{1,2}\S{1,300}(?: -> \S{1,300})?\s*\Z|\s{0,300}\Z"
)

_LINES = re.compile(rf"(?m)^[^\n]{{{MIN_LINE},}}")

_TODAY = re.compile(r"(?i)\b(?:today|now|date|time|datetime|timestamp|day|as of|current\w{0,8})\b")

_HAS_DIGIT = re.compile(r"\d")

_HAS_LETTER = re.compile(r"[A-Za-z]")


class Difference(NamedTuple):
    """One place where a text differs from an older one; lengths in characters of the new text."""

    at: int
    length: int  # 0 if the older text has more here
    kind: Kind | None  # None: it is no text that is known to change from request to request
    alike: int  # behind it, up to the next difference


def differences(new: str, old: str, now: float, only: Container[Kind | None] | None = None) -> Steps[list[Difference]]:
    """Where `new` differs from `old`, in order; what lies behind the last one that is looked at counts as different.

    `now`: seconds since the epoch, to know a date by. `only`: kinds; none are told if one is of another kind, and the
    rest is not looked at.
    """
    walk, places, unknown = _Walk(new, old, now), list[Difference](), 0
    here = there = common_start(new, 0, old, 0)
    for number in range(MAX_PLACES):
        if here == len(new) and there == len(old):
            break
        is_last = number == MAX_PLACES - 1 or unknown == MAX_UNKNOWN
        start, end, old_end, kind = yield from walk.difference(here, there, is_last=is_last)
        if only is not None and kind not in only:
            return []
        alike = common_start(new, end, old, old_end)
        unknown += kind is None
        places.append(Difference(start, end - start, kind, alike))
        here, there = end + alike, old_end + alike
        yield
    return places


def says_today(text: str, at: int) -> bool:
    """Whether the words before a date say that it is the time of the request, and not one that is asked about."""
    return _TODAY.search(text, max(0, at - CLOCK_BEFORE), at) is not None


def _date_at(text: str, at: int, now: float) -> Date | None:
    """The first date that ends at or behind `at` in the sentence around it."""
    start, end = sentence_start(text, at), _sentence_end(text, at)
    for months in (False, True):
        for date in dates_in(text[start:end], now, months=months):
            if start + date.end >= at:
                return date._replace(end=start + date.end)
    return None


def _sentence_end(text: str, at: int) -> int:
    """Where the line or sentence ends that goes on at `at`, as far as a window reaches."""
    end = min(len(text), at + BEHIND)
    found = SENTENCE_END.search(text, at, end)
    return found.start() if found is not None else end


class _Word(NamedTuple):
    start: int
    end: int
    kind: Kind


class _Walk:
    """Two texts side by side."""

    def __init__(self, new: str, old: str, now: float) -> None:
        self._new = new
        self._old = old
        self._now = now
        self._old_lines: dict[str, list[int]] | None = None

    def difference(self, here: int, there: int, *, is_last: bool) -> Steps[tuple[int, int, int, Kind | None]]:
        """Start and end of what differs in the new text, its end in the old one, and its kind."""
        new, old = self._new, self._old
        is_git = self._is_git(here, there)
        if not is_git and not is_last:
            if (ends := self._date_ends(here, there)) is not None:
                return here, *ends, "dates"
            yield
            words = _word_at(new, here), _word_at(old, there)
            if words[0] is not None and words[1] is not None and (kind := _kind_of(new, words[0], old, words[1])):
                # Both start before the difference, unless one of them begins there.
                return min(here, words[0].start), max(here, words[0].end), max(there, words[1].end), kind
        end, old_end = len(new), len(old)
        if not is_last:
            lines = yield from self._lines_of_old()
            if (ends := self._next_common_line(lines, here, there)) is not None:
                end, old_end = ends
        behind = common_end(new, here, end, old, there, old_end)
        return here, end - behind, old_end - behind, "git_status" if is_git else None

    def _date_ends(self, here: int, there: int) -> tuple[int, int] | None:
        """Where what differs ends in both texts, if that is a date and what changes with it in its sentence."""
        new, old = self._new, self._old
        dates = _date_at(new, here, self._now), _date_at(old, there, self._now)
        if dates[0] is None or dates[1] is None or dates[0].day == dates[1].day:
            return None
        end, old_end = max(here, dates[0].end), max(there, dates[1].end)
        if common_start(new, end, old, old_end) < BESIDE_DATE:
            last, old_last = _sentence_end(new, end), _sentence_end(old, old_end)
            behind = common_end(new, end, last, old, old_end, old_last)
            end, old_end = last - behind, old_last - behind
        return end, old_end

    def _is_git(self, here: int, there: int) -> bool:
        new, old = self._new, self._old
        if not all(_GIT_LINE.match(_line_at(text, at)) for text, at in ((new, here), (old, there))):
            return False
        return _GIT.search(new, max(0, here - GIT_BEFORE), here + BEHIND) is not None

    def _next_common_line(self, lines: dict[str, list[int]], here: int, there: int) -> tuple[int, int] | None:
        """Where the next line begins that both texts have, in each of them; `lines` are those of the old one."""
        new = self._new
        start = new.find("\n", here) + 1
        for _ in range(MAX_LINES):
            if not start:
                return None
            end = new.find("\n", start)
            line = new[start : end if end >= 0 else len(new)]
            if len(line) >= MIN_LINE and (known := lines.get(line)) is not None:
                following = bisect_left(known, there)
                if following < len(known):
                    return start, known[following]
            start = end + 1
        return None

    def _lines_of_old(self) -> Steps[dict[str, list[int]]]:
        if self._old_lines is None:
            lines, old, start = dict[str, list[int]](), self._old, 0
            while start < len(old):
                end = found if (found := old.find("\n", start + STEP_CHARACTERS)) >= 0 else len(old)
                for line in _LINES.finditer(old, start, end):
                    lines.setdefault(line[0], []).append(line.start())
                start = end
                yield
            self._old_lines = lines
        return self._old_lines


def _word_at(text: str, at: int) -> _Word | None:
    """The word of a known kind that holds the character at `at`, or ends there."""
    start = _word_boundary(text, max(0, at - BEFORE), at)
    for found in _WORDS.finditer(text, start, min(len(text), at + BEHIND)):
        if found.start() > at:
            return None
        if found.end() > at or (found.end() == at and found.start() < at):
            name = found.lastgroup
            kind: Kind | None
            if name == "id":
                kind = "uuid" if _HAS_DIGIT.search(found[0]) and _HAS_LETTER.search(found[0]) else None
            else:
                kind = name  # type: ignore[assignment]  # the groups are named after the kinds
            if kind is not None and (found.end() > at or not _begins_word(text, at)):
                return _Word(found.start(), found.end(), kind)
    return None


def _word_boundary(text: str, start: int, at: int) -> int:
    """The first place from `start` on where no word is cut; `at` if there is none."""
    return start if not start else next((i + 1 for i in range(start, at) if text[i].isspace()), at)


def _begins_word(text: str, at: int) -> bool:
    return at < len(text) and (text[at].isalnum() or text[at] in "/_-")


def _kind_of(new: str, here: _Word, old: str, there: _Word) -> Kind | None:
    """What two words that differ have in common; None if they are of different kinds."""
    kinds = {here.kind, there.kind}
    if kinds == {"uuid", "number"}:  # an id of digits alone
        return "uuid"
    if len(kinds) != 1:
        return None
    kind = here.kind
    if kind == "number" and any(_COUNTER.match(text, word.end) for text, word in ((new, here), (old, there))):
        return "token_counters"
    if kind == "path":
        line = new.rfind("\n", max(0, here.start - BEFORE), here.start) + 1
        if _FOLDER.search(new, max(line, here.start - BEFORE), here.start) is not None:
            return "working_directory"
    return kind


def _line_at(text: str, at: int) -> str:
    """The line around `at`, as far as a window reaches."""
    start = max(text.rfind("\n", max(0, at - BEFORE), at) + 1, at - BEFORE, 0)
    end = text.find("\n", at, at + BEHIND)
    return text[start : end if end >= 0 else at + BEHIND]


def common_start(left: str, start: int, right: str, other: int) -> int:
    """Length of what `left` from `start` on and `right` from `other` on begin with together."""
    most = min(len(left) - start, len(right) - other)
    done, step = 0, FIRST_STEP
    while done < most:
        step = min(step, most - done)
        if left[start + done : start + done + step] == right[other + done : other + done + step]:
            done += step
            step *= 2
        elif step == 1:
            break
        else:
            step //= 2
    return done


def common_end(left: str, start: int, end: int, right: str, other: int, other_end: int) -> int:
    """Length of what `left[start:end]` and `right[other:other_end]` end with together."""
    most = min(end - start, other_end - other)
    done, step = 0, FIRST_STEP
    while done < most:
        step = min(step, most - done)
        if left[end - done - step : end - done] == right[other_end - done - step : other_end - done]:
            done += step
            step *= 2
        elif step == 1:
            break
        else:
            step //= 2
    return done
