"""Where a system prompt first tells a date or a time."""

from __future__ import annotations

import time

import pytest

from proxy.boundaries.dates import MIN_CHARACTERS, PIECE_CHARACTERS, SEARCHED, Dates, piece_of

RULES = "Answer from the harbour's rules alone, and name the rule that decides. " * 10


@pytest.mark.parametrize(
    "told",
    [
        "2026-11-22",
        "11/22/2026",
        "22.11.26",
        "Nov 22, 2026",
        "November 3",
        "22nd November 2026",
        "3. Dec 2026",
        "Sunday",
        "14:05",
        "2026-11-22 02:05:09 PM",  # Open WebUI's {{CURRENT_DATETIME}}
        "02:05:09 PM",  # and its {{CURRENT_TIME}}
        "2026-11-22 (Sunday)",  # LibreChat's {{current_date}}
        "2026-11-22 14:05:09 +01:00 (Sunday)",  # and its {{current_datetime}}
        "2026-11-22T14:05:09.123+01:00",  # n8n's {{ $now }}
    ],
)
def test_the_cut_lies_before_the_line_with_the_date(told: str) -> None:
    text = f"{RULES}\nToday is {told}, all day.\n{RULES}"
    assert text[: Dates().cut(b"k", text)] == f"{RULES}\n"


def test_in_a_long_line_the_cut_lies_before_the_date_itself() -> None:
    text = f"{RULES}It is 2026-11-22. {RULES}"
    assert text[: Dates().cut(b"k", text)] == f"{RULES}It is "


@pytest.mark.parametrize(
    "text",
    [
        RULES,  # none
        f"It is 2026-11-22.\n{RULES}",  # too little stands before it
        RULES[:MIN_CHARACTERS] + "Version 1.22.3, section 4.5, 12 may apply; the monday rule is out.",
        "x" * SEARCHED + " 2026-11-22",
    ],
)
def test_no_cut(text: str) -> None:
    assert Dates().cut(b"k", text) == 0


def test_a_text_is_searched_once() -> None:
    dates = Dates()
    assert dates.cut(b"k", f"{RULES}\n2026-11-22") == len(RULES) + 1
    assert dates.cut(b"k", RULES) == len(RULES) + 1  # by its key, whatever is shown


def test_the_place_before_a_date_is_named_by_the_tokens_that_nothing_behind_it_can_change() -> None:
    dates = Dates()
    assert dates.entry(b"r", b"k") is None
    assert dates.learn(b"r", b"k", range(100)) == "first:" + ",".join(map(str, range(33, 97)))
    assert dates.entry(b"r", b"k") == dates.learn(b"r", b"k", range(100)) != dates.entry(b"other", b"k")
    assert dates.learn(b"r", b"k", range(9)) == dates.entry(b"r", b"k") == ""  # too few to name a place


def test_of_the_text_before_a_date_its_end_alone_is_tokenised() -> None:
    assert piece_of(f"{RULES}\n") == f"{RULES}\n"[-PIECE_CHARACTERS:]


def test_no_text_takes_long() -> None:
    began = time.process_time()
    for text in ("1/" * 40_000, "1 " * 40_000, "12:" * 30_000, "Jan" * 30_000, "1.1.1" * 20_000):
        Dates().cut(b"k", text)
    assert time.process_time() - began < 5  # quadratic patterns take minutes
