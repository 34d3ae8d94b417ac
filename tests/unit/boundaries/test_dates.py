"""Where a system prompt first tells a date, in any language."""

from __future__ import annotations

import pytest

from proxy.boundaries.dates import (
    Dates,
    dates_in,
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


def told(text: str, now: float = NOW, *, months: bool = False) -> list[tuple[str, str]]:
    """Each date as it stands in the text, and its day."""
    return [(text[date.start : date.end], date.day) for date in dates_in(text, now, months=months)]


def test_a_word_and_a_year_are_a_date_only_to_who_asks_for_months():
    for text, months in (("November 2026", ["November 2026"]), ("Nov. 2026", ["Nov. 2026"]), ("It 2026", [])):
        assert told(f"In {text} then") == []
        assert [date for date, _ in told(f"- {text} then", months=True)] == months
    assert [date for date, _ in told("In November de 2026.", months=True)] == ["November de 2026"]
    assert told("Version 2026.1", months=True) == []
