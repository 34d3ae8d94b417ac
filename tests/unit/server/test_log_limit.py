"""What any client can cause fills no log; what else there is passes."""

from __future__ import annotations

import logging

import pytest

from proxy.server import log_limit
from proxy.server.log_limit import LINES, MOST_MESSAGES, PERIOD_SECONDS, LogLimit


def record(message: str, *args: object, name: str = "uvicorn.error", level: int = logging.WARNING):
    return logging.LogRecord(name, level, "", 0, message, args, None)


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(log_limit.time, "monotonic", lambda: now[0])
    return now


def test_a_few_lines_of_a_message_pass_and_the_next_period_says_how_many_did_not(clock):
    limit = LogLimit()
    assert [limit.filter(record("from %s", number)) for number in range(LINES + 7)] == [True] * LINES + [False] * 7
    assert limit.filter(record("another"))
    clock[0] += PERIOD_SECONDS
    again = record("from %s", 3)
    assert limit.filter(again) and again.getMessage() == "from 3 (7 more of these were left out)"
    assert limit.filter(record("from %s", 4))


def test_many_different_messages_fill_no_memory():
    limit = LogLimit()
    for number in range(3 * MOST_MESSAGES):
        assert limit.filter(record(f"{number}")) and len(limit._periods) <= MOST_MESSAGES


def test_a_message_that_is_known_costs_no_other_its_count(clock):
    limit = LogLimit()
    for number in range(MOST_MESSAGES):
        assert all(limit.filter(record(f"{number}")) for _ in range(LINES))
    assert not limit.filter(record("0"))
    clock[0] += PERIOD_SECONDS
    assert limit.filter(record("0"))
    clock[0] -= 1
    assert not limit.filter(record("1"))  # its period is not over


@pytest.mark.parametrize(
    ("name", "level", "is_limited"),
    [
        ("uvicorn", logging.WARNING, True),
        ("uvicorn.error", logging.ERROR, True),
        ("uvicornx", logging.WARNING, False),
        ("uvicorn.error", logging.WARNING - 1, False),
    ],
)
def test_warnings_and_worse_of_uvicorn_are_limited(clock, name, level, is_limited):
    limit = LogLimit()
    passed = [limit.filter(record("x", name=name, level=level)) for _ in range(LINES + 1)]
    assert passed == [True] * LINES + [not is_limited]
