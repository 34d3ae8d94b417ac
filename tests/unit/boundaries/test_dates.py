"""Where a system prompt first tells a date, in any language."""

from __future__ import annotations

import time

import pytest

from proxy.boundaries.dates import (
    LINE_CHARACTERS,
    MAX_IDS,
    MAX_TEXTS,
    MIN_CHARACTERS,
    MIN_IDS,
    PIECE_CHARACTERS,
    SEARCHED,
    UNSURE_IDS,
    Date,
    Dates,
    dates_in,
    piece_of,
    sentence_start,
)

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


def told(text: str, now: float = NOW, *, months: bool = False) -> list[tuple[str, str]]:
    """Each date as it stands in the text, and its day."""
    return [(text[date.start : date.end], date.day) for date in dates_in(text, now, months=months)]


def test_all_dates_of_a_text_are_found_in_order_with_their_places():
    text = "From 2026-11-25 to 26.11.2026; gpt-4o-2026-08-06 knows 2027."
    assert list(dates_in(text, NOW)) == [Date(5, 15, "2026-11-25"), Date(19, 29, "26.11.2026")]
    assert told("") == told("no date") == told("2019-11-25, 2026-11-25")[:-1] == []


@pytest.mark.parametrize(
    ("text", "day"),
    [
        *((date, "20261125") for date in ("20261125", "202611251011", "20261125101112")),
        ("25112026", "25112026"),
        *((date, "20782") for date in ("1795600000", "1795600000123", "1795600000123456", "1795600000123456789")),
        ("1795564800", "20782"),  # the first second of that day, and the last
        ("1795651199", "20782"),
        ("1795564799", "20781"),
        ("2026-11-25", "2026-11-25"),
    ],
)
def test_a_date_has_one_day_at_any_time_of_it(text, day):
    assert told(text) == [(text, day)]


def test_a_time_of_day_makes_no_other_day():
    days = {told(f"Wed Nov 25 {clock} 2026")[0][1] for clock in ("10:11", "1:02", "10:11:12", "23:59:59.123456789")}
    assert len(days) == 1


@pytest.mark.parametrize(
    ("text", "is_near"),
    [
        ("2025-01-01", True),
        ("2024-12-31", False),
        ("2027-12-31", True),
        ("2028-01-01", False),
        ("1735689600", True),  # the first second of 2025
        ("1729999999", False),  # in October 2024
        ("1800000000", True),  # in January 2027
        ("1830000000", True),  # in December 2027
        ("1840000000", False),  # in April 2028
    ],
)
def test_last_year_and_next_year_are_near(text, is_near):
    assert bool(told(text)) == is_near


def test_a_word_and_a_year_are_a_date_only_to_who_asks_for_months():
    for text, months in (("November 2026", ["November 2026"]), ("Nov. 2026", ["Nov. 2026"]), ("It 2026", [])):
        assert told(f"In {text} then") == []
        assert [date for date, _ in told(f"- {text} then", months=True)] == months
    assert [date for date, _ in told("In November de 2026.", months=True)] == ["November de 2026"]
    assert told("Version 2026.1", months=True) == []


def test_a_copyright_counts_for_its_line_and_for_a_while():
    assert told("© 2026-11-25") == told("Copyright of 2026-11-25") == []
    assert len(told("© us\n2026-11-25")) == 1
    for between, dates in ((LINE_CHARACTERS - 2, 0), (LINE_CHARACTERS - 1, 0), (LINE_CHARACTERS, 1)):
        assert len(told("©" + " " * between + "2026-11-25")) == dates, between


def test_a_date_behind_a_name_or_another_date_is_found():
    text = "/logs/2026/11/25 of 2026-11-24, and 2026-11-23"
    assert [date for date, _ in told(text)] == ["2026-11-24", "2026-11-23"]
    assert [date for date, _ in told("x" * 300 + " 2026-11-25 " + "y" * 300 + " 24.11.2026")] == [
        "2026-11-25",
        "24.11.2026",
    ]


@pytest.mark.parametrize(
    ("text", "at", "start"),
    [
        ("abc", 2, 0),
        ("", 0, 0),
        ("One day. Two", 10, 0),  # an abbreviation, as far as it shows
        ("It is morning. Two", 16, 15),
        ("Now!  Two", 7, 5),
        ("a\nb\nc", 4, 4),
        ("a\nb\nc", 3, 2),
        ("一。二", 2, 2),
        ("x" * 300, 290, 290 - LINE_CHARACTERS),
        ("\n" + "x" * LINE_CHARACTERS, LINE_CHARACTERS, 1),
        ("\n" + "x" * LINE_CHARACTERS, LINE_CHARACTERS + 1, 1),
    ],
)
def test_a_line_or_sentence_begins_behind_the_last_end_before_a_place(text, at, start):
    assert sentence_start(text, at) == start


@pytest.mark.parametrize(("before", "cut"), [(MIN_CHARACTERS - 1, 0), (MIN_CHARACTERS, MIN_CHARACTERS)])
def test_a_beginning_before_a_date_is_worth_a_state_from_some_length_on(before, cut):
    assert found().cut(b"k", "x" * (before - 1) + "\n2026-11-25") == cut


def test_so_many_characters_are_searched_and_no_more():
    for end, is_found in ((SEARCHED, True), (SEARCHED + 1, False)):
        text = "x" * (end - len("\n25.11.2026")) + "\n25.11.2026"
        assert bool(found().cut(b"k", text)) == is_found


@pytest.mark.parametrize("ids", [2 * UNSURE_IDS + MIN_IDS - 1, 2 * UNSURE_IDS + MIN_IDS, 2 * UNSURE_IDS + MAX_IDS + 1])
def test_a_place_is_named_by_so_few_tokens_and_by_no_more_than_so_many(ids):
    entry = Dates().learn(b"r", b"k", range(ids))
    sure = list(range(UNSURE_IDS, ids - UNSURE_IDS))[-MAX_IDS:]
    assert entry == ("first:" + ",".join(map(str, sure)) if len(sure) >= MIN_IDS else "")


def test_what_is_remembered_of_texts_and_of_places_is_bounded_and_the_least_recently_used_goes():
    dates = found()
    text = f"{RULES}\n2026-11-22"
    for number in range(MAX_TEXTS):
        dates.cut(b"%d" % number, text)
        dates.learn(b"r", b"%d" % number, range(100))
    assert dates.cut(b"0", "") and dates.entry(b"r", b"0")
    dates.cut(b"new", text)
    dates.learn(b"r", b"new", range(100))
    assert dates.cut(b"0", "") and dates.entry(b"r", b"0")
    assert dates.cut(b"1", "") == 0 and dates.entry(b"r", b"1") is None
