"""A bound on lines that any client can cause: the log must not fill, and what matters must not drown in it."""

from __future__ import annotations

import logging
import time

LINES = 5  # of one message in one period; the rest is counted
PERIOD_SECONDS = 60.0

MOST_MESSAGES = 256


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
