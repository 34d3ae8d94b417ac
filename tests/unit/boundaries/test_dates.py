"""Where a system prompt first tells a date, in any language."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.boundaries.dates import SEARCHED, Dates, dates_in

RULES = "Answer from the harbour's rules alone, and name the rule that decides. " * 10


NOW = 1795600000.0  # in November 2026


def found(now: float = NOW) -> Dates:
    return Dates(lambda: now)


DATES, NO_DATES = (
    part.splitlines()[1:] for part in (Path(__file__).parent / "dates.txt").read_text().removeprefix("#").split("\n#")
)


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


@pytest.mark.parametrize("text", NO_DATES)
def test_what_only_looks_like_a_date_cuts_nothing(text: str) -> None:
    assert found().cut(b"k", f"{RULES}\nThe note: {text}\n{RULES}") == 0 and told(text) == []


@pytest.mark.parametrize(
    ("text", "day"),
    [
        *((date, "20261125") for date in ("20261125", "202611251011", "20261125101112")),
        *((date, "20782") for date in ("1795564800", "1795651199", "1795600000123", "1795600000123456789")),
        ("1795564799", "20781"),  # the last second of the day before
        ("2025-01-01", "2025-01-01"),
        ("2027-12-31", "2027-12-31"),
    ],
)
def test_a_date_has_one_day_at_any_time_of_it(text, day):
    assert told(text) == [(text, day)]
    clocks = ("10:11", "1:02", "10:11:12", "23:59:59.123456789")
    assert len({told(f"Wed Nov 25 {clock} 2026")[0][1] for clock in clocks}) == 1


def test_the_place_before_a_date_is_named_by_the_tokens_that_nothing_behind_it_can_change() -> None:
    dates = Dates()
    assert dates.learn(b"r", b"k", range(100)) == "first:" + ",".join(map(str, range(33, 97)))
    assert dates.entry(b"r", b"k") == dates.learn(b"r", b"k", range(100)) != dates.entry(b"other", b"k")
    assert dates.learn(b"r", b"k", range(9)) == dates.entry(b"r", b"k") == ""  # too few to name a place


def test_no_text_takes_long() -> None:
    """A pattern that is quadratic in its text takes minutes."""
    for atom in ("1/", "1 ", "12:", "1.1.1", "2026 ", "2026-", "/2026", "12 a 10:11 ", "٢", "25 Nov "):
        found().cut(b"k", atom * (SEARCHED // len(atom)))
