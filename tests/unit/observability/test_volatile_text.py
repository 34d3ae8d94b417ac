"""What two texts first differ in: text of a kind that changes from request to request by itself, or not."""

from __future__ import annotations

import random
import time

import pytest

from proxy.boundaries.token_ids import common_prefix
from proxy.observability.volatile_text import alike, kind_of
from tests.harness.steps import finished

NOW = 1795600000.0  # in November 2026


def kind(new: str, old: str) -> str | None:
    return finished(kind_of(new, old, common_prefix(new, old), NOW))


RULES = " Keep clear of the bar.\nNever leave the channel without a pilot on board, and call the lock first.\n"

DATES = [
    ("2026-11-22", "2026-11-23"),
    ("11/22/2026", "11/23/2026"),
    ("noviembre de 2026", "diciembre de 2026"),
    ("22.11.2026", "1.12.2026"),
    ("November 22nd, 2026", "December 3rd, 2026"),
    ("the 22nd of November 2026", "the 23rd of November 2026"),
    ("今天是2026年11月22日星期日。", "今天是2026年11月25日星期三。"),
    ("٢٥ نوفمبر ٢٠٢٦", "٢٦ نوفمبر ٢٠٢٦"),
    ("1795600000", "1795690000"),  # a Unix time of another day
]

TIMES = [
    ("9:59", "10:00"),
    ("10:11", "10:11:05"),
    ("9:05 a.m.", "10:15 p.m."),
    ("2026-11-22T10:11:12.123456+01:00", "2026-11-22T10:11:13.523456+01:00"),
    ("Sun Nov 22 10:11:12 UTC 2026", "Sun Nov 22 11:51:12 UTC 2026"),
    ("10:11 Europe/Berlin", "10:12 Europe/Berlin"),
    ("1795342272.517", "1795342299.004"),
]

OTHERS = [
    ("3f2b8c1e-9d4a-4c6b-8f0e-5a7d1b2c3e4f", "a91c0d7e-1b2c-4d3e-9f8a-7b6c5d4e3f2a", "uuid"),
    ("ses_dfde55eccffeiuAx", "ses_1fde55eccffeiuBx", "uuid"),
    ("22/11/26", "23/11/26", "number"),  # which of these is a year, no rule knows
    ("v2026.11.22", "v2026.11.23", "number"),
    ("since 2026-11-22 by Ann", "since 2026-11-22 by Bo", None),
    ("C:\\Users\\ann", "C:\\Users\\bo", "path"),
    ("Working directory: /srv/ann", "Working directory: /srv/bo", "working_directory"),
    ("<total_tokens>17</total_tokens>", "<total_tokens>9</total_tokens>", "token_counters"),
    ("2026-11-22", "a day in June", None),
    ("17", "/srv/ann", None),
]

CASES = [*((*pair, "dates") for pair in DATES), *((*pair, "times") for pair in TIMES), *OTHERS]


@pytest.mark.parametrize("head", ["", "You pilot ships. Today is "])
@pytest.mark.parametrize(("old", "new", "expected"), CASES)
def test_the_kind_of_what_differs_is_told_wherever_it_stands(head, old, new, expected):
    one, other = head + old + RULES, head + new + RULES
    assert kind(other, one) == kind(one, other) == expected


GIT = "gitStatus: as it was.\n\nCurrent branch: {branch}\n\nStatus:\n{status}\n\nRecent commits:\n{commits}\n"


@pytest.mark.parametrize(
    "change",
    [
        {"status": " M src/tides.py\n?? notes/"},
        {"commits": "89abcde Locks\n1a2b3c4 Tides"},
        {"branch": "locks", "status": "R  a.py -> b.py", "commits": "89abcde Locks"},
    ],
)
def test_a_git_status_is_one_kind_whatever_changes_in_it(change):
    was = {"branch": "main", "status": "(clean)", "commits": "1a2b3c4 Tides"}
    one, other = (f"{RULES}{GIT.format(**state)}{RULES}" for state in ({**was, **change}, was))
    assert kind(one, other) == kind(other, one) == "git_status"


def test_no_text_is_slow():
    """Long texts of what patterns are made of, 200 kB each; a busy machine may try three times."""
    draw, size = random.Random(3), 200_000
    atoms = ["1", "a", "-", "/a", "1.", "1,", "1:", "Nov ", "Nov 1 ", "12:34 ", "am ", "T1", "\n", "a\n", " ", "a-1"]
    atoms += ["1 tokens ", "git status\n", " M a\n", "UTC+", "(", "Europe/", "20261122T", "年", ", of ", "\ud800"]
    atoms += ["cwd ", "cwd/a"]

    def seconds(new: str, old: str) -> float:
        began = time.process_time()
        at = common_prefix(new, old)
        alike(new, old, at)
        finished(kind_of(new, old, at, NOW))
        return time.process_time() - began

    for atom in atoms:
        same = (atom * size)[:size]
        mixed = ["".join(draw.choices([atom, "x", str(i)], k=size // (len(atom) + 1))) for i in (1, 2)]
        for new, old in ((same[: size // 2] + "X" + same[size // 2 :], same), mixed, (mixed[0], same)):
            assert any(seconds(new, old) < 0.02 for _ in range(3)), atom
