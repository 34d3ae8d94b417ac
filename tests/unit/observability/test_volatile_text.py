"""Where two texts differ, and whether that is text of a kind that changes from request to request."""

from __future__ import annotations

import random
import time

import pytest

from proxy.observability import volatile_text
from proxy.observability.volatile_text import MAX_PLACES, Difference, says_today
from tests.harness.steps import finished

NOW = 1795600000.0  # in November 2026


def differences(new: str, old: str) -> list[Difference]:
    return finished(volatile_text.differences(new, old, NOW))


RULES = " Keep clear of the bar.\nNever leave the channel without a pilot on board, and call the lock first.\n"

DATES = [
    ("2026-11-22", "2026-11-23"),
    ("2026-11-22T10:11:12Z", "2026-11-23T08:00:00Z"),
    ("2026/11/22", "2026/12/01"),
    ("2026-11", "2026-12"),
    ("11/22/2026", "11/23/2026"),
    ("22.11.2026", "1.12.2026"),
    ("22.11.2026, 18:05:33", "23.11.2026, 9:06:33"),
    ("22-Nov-2026", "23-Nov-2026"),
    ("Sun Nov 22 2026", "Mon Nov 23 2026"),
    ("Sun Nov 22 2026", "Sat Nov 28 2026"),
    ("Sun Nov 22 10:11:12 UTC 2026", "Mon Nov 23 10:11:12 UTC 2026"),
    ("Sun, 22 Nov 2026 10:11:12 GMT", "Mon, 23 Nov 2026 01:11:12 GMT"),
    ("Sun Nov 22 2026 10:11:12 GMT+0100 (CET)", "Mon Nov 23 2026 10:11:12 GMT+0100 (CET)"),
    ("November 22nd, 2026", "December 3rd, 2026"),
    ("Nov 2, 2026", "Nov 22, 2026"),
    ("22 Nov 2026", "23 Nov 2026"),
    ("the 22nd of November 2026", "the 23rd of November 2026"),
    ("Sunday, November 22, 2026", "Wednesday, November 25, 2026"),
    ("November 2026", "December 2026"),
    ("2026-11-22 (Sunday)", "2026-11-23 (Monday)"),
    ("2026年11月22日", "2026年11月23日"),
    ("今天是2026年11月22日星期日。", "今天是2026年11月25日星期三。"),
    ("mercredi 25 novembre 2026", "jeudi 26 novembre 2026"),
    ("noviembre de 2026", "diciembre de 2026"),
    ("٢٥ نوفمبر ٢٠٢٦", "٢٦ نوفمبر ٢٠٢٦"),
    ("1795600000", "1795690000"),  # a Unix time of another day
]

TIMES = [
    ("10:11", "10:12"),
    ("9:59", "10:00"),
    ("10:11", "10:11:05"),
    ("10:11 PM", "11:11 AM"),
    ("9 am", "10 am"),
    ("9:05 a.m.", "10:15 p.m."),
    ("2026-11-22 10:11", "2026-11-22 10:12"),
    ("2026-11-22T10:11:12.123456+01:00", "2026-11-22T10:11:13.523456+01:00"),
    ("20261122T101112Z", "20261122T111112Z"),
    ("22 November 2026 at 10:11 CET", "22 November 2026 at 10:12 CET"),
    ("Sun Nov 22 10:11:12 UTC 2026", "Sun Nov 22 11:51:12 UTC 2026"),
    ("10:11 Europe/Berlin", "10:12 Europe/Berlin"),
    ("1795342272", "1795342999"),
    ("1795342272123", "1795342999456"),
    ("1795342272.517", "1795342299.004"),
]

OTHERS = [
    ("3f2b8c1e-9d4a-4c6b-8f0e-5a7d1b2c3e4f", "a91c0d7e-1b2c-4d3e-9f8a-7b6c5d4e3f2a", "uuid"),
    ("deadbeef12345678", "cafebabe87654321", "uuid"),
    ("ses_dfde55eccffeiuAx", "ses_1fde55eccffeiuBx", "uuid"),
    ("17", "18", "number"),
    ("22/11/26", "23/11/26", "number"),  # which of these is a year, no rule knows
    ("v2026.11.22", "v2026.11.23", "number"),
    ("since 2026-11-22 by Ann", "since 2026-11-22 by Bo", None),
    ("9", "12", "number"),
    ("1,234.5", "1,235.5", "number"),
    ("v1.2.3", "v1.2.4", "number"),
    ("/srv/ann/notes", "/srv/bo/notes", "path"),
    ("C:\\Users\\ann", "C:\\Users\\bo", "path"),
    ("~/a", "~/b", "path"),
    ("Working directory: /srv/ann", "Working directory: /srv/bo", "working_directory"),
    ("cwd=/srv/ann", "cwd=/srv/bo", "working_directory"),
    ("17 tokens left", "9 tokens left", "token_counters"),
    ("<total_tokens>17</total_tokens>", "<total_tokens>9</total_tokens>", "token_counters"),
    ("apple", "orange", None),
    ("Good morning, Ann", "Good evening, Bo", None),
    ("2026-11-22", "a day in June", None),
    ("17", "/srv/ann", None),
]

CASES = [*((*pair, "dates") for pair in DATES), *((*pair, "times") for pair in TIMES), *OTHERS]


@pytest.mark.parametrize("head", ["", "You pilot ships. Today is ", "You pilot ships.\n"])
@pytest.mark.parametrize(("old", "new", "kind"), CASES)
def test_the_kind_of_what_differs_is_told_wherever_it_stands(head, old, new, kind):
    for one, other in ((old, new), (new, old)):
        found = differences(head + other + RULES, head + one + RULES)
        assert found[0].kind == kind
        assert len(head) <= found[0].at <= len(head) + len(other)
        if kind is not None:
            assert len(found) == 1 and found[0].alike >= len(RULES)
            assert found[0].at + found[0].length <= len(head) + len(other)


def test_several_places_are_told_one_by_one():
    texts = [
        f"It is {day}, {time}.{RULES}Session {name}.{RULES}The pilot is {pilot}.{RULES}"
        for day, time, name, pilot in (
            ("Sunday 2026-11-22", "9:05", "a1b2c3d4", "Ann"),
            ("Monday 2026-11-23", "9:46", "e5f6a7b8", "Bo"),
        )
    ]
    found = differences(*texts)
    assert [place.kind for place in found] == ["dates", "uuid", None]
    assert [place.alike for place in found] == [
        len(f".{RULES}Session "),
        len(f".{RULES}The pilot is "),
        len(f".{RULES}"),
    ]


def test_equal_texts_differ_nowhere_and_a_longer_one_at_its_end():
    assert differences(RULES, RULES) == [] == differences("", "")
    assert [(place.at, place.length) for place in differences(RULES + "More.", RULES)] == [(len(RULES), 5)]
    assert [(place.at, place.length) for place in differences(RULES, RULES + "More.")] == [(len(RULES), 0)]


GIT = "gitStatus: as it was.\n\nCurrent branch: {branch}\n\nStatus:\n{status}\n\nRecent commits:\n{commits}\n"


@pytest.mark.parametrize(
    "change",
    [
        {"status": " M src/tides.py\n?? notes/"},
        {"status": "M src/tides.py"},
        {"branch": "locks"},
        {"commits": "89abcde Locks\n1a2b3c4 Tides"},
        {"branch": "locks", "status": "R  a.py -> b.py", "commits": "89abcde Locks"},
    ],
)
def test_a_git_status_is_one_kind_whatever_changes_in_it(change):
    was = {"branch": "main", "status": "(clean)", "commits": "1a2b3c4 Tides"}
    texts = [f"{RULES}{GIT.format(**state)}{RULES}" for state in ({**was, **change}, was)]
    for found in (differences(*texts), differences(*reversed(texts))):
        assert {place.kind for place in found} == {"git_status"} and found[-1].alike >= len(RULES)


def test_a_date_behind_a_git_status_is_a_date():
    state = GIT.format(branch="main", status="(clean)", commits="1a2b3c4 Tides")
    texts = [f"{RULES}{state}\nToday's date: {day}\n{RULES}" for day in ("Mon Nov 23 2026", "Sun Nov 22 2026")]
    assert [place.kind for place in differences(*texts)] == ["dates"]


def test_lines_put_in_and_taken_out_leave_the_rest_alike():
    lines = [f"Rule {word}: keep clear of the {word} bar." for word in ("north", "south", "east", "west")]
    old, new = "\n".join(lines), "\n".join([*lines[:1], "Whistle before each bend.", *lines[1:3], "Anchor."])
    found = differences(new, old)
    assert [place.kind for place in found] == [None, None]
    assert found[0].alike >= len(lines[1]) + len(lines[2])


def test_a_date_says_whose_it_is():
    for words in ("Today is ", "Current time: ", "It is now ", "The date:\n", "timestamp="):
        assert says_today(words, len(words)), words
    for words in ("Tides on ", "the log of ", "x" * 100):
        assert not says_today(words, len(words)), words


def test_no_text_is_slow():
    """Long texts of what patterns are made of, 200 kB each; a busy machine may try three times."""
    draw, size = random.Random(3), 200_000
    atoms = ["1", "a", "-", "/a", "1.", "1,", "1:", "Nov ", "Nov 1 ", "12:34 ", "am ", "T1", "\n", "a\n", " ", "a-1"]
    atoms += ["1 tokens ", "git status\n", " M a\n", "UTC+", "(", "Europe/", "20261122T", "年", ", of ", "\ud800"]

    def seconds(new: str, old: str) -> float:
        began = time.process_time()
        assert len(differences(new, old)) <= MAX_PLACES
        return time.process_time() - began

    for atom in atoms:
        same = (atom * size)[:size]
        mixed = ["".join(draw.choices([atom, "x", str(i)], k=size // (len(atom) + 1))) for i in (1, 2)]
        for new, old in ((same[: size // 2] + "X" + same[size // 2 :], same), mixed, (mixed[0], same)):
            assert any(seconds(new, old) < 0.05 for _ in range(3)), atom
