"""Text from outside, as it may stand in a log or on a terminal: what a terminal would obey is written as an escape.

Names from workers, files and clients could otherwise clear an operator's screen, or forge a line of a log. Lines that
any client can cause are bounded in number: the log must not fill, and what matters must not drown in it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

LINES = 5  # of one message in one period; the rest is counted
PERIOD_SECONDS = 60.0

MOST_MESSAGES = 256


def printable(text: object) -> str:
    """In one line, with an escape in place of each character that cannot be shown."""
    shown = str(text)
    return shown if shown.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def printable_lines(text: object) -> str:
    """The same of a text of our own in several lines; names in it are `printable` already."""
    return "\n".join(map(printable, str(text).split("\n")))


class PrintableFormatter(logging.Formatter):
    """A log's lines, of which each is one record, or one line of its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message.rstrip("\n"))
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return printable_lines(super().formatException(ei))


class LogLimit(logging.Filter):
    """Lets a few of uvicorn's warnings and errors through in each period, and says how many were left out."""

    def __init__(self) -> None:
        super().__init__("uvicorn")
        self._periods: dict[str, list[float]] = {}  # by message, before its arguments: end, lines

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or not super().filter(record):
            return True
        message, now = str(record.msg), time.monotonic()
        end, lines = self._periods.get(message, (0.0, 0))
        if now < end:
            self._periods[message][1] += 1
            return lines < LINES
        if message not in self._periods and len(self._periods) >= MOST_MESSAGES:
            self._periods.clear()
        self._periods[message] = [now + PERIOD_SECONDS, 1]
        if lines > LINES:
            record.msg = f"{record.getMessage()} ({int(lines) - LINES} more of these were left out)"
            record.args = ()
        return True
