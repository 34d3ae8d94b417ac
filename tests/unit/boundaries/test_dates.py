"""Where a system prompt first tells a date, in any language."""

from __future__ import annotations

import time

import pytest

from proxy.boundaries.dates import PIECE_CHARACTERS, SEARCHED, Dates, piece_of

RULES = "Answer from the harbour's rules alone, and name the rule that decides. " * 10


NOW = 1795600000.0  # in November 2026


def found(now: float = NOW) -> Dates:
    return Dates(lambda: now)


DATES = [
    "2026-11-25",
    "2026/11/25",
    "2026.11.25",
    "11/25/2026",
    "25.11.2026",
    "25. 11. 2026",
    "25-Nov-2026",
    "Nov-25-2026",
    "25NOV2026",
    "[25/Nov/2026:10:11:12 +0000]",
    "2026-11",
    "20261125",
    "20261125T101112Z",
    "25112026",
    "1795600000",  # seconds since the epoch
    "1795600000.123",
    "1795600000123",
    "2026-11-25T10:11:12.123+01:00",
    "Wed Nov 25 2026",
    "Wed Nov 25 10:11:12 2026",
    "Wed, 25 Nov 2026 10:11:12 GMT",
    "november 25, 2026",
    "November 25th,2026",
    "25 de noviembre de 2026",
    "mercredi 25 novembre 2026",
    "25. November 2026",
    "25 ноября 2026 г.",
    "25 Νοεμβρίου 2026",
    "25 בנובמבר 2026",
    "٢٥ نوفمبر ٢٠٢٦",
    "٢٥\u200f/١١\u200f/٢٠٢٦",
    "२५ नवंबर २०२६",
    "25 พฤศจิกายน ค.ศ. 2026",
    "ngày 25 tháng 11 năm 2026",
    "今天是2026年11月25日星期三",
    "２０２６年１１月２５日",
    "오늘은 2026년 11월 25일",
    "2026. 11. 25.",
    "2026. november 25.",
    "2026 m. lapkričio 25 d.",
    "2027-01-01",
    "2025-12-31",
    '{"date":"2026-11-25"}',
    "2026-11-22 02:05:09 PM",  # Open WebUI's {{CURRENT_DATETIME}}
    "2026-11-22 (Sunday)",  # LibreChat's {{current_date}}
]


@pytest.mark.parametrize("told", DATES)
def test_the_cut_lies_before_the_line_or_sentence_with_the_date(told: str) -> None:
    text = f"{RULES}\nToday: {told} all day.\n{RULES}"
    assert text[: found().cut(b"k", text)] == f"{RULES}\n"
    text = f"{RULES}Today: {told} all day. {RULES}"
    assert text[: found().cut(b"k", text)] == RULES
    much_later = NOW + 3 * 366 * 86_400
    assert found(much_later).cut(b"k", text) == 0


def test_an_abbreviated_day_or_month_ends_no_sentence() -> None:
    text = f"{RULES}It is Wed. Nov. 25, 2026. {RULES}"
    assert text[: found().cut(b"k", text)] == RULES


@pytest.mark.parametrize(
    "told",
    [
        "2026",
        "port 2026",
        "2026 tokens",
        "v2026.1",
        "v2026.11.25",
        "Version 2026.1",
        "2026.1.3",
        "1.2026.3",
        "3.2026",
        "2025-2026",
        "© 2026 Harbour Board, 12 Quay Street",
        "© 2020-2026, 3 authors",
        "Copyright (c) 2026 by 3 authors",
        "open 20:26 to 22:30",
        "gpt-4o-2026-08-06",
        "claude-opus-4-5-20251101",
        "gpt-5-2026-08-07",
        "/logs/2026/11/25",
        "CVE-2026-12",
        "line 2026:12",
        "4,202,612",
        "2019-11-25",
        "2569-11-25",  # a Buddhist year, and a year of an era:
        "令和8年11月25日",
        "1234567890",
        "1600000000",
        "Sunday",
        "14:05",
        "22.11.26",
    ],
)
def test_no_version_no_opening_hour_and_no_copyright_line_is_a_date(told: str) -> None:
    assert found().cut(b"k", f"{RULES}\nThe note: {told}\n{RULES}") == 0


@pytest.mark.parametrize(
    "text",
    [
        RULES,  # none
        f"It is 2026-11-22.\n{RULES}",  # too little stands before it
        "x" * SEARCHED + " 2026-11-22",
    ],
)
def test_no_cut(text: str) -> None:
    assert found().cut(b"k", text) == 0


def test_a_text_is_searched_once() -> None:
    dates = found()
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
    atoms = ["1/", "1 ", "12:", "Jan", "1.1.1", "2026 ", "2026-", "/2026", "2026x", "12 a 10:11 ", "٢", "25 Nov "]
    for atom in atoms:
        found().cut(b"k", atom * (SEARCHED // len(atom)))
    assert time.process_time() - began < 5  # quadratic patterns take minutes
